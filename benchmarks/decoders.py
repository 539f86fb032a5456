"""How fast a small decoder answers, in which format, against whom: each candidate in its process, taking turns.

    python benchmarks/decoders.py [--candidate mhsa-int4 genai-int4 ...] [--json FILE]

A Llama of SmolLM-135M's shape with random weights, the same in every engine. onnxruntime-genai's builder writes its
files (float32, four bits), and onnxruntime's `quantize_dynamic` one of eight bits, which ours compile, too: two
artifacts each, for any length and for a token, whose caches are written in place. OpenVINO has it in its own operators
with its caches as states (openvino_llama.py), llama.cpp in GGUF (gguf_llama.py). Timed are prompts, and the tokens
behind one: the greedy next token is fed back. Logits behind the first prompt, and behind as many tokens that follow one
by one, are held against PyTorch's in float32: `logits` is the largest difference by their spread. An engine that is not
installed is named below the table, with the way to install it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Protocol

import msgspec
import numpy as np
from figures import TurnFigures, command_line, show, write
from processes import Times, Turn, answer_turns, rounds, started
from rich.table import Table

from mhsa_compile.errors import InstallationError
from mhsa_compile.hardware.environment import require

WORDS, LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, HIDDEN = 49152, 30, 9, 3, 64, 576, 1536
CAPACITY, ROPE_THETA, NORM_EPSILON = 2048, 100000.0, 1e-6
GENERATED = 32
"""Tokens of a turn behind a prompt."""
FORCED = 4
"""Tokens behind the first prompt whose logits are compared, the same for all."""
SITUATIONS = ("prompt 128", "prompt 512", "behind 128", "behind 1024")
FIRST_LOGITS, PLAIN = "logits.npy", "-plain"


@dataclass
class Figures(TurnFigures):
    """Seconds a token, by candidate and situation."""

    logits: dict[str, float] = field(default_factory=dict, kw_only=True)
    mebibytes: dict[str, float] = field(default_factory=dict, kw_only=True)
    resolved: dict[str, str] = field(default_factory=dict, kw_only=True)
    """What engines chose by themselves."""


def prompt(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(1, WORDS, length).astype(np.int64)


# The process of one candidate


class Engine(Protocol):
    def reset(self) -> None: ...

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        """The logits behind the tokens."""
        ...


class Whole:
    """The builder's file as two artifacts; caches of a fixed capacity are written in place."""

    def __init__(self, folder: Path, form: str, threads: int) -> None:
        if not (folder / f"{form}.mhsa").exists():
            require("onnxruntime_genai", extra="decoders")  # whose builder writes the file
        import mhsa_compile as mhsa

        self._many, self._one = (mhsa.load(folder / f"{form}{n}.mhsa", threads=threads) for n in ("", "-1"))
        names = [f"past_key_values.{i}.{part}" for i in range(LAYERS) for part in ("key", "value")]
        caches = {name: np.zeros((1, KV_HEADS, CAPACITY, HEAD_DIM), np.float32) for name in names}
        self._mask, self._ids, self._length = np.zeros((1, CAPACITY), np.int64), np.zeros((1, 1), np.int64), 0
        self._inputs = {"attention_mask": self._mask, **caches}
        self._step = self._one.bind(input_ids=self._ids, **self._inputs)

    def reset(self) -> None:
        self._mask[:], self._length = 0, 0

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        end = self._length + len(tokens)
        self._mask[0, self._length : end], self._length = 1, end
        if len(tokens) == 1:
            self._ids[0, 0] = tokens[0]
            outputs = self._step()
        else:
            outputs = self._many(input_ids=tokens[None], **self._inputs)
        return np.asarray(outputs[0]).reshape(-1, WORDS)[-1]


class Genai:
    """onnxruntime-genai on its own file."""

    def __init__(self, folder: Path, form: str, threads: int) -> None:
        require("onnxruntime_genai", extra="decoders")
        import onnxruntime_genai

        self._library = onnxruntime_genai
        config = onnxruntime_genai.Config(str(folder / form))
        options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}
        config.overlay(msgspec.json.encode(options).decode())
        self._model = onnxruntime_genai.Model(config)

    def reset(self) -> None:
        parameters = self._library.GeneratorParams(self._model)
        parameters.set_search_options(max_length=CAPACITY, do_sample=False)
        self._generator = self._library.Generator(self._model, parameters)

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        self._generator.append_tokens(tokens.astype(np.int32))
        return np.asarray(self._generator.get_logits()).reshape(-1, WORDS)[-1]


class OpenVino:
    """OpenVINO with caches as states: as it comes, which decides what is multiplied and stored in, or in float32."""

    def __init__(self, folder: Path, form: str, threads: int) -> None:
        require("openvino", extra="bench")
        import openvino
        from openvino_llama import Sizes, stateful_llama
        from safetensors.numpy import load_file

        sizes = Sizes(LAYERS, HEADS, KV_HEADS, HEAD_DIM, ROPE_THETA, NORM_EPSILON)
        model = stateful_llama(load_file(folder / "hf" / "model.safetensors"), sizes)
        settings = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": threads}
        if form == "float32":
            settings |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        compiled = openvino.Core().compile_model(model, "CPU", settings)
        words = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        kinds = [op.rt_info["layerType"].value for op in compiled.get_runtime_model().get_ops()]
        if kinds.count("ScaledDotProductAttention") != LAYERS or kinds.count("Concatenation") >= 2 * LAYERS:
            raise RuntimeError(f"OpenVINO appends to its caches outside of attention: {Counter(kinds)}")
        chosen = ", ".join(f"{word} {compiled.get_property(word).to_string()}" for word in words)
        (folder / f"openvino-{form}.resolved").write_text(chosen)
        self._request, self._length = compiled.create_infer_request(), 0

    def reset(self) -> None:
        self._request.reset_state()
        self._length = 0

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        begin, self._length = self._length, self._length + len(tokens)
        feeds = {
            "input_ids": tokens[None],
            "position_ids": np.arange(begin, self._length)[None],
            "attention_mask": np.ones((1, self._length), np.int64),
            "beam_idx": np.zeros(1, np.int32),
        }
        return np.asarray(self._request.infer(feeds, share_inputs=True)[0]).reshape(WORDS)


class LlamaCpp:
    """llama.cpp through its Python package's bindings; the cache is float16, or float32 beside weights of it. A form
    that ends in "plain" goes without what llama.cpp repacks weights for: its code for matrix tiles among it."""

    def __init__(self, folder: Path, form: str, threads: int) -> None:
        if find_spec("llama_cpp") is None:
            way = "Run: pip install llama-cpp-python (it compiles llama.cpp: a quarter of an hour of one CPU)."
            raise InstallationError("installation", "llama_cpp", "no llama_cpp", way)
        require("gguf", extra="gguf")
        import llama_cpp

        self._library = llama_cpp
        self._silence = llama_cpp.llama_log_callback(lambda *words: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path, options = str(_gguf(folder, form)).encode(), llama_cpp.llama_model_default_params()
        options.use_extra_bufts = not form.endswith(PLAIN)
        model, settings = llama_cpp.llama_model_load_from_file(path, options), llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = CAPACITY, CAPACITY, 512
        settings.n_threads = settings.n_threads_batch = threads
        if form == "float32":
            settings.type_k = settings.type_v = llama_cpp.GGML_TYPE_F32
        self._context = llama_cpp.llama_init_from_model(model, settings)

    def reset(self) -> None:
        self._library.llama_memory_clear(self._library.llama_get_memory(self._context), False)

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        library, ids = self._library, (ctypes.c_int32 * len(tokens))(*tokens.tolist())
        failed = library.llama_decode(self._context, library.llama_batch_get_one(ids, len(tokens)))
        if failed:
            raise RuntimeError(f"llama_decode ended with {failed}")
        return np.ctypeslib.as_array(library.llama_get_logits_ith(self._context, -1), (WORDS,))


class Torch:
    """transformers with SDPA, or with ours in it: attention, linears, linears of four bits."""

    def __init__(self, folder: Path, form: str, threads: int, linears: bool | str = False) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        dtype = getattr(torch, form)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder / "hf", dtype=dtype, attn_implementation="sdpa"
        ).eval()
        if linears:
            import mhsa_compile as mhsa

            mhsa.accelerate(self._model, linears=linears)

    def reset(self) -> None:
        from transformers.cache_utils import DynamicCache

        self._past = DynamicCache(config=self._model.config)

    def feed(self, tokens: np.ndarray) -> np.ndarray:
        import torch

        with torch.no_grad():
            ids = torch.from_numpy(tokens[None])
            outputs = self._model(input_ids=ids, past_key_values=self._past, use_cache=True, logits_to_keep=1)
        return np.asarray(outputs.logits[0, -1].float())


ENGINES: dict[str, Callable[[Path, int], Engine]] = {
    "torch-float32": lambda folder, threads: Torch(folder, "float32", threads),
    "torch-bfloat16": lambda folder, threads: Torch(folder, "bfloat16", threads),
    "genai-float32": lambda folder, threads: Genai(folder, "fp32", threads),
    "genai-int8": lambda folder, threads: Genai(folder, "int8", threads),
    "genai-int4": lambda folder, threads: Genai(folder, "int4", threads),
    "openvino-float32": lambda folder, threads: OpenVino(folder, "float32", threads),
    "openvino-default": lambda folder, threads: OpenVino(folder, "default", threads),
    "llama.cpp-float32": lambda folder, threads: LlamaCpp(folder, "float32", threads),
    "llama.cpp-bfloat16": lambda folder, threads: LlamaCpp(folder, "bfloat16", threads),
    "llama.cpp-q8_0": lambda folder, threads: LlamaCpp(folder, "q8_0", threads),
    "llama.cpp-q4_0": lambda folder, threads: LlamaCpp(folder, "q4_0", threads),
    "llama.cpp-q8_0-plain": lambda folder, threads: LlamaCpp(folder, "q8_0-plain", threads),
    "llama.cpp-q4_0-plain": lambda folder, threads: LlamaCpp(folder, "q4_0-plain", threads),
    "mhsa-float32": lambda folder, threads: Whole(folder, "float32", threads),
    "mhsa-bf16": lambda folder, threads: Whole(folder, "bf16", threads),
    "mhsa-int8": lambda folder, threads: Whole(folder, "int8", threads),
    "mhsa-own-int8": lambda folder, threads: Whole(folder, "own-int8", threads),
    "mhsa-int4": lambda folder, threads: Whole(folder, "int4", threads),
    "mhsa-in-torch": lambda folder, threads: Torch(folder, "float32", threads, linears=True),
    "mhsa-in-torch-int4": lambda folder, threads: Torch(folder, "float32", threads, linears="int4"),
}
ARTIFACTS: dict[str, tuple[str, dict[str, str]]] = {
    "mhsa-float32": ("fp32", {}),
    "mhsa-bf16": ("fp32", {"float32_products": "bf16"}),
    "mhsa-int8": ("int8", {}),
    "mhsa-own-int8": ("fp32", {"weights": "int8"}),
    "mhsa-int4": ("int4", {}),
}
"""Of each of our candidates that is whole: the file, and what else `compile` is told."""


@contextmanager
def opened(name: str, folder: Path, threads: int) -> Iterator[Engine]:
    """The engine, warm; writes the logits of its first prompt, and its memory."""
    engine = ENGINES[name](folder, threads)
    engine.reset()
    logits = [np.array(engine.feed(prompt(128)), np.float32)]
    logits += [np.array(engine.feed(token[None]), np.float32) for token in prompt(FORCED)]
    np.save(folder / f"{name}.{FIRST_LOGITS}", np.stack(logits))
    yield engine


def _generate(engine: Engine, logits: np.ndarray, count: int) -> None:
    for _ in range(count):
        logits = engine.feed(np.array([int(np.argmax(logits))]))


def _take(folder: Path, name: str, turn: Turn, engine: Engine) -> Times:
    what, length = turn.situation.split()
    engine.reset()
    begin = time.perf_counter()
    logits, count = engine.feed(prompt(int(length))), int(length)
    if what == "behind":
        begin, count = time.perf_counter(), GENERATED
        _generate(engine, logits, count)
    seconds = (time.perf_counter() - begin) / count
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (folder / f"{name}.mebibytes").write_text(str(peak))
    return Times([seconds], 1 / seconds)


# The process that asks


def prepare(folder: Path, candidates: list[str]) -> None:
    """Writes what the candidates read and is not there: the model, files of others, our artifacts. A candidate whose
    file nobody here can write says so when it starts."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "hf").exists():
        _write_model(folder / "hf")
    writes_onnx, writes_gguf = find_spec("onnxruntime_genai") is not None, find_spec("gguf") is not None
    if writes_onnx and not (folder / "int8").exists():
        _write_onnx(folder)
    for name in candidates:
        if writes_gguf and name.startswith("llama.cpp") and not _gguf(folder, _form(name)).exists():
            _write_gguf(folder, _form(name).removesuffix(PLAIN))
        if writes_onnx and name in ARTIFACTS and not (folder / f"{_form(name)}-1.mhsa").exists():
            _compile(folder, name)


def _form(name: str) -> str:
    """What a candidate's own files are named by."""
    return name.split("-", 1)[1]


def _write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    set_seed(0)
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    config = LlamaConfig(
        hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, intermediate_size=HIDDEN, vocab_size=WORDS, tie_word_embeddings=True, rope_parameters=rope,
        max_position_embeddings=CAPACITY, bos_token_id=0, eos_token_id=0, initializer_range=0.04,
        rms_norm_eps=NORM_EPSILON,
    )  # fmt: skip
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab={f"<{i}>": i for i in range(WORDS)}, merges=[]))  # the builder wants one
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<0>", bos_token="<0>").save_pretrained(folder)


def _write_onnx(folder: Path) -> None:
    """The files of onnxruntime-genai's builder, and one of eight bits; that one's folder appears when all are there."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    for form, options in (("fp32", []), ("int4", ["int4_accuracy_level=4", "int4_block_size=32"])):
        words = ["-i", folder / "hf", "-o", folder / form, "-p", form, "-e", "cpu", "-c", folder / "cache"]
        extra = ["--extra_options", "prune_lm_head=true", *options]
        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", *map(str, words), *extra]
        subprocess.run(builder, check=True, env=environment, capture_output=True)
    written = folder / "int8.new"
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir()
    for file in (folder / "fp32").glob("*.json"):
        shutil.copy(file, written)
    source, target = folder / "fp32" / "model.onnx", written / "model.onnx"
    quantize_dynamic(source, target, weight_type=QuantType.QInt8, per_channel=True, use_external_data_format=True)
    written.rename(folder / "int8")


def _gguf(folder: Path, form: str) -> Path:
    return folder / f"{form.removesuffix(PLAIN)}.gguf"


def _write_gguf(folder: Path, form: str) -> None:
    from gguf_llama import write_gguf
    from safetensors.numpy import load_file
    from transformers import LlamaConfig

    weights, config = load_file(folder / "hf" / "model.safetensors"), LlamaConfig.from_pretrained(folder / "hf")
    write_gguf(_gguf(folder, form), weights, config, form)


def _compile(folder: Path, name: str) -> None:
    import onnx

    import mhsa_compile as mhsa

    file, options = ARTIFACTS[name]
    model = onnx.load(folder / file / "model.onnx")
    for value in (*model.graph.input, *model.graph.output):  # a cache of one capacity, whose heads have a size
        dims = value.type.tensor_type.shape.dim
        if value.name.startswith(("past", "present")):
            dims[3].dim_value = HEAD_DIM
        if value.name.startswith("present"):
            dims[2].dim_param = "past_sequence_length"
    del model.graph.value_info[:]
    for suffix, dims in (("", {}), ("-1", {"sequence_length": 1})):
        artifact = mhsa.compile(model, dims={"batch_size": 1, **dims}, in_place=True, check=False, **options)
        artifact.save(folder / f"{_form(name)}{suffix}.mhsa")


def measure(figures: Figures, candidates: list[str], count: int, folder: Path) -> None:
    with ExitStack() as stack:
        serve = {name: [__file__, "--serve", name, str(folder), str(figures.threads)] for name in candidates}
        ready, figures.missing = started(stack, serve)
        for candidate in ready:
            if (words := folder / f"{candidate.name}.resolved").exists():
                figures.resolved[candidate.name] = words.read_text()
        for situation in SITUATIONS:
            for name, times in rounds(ready, Turn(situation, 0), count):
                figures.seconds.setdefault(name, {}).setdefault(situation, []).append(times.calls[0])
        expected = np.load(folder / f"torch-float32.{FIRST_LOGITS}")
        for candidate in ready:
            logits = np.load(folder / f"{candidate.name}.{FIRST_LOGITS}")
            figures.logits[candidate.name] = float(np.abs(logits - expected).max() / expected.std())
            figures.mebibytes[candidate.name] = float((folder / f"{candidate.name}.mebibytes").read_text())


def table(figures: Figures) -> Table:
    """Tokens a second."""
    shown = Table("tokens a second", *SITUATIONS, "logits", "MiB at most")
    for name, row in figures.seconds.items():
        rates = [f"{1 / median(row[situation]):.0f}" for situation in SITUATIONS]
        shown.add_row(name, *rates, f"{figures.logits[name]:.1e}", f"{figures.mebibytes[name]:.0f}")
    return shown


def main() -> int:
    parser = command_line(__doc__, turns=5)
    parser.add_argument("--candidate", nargs="+", default=list(ENGINES), choices=list(ENGINES), metavar="NAME")
    parser.add_argument("--folder", type=Path, help="Keep what is prepared here, and take it from here if it is there.")
    options = parser.parse_args()
    names = list(dict.fromkeys(["torch-float32", *options.candidate]))  # what logits are held against
    packages = ("transformers", "onnxruntime", "onnxruntime-genai", "openvino", "llama-cpp-python")
    figures = Figures.here(packages, options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        subprocess.run([sys.executable, __file__, "--prepare", str(folder), *names], check=True)
        measure(figures, names, options.turns, folder)
    write(figures, options.json)
    show([table(figures)], figures.missing | figures.resolved)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        who, place, count = sys.argv[2:]
        answer_turns(opened(who, Path(place), int(count)), lambda turn, engine: _take(Path(place), who, turn, engine))
    elif sys.argv[1:2] == ["--prepare"]:
        prepare(Path(sys.argv[2]), sys.argv[3:])
    else:
        sys.exit(main())

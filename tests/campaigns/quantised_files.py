"""What ONNX Runtime's tools make of small models, compiled and held against ONNX Runtime: right, refused, wrong, raw.

python -m campaigns.quantised_files [--models bert,vit] [--forms dynamic,static] [--slice 1/4]

It exits with 1 on wrong or raw. Models are of transformers, of random weights and one layer, exported by PyTorch's two
exporters in several opsets, which take turns over models and forms. A file is right where our outputs are ONNX
Runtime's, with its optimisations or without, to five digits (float16: three); near where they are off by no more
than its own two answers are from each other, or than its quantisation is from the model before. Root mean squares.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import transformers
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_dynamic,
    quantize_static,
)
from onnxruntime.quantization import matmul_nbits_quantizer as nbits
from onnxruntime.quantization.shape_inference import quant_pre_process
from onnxruntime.transformers.float16 import convert_float_to_float16
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.errors import BuildError, MhsaError

WORDS, WIDTH, HEADS = 97, 64, 4
Feeds = dict[str, np.ndarray]
Maker = Callable[[Path, Path, list[Feeds]], None]


class Encoder(nn.Module):
    """A model that gives its last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs).last_hidden_state


class CrossDecoder(Encoder):
    """A decoder without a past, over the rows of an encoder."""

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        return self.model(input_ids=ids, encoder_hidden_states=rows, use_cache=False).last_hidden_state


class Decoder(nn.Module):
    """A decoder of one layer with a past and a mask over past and new keys."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, ids: Tensor, mask: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cache = transformers.DynamicCache()
        cache.update(key, value, 0)
        result = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        (layer,) = result.past_key_values.layers
        return result.logits, layer.keys, layer.values


def texts(rng: np.random.Generator, batch: int, length: int) -> Feeds:
    mask = np.ones((batch, length), np.int64)
    mask[0, length // 2 + 1 :] = 0
    return {"ids": rng.integers(0, WORDS, (batch, length)), "mask": mask}


def floats(name: str, *dims: int) -> Callable[[np.random.Generator, int, int], Feeds]:
    return lambda rng, batch, _: {name: rng.standard_normal((batch, *dims)).astype(np.float32)}


def steps(groups: int) -> Callable[[np.random.Generator, int, int], Feeds]:
    def feeds(rng: np.random.Generator, batch: int, length: int) -> Feeds:
        past = {n: rng.standard_normal((batch, groups, 5, WIDTH // HEADS)).astype(np.float32) for n in ("key", "value")}
        mask = np.ones((batch, 5 + length), np.int64)
        mask[0, :2] = 0
        return {"ids": rng.integers(0, WORDS, (batch, length)), "mask": mask, **past}

    return feeds


def crossed(rng: np.random.Generator, batch: int, length: int) -> Feeds:
    rows = rng.standard_normal((batch, 6, WIDTH)).astype(np.float32)
    return {"ids": rng.integers(0, WORDS, (batch, length)), "rows": rows}


def models() -> dict[str, tuple[nn.Module, Callable[..., Feeds]]]:
    torch.manual_seed(0)
    whisper = transformers.models.whisper.modeling_whisper.WhisperEncoder
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    layer = {**sizes, "intermediate_size": 4 * WIDTH, "initializer_range": 0.2, "attn_implementation": "eager"}
    vit = {**layer, "image_size": 32, "patch_size": 8}
    llama = {**layer, "num_key_value_heads": 2, "max_position_embeddings": 128}
    gpt2 = {"n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "n_positions": 128, "attn_implementation": "eager"}
    sounds = {"d_model": WIDTH, "encoder_layers": 1, "encoder_attention_heads": HEADS, "num_mel_bins": 20}
    clip = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    clip |= {"intermediate_size": 4 * WIDTH, "max_position_embeddings": 64, "attn_implementation": "eager"}
    t5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 16, "num_layers": 1, "num_heads": HEADS, "d_ff": 4 * WIDTH}
    t5["attn_implementation"] = "eager"
    tf = transformers
    return {
        "bert": (Encoder(tf.BertModel(tf.BertConfig(**layer))), texts),
        "vit": (Encoder(tf.ViTModel(tf.ViTConfig(**vit))), floats("pixels", 3, 32, 32)),
        "whisper": (
            Encoder(whisper(tf.WhisperConfig(**sounds, max_source_positions=50, attn_implementation="eager"))),
            floats("features", 20, 100),
        ),
        "t5": (Encoder(tf.T5EncoderModel(tf.T5Config(**t5))), texts),
        "t5 decoder": (
            CrossDecoder(tf.T5ForConditionalGeneration(tf.T5Config(**t5, num_decoder_layers=1)).get_decoder()),
            crossed,
        ),
        "clip": (Encoder(tf.CLIPTextModel(tf.CLIPTextConfig(**clip))), texts),
        "gpt2 prompt": (Encoder(tf.GPT2Model(tf.GPT2Config(vocab_size=WORDS, use_cache=False, **gpt2))), texts),
        "gpt2": (Decoder(tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=WORDS, **gpt2))), steps(HEADS)),
        "llama": (Decoder(tf.LlamaForCausalLM(tf.LlamaConfig(**llama))), steps(2)),
    }


EXPORTS = ("dynamo 18", "torchscript 17", "dynamo 23", "torchscript 13", "dynamo 21")


def export(model: nn.Module, feeds: Feeds, path: Path, how: str = "dynamo 18") -> None:
    """The model as a file by one of PyTorch's exporters, in an opset, with free batches and lengths."""
    model.eval()  # which TorchScript's exporter puts back
    exporter, opset = how.split()
    free = {"ids": (0, 1), "mask": (0, 1), "key": (0, 2), "value": (0, 2), "rows": (0, 1)}
    tensors = tuple(map(torch.from_numpy, feeds.values()))
    words: dict[str, Any] = {"opset_version": int(opset), "verbose": False, "input_names": list(feeds)}
    if exporter == "torchscript":
        axes = {name: {axis: f"{name}_{axis}" for axis in free.get(name, (0,))} for name in feeds}
        torch.onnx.export(model, tensors, path, dynamo=False, dynamic_axes=axes, **words)
        return
    dims = {name: dict.fromkeys(free.get(name, (0,)), torch.export.Dim.DYNAMIC) for name in feeds}
    of_any_number = isinstance(model, Encoder) and not isinstance(model, CrossDecoder)
    shapes = (tuple(dims.values()),) if of_any_number else tuple(dims.values())
    torch.onnx.export(model, tensors, path, dynamo=True, dynamic_shapes=shapes, external_data=False, **words)


# ---- The tools


class Samples(CalibrationDataReader):
    def __init__(self, feeds: list[Feeds]) -> None:
        self.left = list(feeds)

    def get_next(self) -> Feeds | None:
        return self.left.pop() if self.left else None


def dynamic(source: Path, target: Path, feeds: list[Feeds], **words: Any) -> None:
    quantize_dynamic(source, target, **words)


def static(
    source: Path, target: Path, feeds: list[Feeds], form: str = "QDQ", kinds: str = "QUInt8 QInt8", **words: Any
) -> None:
    activations, weights = (QuantType[kind] for kind in kinds.split())
    words |= {"quant_format": QuantFormat[form], "activation_type": activations, "weight_type": weights}
    quantize_static(source, target, Samples(feeds), **words)


def blocks(
    source: Path, target: Path, feeds: list[Feeds], form: str = "QOperator", gather: bool = False, **words: Any
) -> None:
    operators = ("MatMul", "Gather") if gather else ("MatMul",)
    config = nbits.DefaultWeightOnlyQuantConfig(
        **{"block_size": 32, "is_symmetric": True, **words},
        op_types_to_quantize=operators,
        quant_format=QuantFormat[form],
    )
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(source), algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), False)


def halves(source: Path, target: Path, feeds: list[Feeds]) -> None:
    onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=True), target)


def prepared(source: Path, target: Path, feeds: list[Feeds], then: Maker) -> None:
    """Through the quantiser's preparation: shapes by symbols, ONNX Runtime's optimisations."""
    quant_pre_process(source, between := target.with_suffix(".prepared.onnx"), skip_symbolic_shape=False)
    then(between, target, feeds)


def kept(source: Path, target: Path, feeds: list[Feeds], first: Maker) -> None:
    """As a session of ONNX Runtime keeps what it made of a file."""
    first(source, between := target.with_suffix(".first.onnx"), feeds)
    session(between, "ORT_ENABLE_EXTENDED", keep=target)


FORMS: dict[str, Maker] = {
    "dynamic": partial(dynamic, weight_type=QuantType.QInt8),
    "dynamic, unsigned, by channels": partial(
        dynamic, weight_type=QuantType.QUInt8, per_channel=True, reduce_range=True
    ),
    "dynamic, of activations": partial(dynamic, extra_options={"MatMulConstBOnly": False}),
    "static": static,
    "static, signed, by channels": partial(static, kinds="QInt8 QInt8", per_channel=True),
    "static, of operators": partial(static, form="QOperator"),
    "static, 16 bits": partial(static, kinds="QUInt16 QInt8"),
    "static, weights of four bits": partial(static, kinds="QInt8 QInt4"),
    "static, symmetric": partial(static, kinds="QInt8 QInt8", extra_options={"ActivationSymmetric": True}),
    "static, unsigned weights": partial(static, kinds="QUInt8 QUInt8", extra_options={"WeightSymmetric": False}),
    "static, signed 16 bits": partial(static, kinds="QInt16 QInt8", per_channel=True),
    "static, weights of 16 bits": partial(static, kinds="QUInt16 QInt16"),
    "static, unsigned weights of four bits": partial(static, kinds="QUInt8 QUInt4", per_channel=True),
    "static, pairs of weights": partial(static, extra_options={"AddQDQPairToWeight": True}),
    "static, a pair for each reader": partial(static, extra_options={"DedicatedQDQPair": True}),
    "static, biases as they are": partial(static, per_channel=True, extra_options={"QuantizeBias": False}),
    "static, linears alone": partial(static, op_types_to_quantize=["MatMul", "Gemm"], reduce_range=True),
    "static, weights' products alone": partial(static, extra_options={"MatMulConstBOnly": True}),
    "static, forced": partial(static, extra_options={"ForceQuantizeNoInputCheck": True}),
    "static, entropy": partial(static, calibrate_method=CalibrationMethod.Entropy),
    "static, percentile": partial(static, calibrate_method=CalibrationMethod.Percentile),
    "static, prepared, beside its file": partial(prepared, then=partial(static, use_external_data_format=True)),
    "static, of operators, signed, by channels": partial(
        static, form="QOperator", kinds="QInt8 QInt8", per_channel=True
    ),
    "static, of operators, unsigned, reduced": partial(
        static, form="QOperator", kinds="QUInt8 QUInt8", reduce_range=True
    ),
    "dynamic, linears alone, prepared": partial(
        prepared, then=partial(dynamic, op_types_to_quantize=["MatMul", "Gemm"], per_channel=True)
    ),
    "dynamic, not symmetric": partial(dynamic, extra_options={"WeightSymmetric": False}),
    "static, ONNX Runtime's pairs": partial(static, extra_options={"UseQDQContribOps": True}),
    "four bits": partial(blocks, accuracy_level=4),
    "four bits, zero points, tables": partial(
        blocks, is_symmetric=False, gather=True, quant_axes=(("MatMul", 0), ("Gather", 1))
    ),
    "four bits, pairs": partial(blocks, form="QDQ"),
    "eight bits": partial(blocks, bits=8, block_size=128),
    "float16": halves,
    "kept, dynamic": partial(kept, first=dynamic),
    "kept, static": partial(kept, first=static),
}


# ---- The verdict


def session(path: Path, level: str, keep: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    if keep is not None:
        options.optimized_model_filepath = str(keep)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def difference(some: list[np.ndarray], others: list[np.ndarray]) -> float:
    """The largest root mean square of a difference by that of the others."""
    pairs = [(np.float64(a), np.float64(b)) for a, b in zip(some, others, strict=True)]
    return max(float(np.sqrt(((a - b) ** 2).mean() / ((b**2).mean() + 1e-30))) for a, b in pairs)


def verdict(source: Path, file: Path, calls: list[Feeds]) -> tuple[str, str]:
    """(what became of a file, why)."""
    try:
        sessions = [session(*one) for one in ((file, "ORT_ENABLE_ALL"), (file, "ORT_DISABLE_ALL"))]
    except Exception as error:  # ONNX Runtime's own tool wrote what it does not take
        return "not loaded by ONNX Runtime", str(error)
    try:
        call = mhsa.load(mhsa.compile(file, without_attention="accept", check=False))
    except BuildError as error:
        return "raw", str(error)
    except MhsaError as error:
        return "refused", str(error)
    except Exception as error:  # what this program looks for
        return "raw", f"{type(error).__name__}: {error}"
    sessions.append(session(source, "ORT_ENABLE_ALL"))
    halves = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in onnx.load(file).graph.initializer)
    word, why = "right", ""
    for feeds in calls:
        result = call(**feeds)
        ours = list(result) if isinstance(result, (list, tuple)) else [result]
        optimised, exact, model = (one.run(None, feeds) for one in sessions)
        error = min(difference(ours, optimised), difference(ours, exact))
        own, lost = difference(optimised, exact), difference(exact, model)
        if error > (3e-3 if halves else 1e-5):
            word = "wrong" if error > max(2 * own, lost) or word == "wrong" else "near"
            why = f"off by {error:.2g}, ONNX Runtime's two answers by {own:.2g}, the model before by {lost:.2g}"
    return word, why


def main() -> int:
    parser = argparse.ArgumentParser(description="Files of ONNX Runtime's tools against ONNX Runtime.")
    parser.add_argument("--models", default="", help="names, a comma between two; else all")
    parser.add_argument("--forms", default="", help="beginnings of their names, a comma between two")
    parser.add_argument("--slice", default="1/1", help="K/N: every N-th file, from the K-th on")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: Counter[str] = Counter()
    first, every = map(int, options.slice.split("/"))
    chosen = list(models().items())
    for i, (name, (model, draw)) in enumerate(chosen):
        if options.models and name not in options.models.split(","):
            continue
        rng = np.random.default_rng(0)
        calls = [draw(rng, batch, length) for batch, length in ((2, 7), (1, 3), (3, 13))]
        for k, (form, make) in enumerate(FORMS.items()):
            if not form.startswith(tuple(options.forms.split(","))) or (i * len(FORMS) + k) % every != first - 1:
                continue
            how = EXPORTS[(i + k) % len(EXPORTS)]
            with tempfile.TemporaryDirectory() as folder:
                source, target = Path(folder) / "float.onnx", Path(folder) / "small.onnx"
                try:
                    with contextlib.redirect_stdout(io.StringIO()):
                        export(model, calls[0], source, how)
                        make(source, target, calls)
                except Exception as error:  # the tool's own
                    word, why = "not made", f"{type(error).__name__}: {error}"
                else:
                    word, why = verdict(source, target, calls)
            counts[word] += 1
            print(f"{name}, {how}, {form}: {word} {' '.join(why.split())[:300]}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in counts.items()))
    return int(counts["wrong"] + counts["raw"] > 0)


if __name__ == "__main__":
    sys.exit(main())

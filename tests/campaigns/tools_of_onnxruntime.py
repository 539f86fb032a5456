"""What ONNX Runtime's tools make of a file: quantisers, the converter to float16, fusions, what a session keeps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
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
from onnxruntime.transformers.optimizer import optimize_model

from campaigns.exported_models import HEADS, WIDTH, Feeds


@dataclass(frozen=True)
class Calibration:
    """What a tool asks for beside the file: calls of one size, and what ONNX Runtime's optimiser calls the model."""

    calls: list[Feeds]
    kind: str


Maker = Callable[[Path, Path, Calibration], None]


class Samples(CalibrationDataReader):
    def __init__(self, feeds: list[Feeds]) -> None:
        self.left = list(feeds)

    def get_next(self) -> Feeds | None:
        return self.left.pop() if self.left else None


def dynamic(source: Path, target: Path, calibration: Calibration, **words: Any) -> None:
    quantize_dynamic(source, target, **words)


def static(
    source: Path, target: Path, calibration: Calibration, form: str = "QDQ", kinds: str = "QUInt8 QInt8", **words: Any
) -> None:
    activations, weights = (QuantType[kind] for kind in kinds.split())
    words |= {"quant_format": QuantFormat[form], "activation_type": activations, "weight_type": weights}
    quantize_static(source, target, Samples(calibration.calls), **words)


def blocks(
    source: Path, target: Path, calibration: Calibration, form: str = "QOperator", gather: bool = False, **words: Any
) -> None:
    config = nbits.DefaultWeightOnlyQuantConfig(
        **{"block_size": 32, "is_symmetric": True, **words},
        op_types_to_quantize=("MatMul", "Gather") if gather else ("MatMul",),
        quant_format=QuantFormat[form],
    )
    fewer_bits(source, target, config)


def searched(source: Path, target: Path, calibration: Calibration, by: str, **words: Any) -> None:
    """Scales that are searched for: HQQ, GPTQ, llama.cpp's k-quants, or by rounding alone, RTN."""
    if by == "GPTQ":
        words["calibration_data_reader"] = Samples(calibration.calls)
    fewer_bits(source, target, getattr(nbits, f"{by}WeightOnlyQuantConfig")(**words))


def fewer_bits(source: Path, target: Path, config: nbits.WeightOnlyQuantConfig) -> None:
    quantizer = nbits.MatMulNBitsQuantizer(onnx.load(source), algo_config=config)
    quantizer.process()
    quantizer.model.save_model_to_file(str(target), False)


def halves(source: Path, target: Path, calibration: Calibration, **words: Any) -> None:
    onnx.save(convert_float_to_float16(onnx.load(source), **{"keep_io_types": True, **words}), target)


def two_precisions(source: Path, target: Path, calibration: Calibration) -> None:
    """The quantiser's own way to mix: activations of some products, of 16 bits, and of all else."""
    graph = onnx.load(source).graph
    outer = [node.output[0] for node in graph.node if node.op_type in ("MatMul", "Gemm")][::2]
    overrides = {name: [{"quant_type": QuantType.QUInt16}] for name in outer}
    static(source, target, calibration, extra_options={"TensorQuantOverrides": overrides, "UseQDQContribOps": True})


def without_first(source: Path, target: Path, calibration: Calibration, then: Maker) -> None:
    """As people keep the nodes in floats that lose most: the first product here."""
    first = next(node.name for node in onnx.load(source).graph.node if node.op_type in ("MatMul", "Gemm", "Conv"))
    then(source, target, calibration, nodes_to_exclude=[first])  # type: ignore[call-arg]


def fused(source: Path, target: Path, calibration: Calibration, then: Maker) -> None:
    """Through ONNX Runtime's optimiser of transformers: Attention, SkipLayerNormalization, BiasGelu and the like."""
    optimised = optimize_model(
        str(source), model_type=calibration.kind, num_heads=HEADS, hidden_size=WIDTH, opt_level=0, verbose=False
    )
    optimised.save_model_to_file(str(between := target.with_suffix(".fused.onnx")))
    then(between, target, calibration)


def chained(source: Path, target: Path, calibration: Calibration, first: Maker, then: Maker) -> None:
    first(source, between := target.with_suffix(".first.onnx"), calibration)
    then(between, target, calibration)


def as_it_is(source: Path, target: Path, calibration: Calibration) -> None:
    onnx.save(onnx.load(source), target)


def prepared(source: Path, target: Path, calibration: Calibration, then: Maker) -> None:
    """Through the quantiser's preparation: shapes by symbols, ONNX Runtime's optimisations."""
    with chdir(target.parent):  # where it leaves files of its own
        quant_pre_process(source, between := target.with_suffix(".prepared.onnx"), skip_symbolic_shape=False)
        then(between, target, calibration)


def kept(source: Path, target: Path, calibration: Calibration, first: Maker) -> None:
    """As a session of ONNX Runtime keeps what it made of a file."""
    first(source, between := target.with_suffix(".first.onnx"), calibration)
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
    **{
        f"{name} bits, blocks of {size}{', zero points' * zeros}, level {level}": partial(
            blocks, bits=bits, block_size=size, is_symmetric=not zeros, accuracy_level=level
        )
        for name, bits in (("four", 4), ("eight", 8))
        for size, zeros, level in ((16, False, 0), (32, True, 4), (64, True, 1), (128, False, 4), (256, True, 0))
    },
    "two bits": partial(blocks, bits=2, is_symmetric=False),
    "eight bits, zero points, tables": partial(blocks, bits=8, is_symmetric=False, gather=True, block_size=16),
    "four bits, zero points, pairs": partial(blocks, form="QDQ", is_symmetric=False, block_size=16),
    "four bits, pairs by channels": partial(blocks, form="QDQ", channel_wised_quantize=True),
    "eight bits, pairs": partial(blocks, form="QDQ", bits=8),
    "four bits, HQQ": partial(searched, by="HQQ", block_size=32),
    "four bits, GPTQ": partial(searched, by="GPTQ", block_size=32),
    "four bits, RTN": partial(searched, by="RTN"),
    "four bits, k-quants": partial(searched, by="KQuant"),
    "four bits of float16": partial(chained, first=halves, then=partial(blocks, accuracy_level=4)),
    "four bits and then dynamic": partial(chained, first=partial(blocks, block_size=16), then=dynamic),
    "float16 throughout": partial(halves, keep_io_types=False),
    "float16, sums in float32": partial(halves, op_block_list=["Softmax", "LayerNormalization", "ReduceMean", "Pow"]),
    "float16 of bfloat16 and float32": partial(
        halves, op_block_list=["Softmax"], use_bfloat16_as_blocked_nodes_dtype=True
    ),
    "float16, then dynamic": partial(chained, first=halves, then=dynamic),
    "static, two precisions": two_precisions,
    "static, but the first": partial(without_first, then=static),
    "dynamic, but the first": partial(without_first, then=dynamic),
    "static, eight bits of floats": partial(
        static, kinds="QFLOAT8E4M3FN QFLOAT8E4M3FN", calibrate_method=CalibrationMethod.Distribution
    ),
    "static, by ONNX Runtime's removal": partial(static, extra_options={"QDQKeepRemovableActivations": True}),
    "static, moving averages": partial(
        static, extra_options={"CalibMovingAverage": True, "CalibTensorRangeSymmetric": True}
    ),
    "fused": partial(fused, then=as_it_is),
    "fused, dynamic": partial(fused, then=dynamic),
    "fused, float16": partial(fused, then=halves),
    "fused, static": partial(fused, then=static),
    "fused, four bits": partial(fused, then=partial(blocks, accuracy_level=4)),
    "kept, dynamic": partial(kept, first=dynamic),
    "kept, static": partial(kept, first=static),
}


def session(path: Path, level: str, keep: Path | None = None) -> onnxruntime.InferenceSession:
    """A session of one thread; `keep` is where it writes what its optimisations made."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    if keep is not None:
        options.optimized_model_filepath = str(keep)
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

"""Files of ONNX Runtime's static quantiser, in both of its formats: what becomes of their roundings, and their values.

B batch, L length, WIDE the width of rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from support.encoder_layers import HIDDEN, WIDE, encoder_layer
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.frontend.canonicalize.passes import rounded_values

N = helper.make_node
Array = np.ndarray[Any, Any]
NUMBERS = {"scale": np.array(0.05, np.float32), "zero": np.array(7, np.uint8), "other": np.array(0.07, np.float32)}


def rewritten(nodes: list[onnx.NodeProto], constants: dict[str, Array], dims: list[int | str]) -> onnx.ModelProto:
    model = model_of(nodes, {"x": dims}, {"y": None}, NUMBERS | constants, opset=18)
    model = onnx.shape_inference.infer_shapes(model)
    result = rounded_values.rewrite(model, {tensor.name: tensor for tensor in model.graph.initializer})
    x = np.random.default_rng(0).uniform(-9, 9, [3 if isinstance(d, str) else d for d in dims]).astype(np.float32)
    before, after = (run(one, {"x": x}) for one in (model, result))
    np.testing.assert_array_equal(before, after)  # to the last bit
    return result


def run(model: onnx.ModelProto, feeds: dict[str, Array], *, plain: bool = True) -> Array:
    options = onnxruntime.SessionOptions()
    if plain:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.op_type != "Identity"]


def pair(name: str, result: str, scale: str = "scale") -> list[onnx.NodeProto]:
    return [
        N("QuantizeLinear", [name, scale, "zero"], [f"{result}_bytes"]),
        N("DequantizeLinear", [f"{result}_bytes", scale, "zero"], [result]),
    ]


MOVED = [*pair("x", "a"), N("Transpose", ["a"], ["b"], perm=[1, 0]), *pair("b", "c"), N("Relu", ["c"], ["y"])]


def test_what_is_rounded_already_is_not_rounded_again() -> None:
    assert operators(rewritten(MOVED, {}, ["B", 5])) == ["QuantizeLinear", "DequantizeLinear", "Transpose", "Relu"]


def test_by_other_steps_it_is() -> None:
    """The control: such a rounding changes values."""
    nodes = [*MOVED[:3], *pair("b", "c", "other"), MOVED[-1]]
    assert operators(rewritten(nodes, {}, ["B", 5])).count("QuantizeLinear") == 2


def test_bytes_that_are_moved_are_floats_before() -> None:
    nodes = [
        N("QuantizeLinear", ["x", "scale", "zero"], ["bytes"]),
        N("Transpose", ["bytes"], ["moved"], perm=[1, 0]),
        N("DequantizeLinear", ["moved", "scale", "zero"], ["floats"]),
        N("Relu", ["floats"], ["y"]),
    ]
    assert operators(rewritten(nodes, {}, ["B", 5])) == ["QuantizeLinear", "DequantizeLinear", "Transpose", "Relu"]


def test_a_product_reads_what_was_rounded_last() -> None:
    constants = {"w": np.arange(-15, 15, dtype=np.int8).reshape(5, 6), "w_scale": np.array(0.01, np.float32)}
    constants |= {"shape": np.array([-1, 5]), "b": np.arange(6, dtype=np.int8)}
    nodes = [
        *pair("x", "a"),
        N("Reshape", ["a", "shape"], ["rows"]),
        N("DequantizeLinear", ["w", "w_scale"], ["weights"]),
        N("DequantizeLinear", ["b", "w_scale"], ["bias"]),
        N("MatMul", ["rows", "weights"], ["product"]),
        N("Add", ["product", "bias"], ["y"]),
    ]
    result = rewritten(nodes, constants, ["B", 2, 5])
    assert operators(result).index("Reshape") < operators(result).index("QuantizeLinear")
    assert operators(result).count("DequantizeLinear") == 2
    assert "b" not in {tensor.name for tensor in result.graph.initializer}


class Samples(CalibrationDataReader):
    """Some inputs of a calibration."""

    def __init__(self, length: int) -> None:
        rng = np.random.default_rng(1)
        self._left = [{"x": rng.standard_normal((1, length, WIDE)).astype(np.float32)} for _ in range(4)]

    def get_next(self) -> dict[str, Array] | None:
        return self._left.pop() if self._left else None


LENGTH = 19
FILES = {
    "QDQ": (QuantFormat.QDQ, True, QuantType.QInt8),
    "QDQ, unsigned": (QuantFormat.QDQ, False, QuantType.QUInt8),
    "QOperator": (QuantFormat.QOperator, True, QuantType.QUInt8),
    "QOperator, signed": (QuantFormat.QOperator, False, QuantType.QInt8),
}


def root_mean_square(one: Array, other: Array) -> float:
    return float(np.sqrt(np.mean((one.astype(np.float64) - other) ** 2)))


def test_roundings_behind_a_linear_are_part_of_it() -> None:
    """Against ONNX Runtime without its optimisations: a value beside the middle between two steps may be the other."""
    rng = np.random.default_rng(0)
    constants = NUMBERS | {
        "w": rng.integers(-64, 64, (WIDE, HIDDEN)).astype(np.int8),
        "w_scale": np.array(0.004, np.float32),
    }
    constants |= {"w_zero": np.array(0, np.int8), "b": rng.integers(-128, 128, HIDDEN).astype(np.int8)}
    nodes = [
        *pair("x", "rows"),
        N("DequantizeLinear", ["w", "w_scale", "w_zero"], ["weights"]),
        N("DequantizeLinear", ["b", "w_scale", "w_zero"], ["bias"]),
        N("MatMul", ["rows", "weights"], ["product"]),
        *pair("product", "rounded"),
        N("Add", ["rounded", "bias"], ["sum"]),
        *pair("sum", "y", "other"),
    ]
    file = model_of(nodes, {"x": ["B", "L", WIDE]}, {"y": None}, constants, opset=18)
    artifact = mhsa.compile(file, without_attention="accept")
    (linear,) = [op for op in artifact.manifest.ops if op.op == "linear"]
    if linear.source != "fallback":
        assert linear.note.endswith("then mul, round, max, min, mul, add, mul, round, max, min, mul")
        assert sum(op.source == "fallback" for op in artifact.manifest.ops) == 1  # the first QuantizeLinear
    x = rng.standard_normal((3, 17, WIDE)).astype(np.float32) * 3
    steps = np.abs(mhsa.load(artifact)(x) - run(file, {"x": x})) / NUMBERS["other"]
    assert steps.max() < 1.01 and (steps > 0.01).mean() < 0.01


@pytest.mark.thorough
@pytest.mark.parametrize("name", FILES)
def test_a_layer_of_the_static_quantiser(name: str, tmp_path: Path) -> None:
    """Attention stays in floats between its products, where the file rounds scores and weights to bytes. So values are
    beside ONNX Runtime's, by less than quantisation made of the values of the float file, and as far from those: what
    is left out is a rounding. Between both there is the spread of a few thousand draws."""
    form, per_channel, kind = FILES[name]
    plain, small = tmp_path / "plain.onnx", tmp_path / "small.onnx"
    onnx.save(encoder_layer(np.random.default_rng(0), [1, LENGTH, WIDE], None, 0.1), plain)
    names: dict[str, Any] = {"per_channel": per_channel, "activation_type": kind, "weight_type": QuantType.QInt8}
    quantize_static(plain, small, Samples(LENGTH), quant_format=form, reduce_range=True, **names)
    artifact = mhsa.compile(small)
    (attention,) = artifact.manifest.attention
    assert attention.fused and "which the file rounds" in attention.note
    kinds = [op.op for op in artifact.manifest.ops]
    assert kinds.count("attention") == 1 and kinds.count("linear") == 6 and "product" not in kinds
    if all(op.source != "fallback" for op in artifact.manifest.ops if op.op == "linear"):
        notes = [op.note for op in artifact.manifest.ops if op.op == "linear"]
        assert sum("round" in note for note in notes) == 6 and any("erf" in note for note in notes)
    model, call = onnx.load(small), mhsa.load(artifact)
    errors = np.zeros(3)
    for seed in range(8):
        x = np.random.default_rng(seed).standard_normal((1, LENGTH, WIDE)).astype(np.float32)
        feeds, y = {"x": x}, call(x)
        floats, theirs = run(onnx.load(plain), feeds), run(model, feeds)
        errors += [root_mean_square(*pair) for pair in ((y, theirs), (y, floats), (theirs, floats))]
    beside, to_floats, theirs_to_floats = errors
    assert beside < theirs_to_floats and to_floats < 1.05 * theirs_to_floats


@pytest.mark.parametrize("count", [1, 4])
def test_products_of_bytes_by_columns(count: int) -> None:
    """QLinearMatMul by a scale and a zero point for each column: within one of ONNX Runtime's."""
    rng = np.random.default_rng(0)
    names = ["x", "scale", "zero", "b", "steps", "origins", "other", "zero"]
    constants = {"b": rng.integers(-128, 128, (7, 4)).astype(np.int8), "origins": np.arange(count).astype(np.int8)}
    constants |= {"steps": rng.uniform(0.01, 0.02, count).astype(np.float32)}
    node = N("QLinearMatMul", names, ["y"])
    kinds = {"x": "uint8", "y": "uint8"}
    model = model_of([node], {"x": [5, 7]}, {"y": None}, NUMBERS | constants, kinds=kinds, opset=18)
    result = rounded_values.rewrite(model, {tensor.name: tensor for tensor in model.graph.initializer})
    assert operators(result) == ["DequantizeLinear", "DequantizeLinear", "MatMul", "QuantizeLinear"]
    x = rng.integers(0, 256, (5, 7)).astype(np.uint8)
    before, after = (run(one, {"x": x}).astype(int) for one in (model, result))
    assert np.abs(before - after).max() <= 1 and before.std() > 5

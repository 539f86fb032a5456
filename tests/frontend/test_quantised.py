"""Quantised operators against whole numbers in NumPy: zero points and scales of all, rows, columns and channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]
N = helper.make_node


def whole(kind: str, *dims: int) -> Array:
    bounds = np.iinfo(kind)
    return RNG.integers(bounds.min, bounds.max + 1, dims).astype(kind)


def scales(*dims: int) -> Array:
    return RNG.uniform(0.01, 0.05, dims).astype(np.float32)


ROWS, COLUMNS, DEEP, CHANNELS, VALUES = 3, 4, 11, 6, 5
CONSTANTS = {
    "one_scale": scales(1),
    "scale": scales(),
    "row_scales": scales(ROWS),
    "column_scales": scales(COLUMNS),
    "channel_scales": scales(CHANNELS),
    "y_scale": np.array(2.5, np.float32),
    "zero": np.array(7, np.uint8),
    "odd_zero": np.array(-3, np.int8),
    "row_zeros": whole("uint8", ROWS),
    "matrix_zeros": whole("uint8", 2, ROWS, 1),
    "column_zeros": whole("int8", COLUMNS),
    "channel_zeros": whole("int8", CHANNELS),
    "b": whole("int8", DEEP, COLUMNS),
    "w": whole("int8", CHANNELS, 2, 3, 3),
    "w1": whole("uint8", CHANNELS, 4, 3),
    "bias": whole("int16", CHANNELS).astype(np.int32),
}
CONV = {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2], "group": 2}
NODES = [
    N("MatMulInteger", ["a", "b", "row_zeros", "column_zeros"], ["integers"]),
    N("MatMulInteger", ["a3", "b", "matrix_zeros"], ["matrices"]),
    N("MatMulInteger", ["a1", "b", "zero", "odd_zero"], ["vector"]),
    N("QLinearMatMul",
      ["a", "row_scales", "row_zeros", "b", "column_scales", "column_zeros", "y_scale", "zero"], ["rows"]),
    N("QLinearMatMul", ["a3", "one_scale", "zero", "b", "scale", "odd_zero", "scale", "odd_zero"], ["products"]),
    N("ConvInteger", ["x", "w", "zero", "channel_zeros"], ["sums"], **CONV),
    N("ConvInteger", ["x1", "w1", "zero"], ["line"], auto_pad="SAME_UPPER"),
    N("QLinearConv", ["x", "scale", "zero", "w", "channel_scales", "channel_zeros", "y_scale", "odd_zero", "bias"],
      ["image"], **CONV),
]  # fmt: skip
INPUTS = {"a": [ROWS, DEEP], "a3": ["n", ROWS, DEEP], "a1": [DEEP], "x": ["n", 4, VALUES, 8], "x1": ["n", 4, 10]}
KINDS = {"rows": "uint8", "products": "int8", "image": "int8"}


def model(nodes: list[onnx.NodeProto], constants: dict[str, Array]) -> onnx.ModelProto:
    read = {name for node in nodes for name in node.input}
    inputs = {name: dims for name, dims in INPUTS.items() if name in read}
    outputs = {node.output[0]: None for node in nodes}
    kinds = dict.fromkeys(inputs, "uint8") | dict.fromkeys(outputs, "int32") | KINDS
    weights = {name: array for name, array in constants.items() if name in read}
    return model_of(nodes, inputs, outputs, weights, kinds=kinds, opset=21)


def convolved(x: Array, w: Array, pads: list[int], strides: list[int], dilations: list[int], group: int) -> Array:
    """Of whole numbers (B, C, Y, X), tap by tap."""
    x = np.pad(x, [(0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])])
    sizes = [(x.shape[2 + i] - (w.shape[2 + i] - 1) * dilations[i] - 1) // strides[i] + 1 for i in (0, 1)]
    y = np.zeros((len(x), len(w), *sizes), np.int64)
    each = len(w) // group
    for g in range(group):
        part, taps = x[:, g * w.shape[1] : (g + 1) * w.shape[1]], w[g * each : (g + 1) * each]
        for i in range(w.shape[2]):
            for j in range(w.shape[3]):
                rows = part[:, :, i * dilations[0] :: strides[0]][:, :, : sizes[0]]
                seen = rows[:, :, :, j * dilations[1] :: strides[1]][:, :, :, : sizes[1]]
                y[:, g * each : (g + 1) * each] += np.einsum("bcyx,oc->boyx", seen, taps[:, :, i, j])
    return y


def quantised(sums: Array, ratio: Any, zero: Array) -> Array:
    bounds = np.iinfo(zero.dtype)
    return np.clip(np.rint(sums * ratio) + int(zero), bounds.min, bounds.max).astype(zero.dtype)


def right(inputs: dict[str, Array]) -> list[Array]:
    values = {
        name: array.astype(np.int64) for name, array in {**CONSTANTS, **inputs}.items() if array.dtype.kind in "iu"
    }
    scale = {name: array.astype(np.float64) for name, array in CONSTANTS.items() if array.dtype.kind == "f"}
    a, b = values["a"] - values["row_zeros"][:, None], values["b"] - values["column_zeros"]
    column = values["channel_zeros"].reshape(-1, 1, 1, 1)
    sums = convolved(values["x"] - 7, values["w"] - column, **CONV)  # type: ignore[arg-type]
    line = convolved(values["x1"][:, :, None] - 7, values["w1"][:, :, None], [0, 1, 0, 1], [1, 1], [1, 1], 1)
    of_channels = scale["scale"] * scale["channel_scales"].reshape(-1, 1, 1) / scale["y_scale"]
    of_rows = scale["row_scales"][:, None] * scale["column_scales"] / scale["y_scale"]
    products = (values["a3"] - 7) @ (values["b"] + 3)
    return [
        a @ b,
        (values["a3"] - values["matrix_zeros"]) @ values["b"],
        (values["a1"] - 7) @ (values["b"] + 3),
        quantised(a @ b, of_rows, CONSTANTS["zero"]),
        quantised(products, scale["one_scale"], CONSTANTS["odd_zero"]),
        sums,
        line[:, :, 0],
        quantised(sums + values["bias"].reshape(-1, 1, 1), of_channels, CONSTANTS["odd_zero"]),
    ]


def test_against_whole_numbers() -> None:
    call = mhsa.load(mhsa.compile(model(NODES, CONSTANTS), without_attention="accept"))
    inputs = {name: whole("uint8", *(2 if d == "n" else d for d in dims)) for name, dims in INPUTS.items()}
    for node, output, expected in zip(NODES, call(**inputs), right(inputs), strict=True):
        np.testing.assert_array_equal(output, expected, err_msg=node.output[0])
        assert output.dtype == KINDS.get(node.output[0], "int32")


def test_sums_that_lie_in_the_middle_go_to_the_even_number() -> None:
    node = N("QLinearMatMul", ["a", "one", "none", "b", "half", "none_b", "one", "none"], ["rows"])
    constants = {"one": np.float32(1), "half": np.float32(0.5), "none": np.uint8(0), "none_b": np.int8(0)}
    constants |= {"b": np.ones((DEEP, 1), np.int8)}
    a = np.zeros((ROWS, DEEP), np.uint8)
    a[:, 0] = [1, 3, 255]
    a[2, 1:3] = 255
    call = mhsa.load(
        mhsa.compile(model([node], {k: np.asarray(v) for k, v in constants.items()}), without_attention="accept")
    )
    np.testing.assert_array_equal(call(a)[:, 0], [0, 2, 255])


def test_scales_that_are_no_numbers_are_refused() -> None:
    for scale in (0.0, np.nan, np.inf):
        odd = model(NODES[3:4], CONSTANTS | {"column_scales": np.array(scale, np.float32)})
        with pytest.raises(ModelError, match="'column_scales' with"):
            mhsa.compile(odd, without_attention="accept")

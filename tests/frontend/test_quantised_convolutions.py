"""Convolutions of bytes as patches and linears: each way of writing one, beside ONNX Runtime and ONNX's evaluator."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.fusion.fuse import fuse
from mhsa_compile.frontend.fusion.fused_nodes import FusedPatches, FusedQuantisedLinear

Array = np.ndarray[Any, Any]
N = helper.make_node
MICROSOFT = "com.microsoft"


class Shape(NamedTuple):
    """x, the weights, and what the convolution says."""

    x: tuple[int, ...]
    weight: tuple[int, ...]
    words: dict[str, Any]


SHAPES = {
    "a signal": Shape((2, 5, 13), (7, 5, 3), {"pads": [1, 1], "strides": [2]}),
    "many channels": Shape((1, 19, 23), (11, 19, 5), {"pads": [4, 0], "dilations": [2]}),
    "an image": Shape((3, 3, 17, 11), (7, 3, 3, 2), {"pads": [1, 0, 2, 1], "dilations": [1, 2]}),
    "patches": Shape((2, 3, 14, 21), (13, 3, 7, 7), {"strides": [7, 7]}),
    "as large": Shape((1, 2, 9, 8), (5, 2, 3, 2), {"auto_pad": "SAME_LOWER", "strides": [2, 2]}),
    "a pixel": Shape((2, 5, 3, 7), (7, 5, 1, 1), {}),
}


def numbers(shape: Shape, kind: str, weights: str, per_channel: bool) -> dict[str, Array]:
    rng, channels = np.random.default_rng(len(kind) + shape.weight[0]), shape.weight[0]
    bounds, several = np.iinfo(weights), (channels,) if per_channel else ()
    half = np.zeros(several, weights) if weights == "int8" else np.full(several, 128, weights)
    deep = float(np.sqrt(np.prod(shape.weight[1:])))
    return {
        "w": rng.integers(bounds.min, bounds.max + 1, shape.weight).astype(weights),
        "w_zero": half if per_channel or weights == "uint8" else np.array(-3, weights),
        "w_scale": rng.uniform(0.01, 0.02, several).astype(np.float32),
        "x_scale": np.array(0.05, np.float32),
        "x_zero": np.array(-9 if kind == "int8" else 117, kind),
        "y_scale": np.array(0.06 * deep, np.float32),
        "y_zero": np.array(5 if kind == "int8" else 140, kind),
        "bias": rng.integers(-9000, 9000, channels).astype(np.int32),
    }


def nodes(form: str, words: dict[str, Any], rank: int) -> list[onnx.NodeProto]:
    """x of bytes to y: bytes, or, of ConvInteger, whole numbers."""
    if form == "ConvInteger":
        return [N("ConvInteger", ["x", "w", "x_zero", "w_zero"], ["y"], **words)]
    if form == "QLinearConv":
        names = ["x", "x_scale", "x_zero", "w", "w_scale", "w_zero", "y_scale", "y_zero", "bias"]
        return [N("QLinearConv", names, ["y"], **words)]
    return [
        N("DequantizeLinear", ["x", "x_scale", "x_zero"], ["x_floats"]),
        N("DequantizeLinear", ["w", "w_scale", "w_zero"], ["w_floats"], axis=0),
        N("Mul", ["x_scale", "w_scale"], ["step"]),
        N("DequantizeLinear", ["bias", "b_scale"], ["b_floats"], axis=0),
        N("Conv", ["x_floats", "w_floats", "b_floats"], ["floats"], **words),
        N("QuantizeLinear", ["floats", "y_scale", "y_zero"], ["y"]),
    ]


def model(form: str, name: str, kind: str = "uint8", weights: str = "int8", per_channel: bool = False) -> Any:
    """(a file, what it holds)"""
    shape = SHAPES[name]
    values = numbers(shape, kind, weights, per_channel)
    values["b_scale"] = values["x_scale"] * values["w_scale"]
    graph = nodes(form, shape.words, len(shape.x))
    read = {one for node in graph for one in node.input}
    kinds = {"x": kind, "y": "int32" if form == "ConvInteger" else kind}
    free = ["B", shape.x[1], *shape.x[2:]]
    constants = {key: array for key, array in values.items() if key in read}
    return model_of(graph, {"x": free}, {"y": None}, constants, kinds=kinds, opset=21), values


def bytes_for(name: str, kind: str) -> Array:
    bounds = np.iinfo(kind)
    return np.random.default_rng(1).integers(bounds.min, bounds.max + 1, SHAPES[name].x).astype(kind)


def theirs(file: onnx.ModelProto, x: Array) -> Array:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return np.asarray(onnxruntime.InferenceSession(file.SerializeToString(), options).run(None, {"x": x})[0])


def rows_of(artifact: mhsa.Artifact) -> list[str]:
    return [op.op.rstrip("0123456789d") for op in artifact.manifest.ops]


CASES = [
    ("ConvInteger", "a signal", "uint8", "int8", False),
    ("QLinearConv", "an image", "int8", "int8", True),
    ("pairs", "as large", "uint8", "uint8", True),
    *(
        pytest.param(form, name, *kinds, per_channel, marks=pytest.mark.thorough)
        for form in ("ConvInteger", "QLinearConv", "pairs")
        for name in SHAPES
        for kinds, per_channel in ((("uint8", "int8"), True), (("uint8", "uint8"), False), (("int8", "int8"), False))
        if form != "ConvInteger" or (kinds[0] == "uint8" and not per_channel)  # ONNX Runtime has no other
    ),
]


@pytest.mark.thorough_only("QLinearConv-an image-int8-int8-True")
@pytest.mark.parametrize(("form", "name", "kind", "weights", "per_channel"), CASES)
def test_as_onnx_runtime_has_it(form: str, name: str, kind: str, weights: str, per_channel: bool) -> None:
    file, _ = model(form, name, kind, weights, per_channel)
    artifact, x = mhsa.compile(file, without_attention="accept"), bytes_for(name, kind)
    assert ("patches" in rows_of(artifact)) and "nn.conv" not in rows_of(artifact)
    assert ("linear" in rows_of(artifact)) == (form != "ConvInteger")
    y, expected = mhsa.load(artifact)(x=x), theirs(file, x)
    if form == "ConvInteger":
        np.testing.assert_array_equal(y, expected)
        np.testing.assert_array_equal(y, ReferenceEvaluator(file).run(None, {"x": x})[0])
    else:
        assert np.abs(y.astype(int) - expected.astype(int)).max() <= 1
        assert expected.std() > 20 and (expected == expected.max()).mean() < 0.9  # not what is cut off alone
    assert np.array_equal(mhsa.load(artifact, threads=2)(x=x), y)


def test_what_is_around_is_the_zero_point() -> None:
    """A patch that lies outside altogether adds nothing; with zeros around it, it would."""
    file, values = model("QLinearConv", "a signal")
    x = np.full(SHAPES["a signal"].x, values["x_zero"])
    alone = np.rint(values["bias"] * np.float64(values["x_scale"]) * values["w_scale"] / values["y_scale"])
    y = mhsa.load(mhsa.compile(file, without_attention="accept"))(x=x)
    assert np.abs(y - (alone + 140).clip(0, 255)[:, None]).max() <= 1
    others = theirs(model_without_pads(file), np.pad(x, [(0, 0), (0, 0), (1, 1)]))
    assert np.abs(y.astype(int) - others).max() > 20  # the control


def model_without_pads(file: onnx.ModelProto) -> onnx.ModelProto:
    plain = onnx.ModelProto.FromString(file.SerializeToString())
    (node,) = plain.graph.node
    del node.attribute[:]
    node.attribute.append(helper.make_attribute("strides", [2]))
    plain.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "T"
    return plain


DYNAMIC = [
    N("DynamicQuantizeLinear", ["x"], ["x_bytes", "x_scale", "x_zero"]),
    N("ConvInteger", ["x_bytes", "w", "x_zero", "w_zero"], ["sums"], pads=[1, 1], strides=[2]),
    N("Cast", ["sums"], ["cast"], to=TensorProto.FLOAT),
    N("Mul", ["x_scale", "w_scale"], ["step"]),
    N("Mul", ["cast", "step"], ["scaled"]),
    N("Reshape", ["floats", "of_channels"], ["bias"]),
    N("Add", ["scaled", "bias"], ["biased"]),
    N("Relu", ["biased"], ["act"]),
    N("DynamicQuantizeLinear", ["act"], ["y_bytes", "y_scale", "y_zero"]),
    N("ConvInteger", ["y_bytes", "v", "y_zero"], ["y_sums"], pads=[2, 2]),
    N("Cast", ["y_sums"], ["y_cast"], to=TensorProto.FLOAT),
    N("Mul", ["y_cast", "y_scale"], ["first"]),
    N("Transpose", ["first"], ["y"], perm=[0, 2, 1]),
]


KINDS = {
    "activations of 16 bits": ("uint16", "int8", True),
    "weights of 16 bits": ("int16", "int16", False),
    "weights of four bits": ("uint8", "int4", True),
    "weights alone": ("", "int8", True),
}


@pytest.mark.thorough_but("weights of 16 bits")
@pytest.mark.parametrize("name", KINDS)
def test_bits_that_no_product_takes_are_patches_of_floats(name: str) -> None:
    """They were loops: 0.65 of a ViT's time whose activations have 16 bits."""
    kind, weights, per_channel = KINDS[name]
    shape, rng = SHAPES["an image"], np.random.default_rng(0)
    bounds = {"int4": 8}.get(weights) or np.iinfo(weights).max
    stored = rng.integers(-bounds, bounds, shape.weight).astype(helper.tensor_dtype_to_np_dtype(
        getattr(TensorProto, weights.upper())))  # fmt: skip
    step = (rng.uniform(0.5, 1, (7,) if per_channel else ()) / bounds).astype(np.float32)
    constants = {"w": stored, "w_scale": step, "x_scale": np.float32(2e-2 if kind == "uint8" else 1e-4)}
    constants |= {"bias": rng.integers(-900, 900, 7).astype(np.int32), "b_scale": np.full(7, 1e-3, np.float32)}
    graph = [
        N("DequantizeLinear", ["w", "w_scale"], ["w_floats"], axis=0),
        N("DequantizeLinear", ["bias", "b_scale"], ["b_floats"], axis=0),
        N("Conv", ["x_floats" if kind else "x", "w_floats", "b_floats"], ["floats"], **shape.words),
        N("Relu", ["floats"], ["y"]),
    ]
    if kind:
        constants["x_zero"] = np.array(117, kind)
        graph[:0] = [
            N("QuantizeLinear", ["x", "x_scale", "x_zero"], ["x_bytes"]),
            N("DequantizeLinear", ["x_bytes", "x_scale", "x_zero"], ["x_floats"]),
        ]
    read = {one for node in graph for one in node.input}
    constants = {key: array for key, array in constants.items() if key in read}
    file = model_of(graph, {"x": ["B", *shape.x[1:]]}, {"y": None}, constants, opset=21)
    artifact = mhsa.compile(file, without_attention="accept")
    rows, x = rows_of(artifact), rng.standard_normal(shape.x).astype(np.float32)
    assert "patches" in rows and "nn.conv" not in rows
    expected = theirs(file, x)
    np.testing.assert_allclose(mhsa.load(artifact)(x=x), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


def test_two_of_the_dynamic_quantiser_in_a_row() -> None:
    """As Whisper begins: x is transposed and nothing between them, and biases of channels are those of linears."""
    values = numbers(SHAPES["a signal"], "uint8", "int8", False)
    rng = np.random.default_rng(0)
    constants = {name: values[name] for name in ("w", "w_zero", "w_scale")}
    constants |= {"floats": rng.standard_normal(7).astype(np.float32), "of_channels": np.array([1, -1, 1])}
    constants |= {"v": rng.integers(-128, 128, (11, 7, 5)).astype(np.int8)}
    file = model_of(DYNAMIC, {"x": ["B", 5, "T"]}, {"y": None}, constants, opset=21)
    artifact = mhsa.compile(file, without_attention="accept")
    assert [rows_of(artifact).count(op) for op in ("linear", "patches", "permute_dims")] == [2, 2, 1]
    assert {info.name for info in artifact.manifest.weights} >= {"w", "v", "floats"}
    x = rng.standard_normal((2, 5, 31)).astype(np.float32)
    expected = theirs(file, x)
    np.testing.assert_allclose(mhsa.load(artifact)(x=x), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


def test_groups_of_whole_numbers_are_exact_in_floats() -> None:
    """The largest sums there can be, of 255 products."""
    constants = {"w": np.full((6, 85, 3), -128, np.int8), "x_zero": np.array(0, np.uint8)}
    constants["w"][0, :, 1] = 127
    node = N("ConvInteger", ["x", "w", "x_zero"], ["y"], group=2, pads=[1, 1])
    file = model_of([node], {"x": ["B", 170, 9]}, {"y": None}, constants, kinds={"x": "uint8", "y": "int32"}, opset=21)
    artifact = mhsa.compile(file, without_attention="accept")
    assert "nn.conv" not in rows_of(artifact)
    x = np.random.default_rng(0).integers(250, 256, (2, 170, 9)).astype(np.uint8)
    y = mhsa.load(artifact)(x=x)
    assert y.dtype == np.int32 and y.min() < -(1 << 22)
    np.testing.assert_array_equal(y, theirs(file, x))


OTHERS = {
    "groups whose sums are too large": ("w", np.ones((4, 2, 130), np.int8), {"group": 2, "pads": [70, 70]}),
    "a zero point for each element": ("x_zero", np.ones(4, np.uint8), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    changed, array, words = OTHERS[name]
    constants = {"w": np.ones((4, 4, 3), np.int8), "x_zero": np.array(1, np.uint8)} | {changed: array}
    node = N("ConvInteger", ["x", "w", "x_zero"], ["y"], **words)
    file = model_of([node], {"x": ["B", 4, 9]}, {"y": None}, constants, kinds={"x": "uint8", "y": "int32"}, opset=21)
    assert FusedPatches.op_type not in [one.op_type for one in fuse(canonicalize(file).model).graph.node]


def test_the_words_of_microsoft_with_channels_last() -> None:
    file, _ = model("QLinearConv", "an image", per_channel=True)
    (node,) = file.graph.node
    node.domain = MICROSOFT
    node.attribute.append(helper.make_attribute("channels_last", 1))
    file.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    dims = file.graph.input[0].type.tensor_type.shape.dim
    for dim, size in zip(dims[1:], (17, 11, 3), strict=True):
        dim.dim_value = size
    artifact = mhsa.compile(file, without_attention="accept")
    assert FusedQuantisedLinear.op_type in [one.op_type for one in fuse(canonicalize(file).model).graph.node]
    assert "permute_dims" not in rows_of(artifact)
    x = np.ascontiguousarray(np.moveaxis(bytes_for("an image", "uint8"), 1, -1))
    y = mhsa.load(artifact)(x=x)
    assert np.abs(y.astype(int) - theirs(file, x).astype(int)).max() <= 1


BAD = {
    "scales of 0": ("w_scale", np.zeros(7, np.float32), "'w_scale' with 0.0"),
    "negative scales": ("y_scale", np.array(-1, np.float32), "'y_scale' with -1.0"),
    "no numbers": ("x_scale", np.array(np.nan, np.float32), "'x_scale' with nan"),
    "a zero point of another type": ("x_zero", np.array(3, np.int8), "'x_zero' of int8"),
    "zero points that are too few": ("w_zero", np.zeros(6, np.int8), "QLinearConv node"),
    "scales that are too few": ("w_scale", np.ones(6, np.float32), "QLinearConv node"),
    "a bias that is too short": ("bias", np.zeros(3, np.int32), "a bias 'bias' of 7 numbers"),
    "a bias of another type": ("bias", np.zeros(7, np.int64), "a bias 'bias' of int32"),
    "other channels": ("w", np.zeros((7, 4, 3), np.int8), "sizes fit each other"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused(name: str) -> None:
    changed, array, message = BAD[name]
    file, _ = model("QLinearConv", "a signal", per_channel=True)
    for tensor in file.graph.initializer:
        if tensor.name == changed:
            tensor.CopyFrom(numpy_helper.from_array(array, changed))
    with pytest.raises(ModelError, match=message):
        mhsa.compile(file, without_attention="accept")

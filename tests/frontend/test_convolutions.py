"""Convolutions beside an attention, with free dims: those of one pixel are linears."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper, parser
from support.onnx_models import model_of
from support.this_cpu import with_tiles

import mhsa_compile as mhsa
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.canonicalize.passes import pointwise_conv
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import eager, oracle

TEXT = """<ir_version: 10, opset_import: ["" : 23]>
agraph (float[B, 6, Y, X] x) => (float[B, P, 16] y) {
    padded = MaxPool <kernel_shape = [2, 2], auto_pad = "SAME_UPPER"> (x)
    wide = Conv <kernel_shape = [1, 1]> (padded, w, b)
    act = Relu(wide)
    mixed = Conv <kernel_shape = [1, 1], strides = [1, 1], pads = [0, 0, 0, 0]> (act, v)
    to = Constant <value_ints = [0, 16, -1]> ()
    flat = Reshape(mixed, to)
    rows = Transpose <perm = [0, 2, 1]> (flat)
    y = Attention <q_num_heads = 2, kv_num_heads = 2> (rows, rows, rows)
}"""


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    model, rng = parser.parse_model(TEXT), np.random.default_rng(1)
    for name, shape in (("w", (20, 6, 1, 1)), ("b", (20,)), ("v", (16, 20, 1, 1))):
        model.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape).astype("f4"), name))
    return model


@pytest.mark.thorough
def test_convolutions_of_one_pixel_are_linears(model: onnx.ModelProto) -> None:
    artifact = mhsa.compile(model)
    found = [row.op for row in artifact.manifest.ops]
    assert found.count("linear") == 2
    assert "nn.conv2d" not in found
    assert {info.name: info.dims for info in artifact.manifest.weights} == {
        "w": (20, 6, 1, 1), "b": (20,), "v": (16, 20, 1, 1),
    }  # fmt: skip
    compiled = mhsa.load(artifact)
    for B, Y, X in ((1, 1, 1), (2, 5, 13), (3, 9, 31)):
        inputs = {"x": np.random.default_rng(Y).standard_normal((B, 6, Y, X)).astype("f4")}
        (truth,), (yardstick,) = oracle(model, inputs), eager(model, inputs)
        for _ in range(3):
            assert max_error(truth, compiled(**inputs)) <= budget(truth, yardstick, "float32")


OTHERS = {
    "steps": {"strides": [2, 1]},
    "padding": {"pads": [1, 0, 0, 0]},
    "groups": {"group": 2},
}


@pytest.mark.parametrize("said", OTHERS.values(), ids=OTHERS.keys())
def test_others_stay_as_they_are(said: dict[str, object]) -> None:
    w = np.ones((4, 4 // said.get("group", 1), 1, 1), "f4")  # type: ignore[operator]
    node = helper.make_node("Conv", ["x", "w"], ["y"], **said)
    made = model_of([node], {"x": ["B", 4, "Y", "X"]}, {"y": None}, {"w": w})
    assert pointwise_conv.rewrite(made) is made


def test_same_padding_is_stated_where_it_does_not_depend_on_sizes(model: onnx.ModelProto) -> None:
    (pool,) = (node for node in canonicalize(model).model.graph.node if node.op_type == "MaxPool")
    said = {attribute.name: helper.get_attribute_value(attribute) for attribute in pool.attribute}
    assert said == {"kernel_shape": [2, 2], "pads": [0, 0, 1, 1]}


@pytest.mark.thorough
def test_weights_in_constant_nodes_are_weights(model: onnx.ModelProto) -> None:
    """paddle2onnx writes weights so; what a Constant says beside them is no weight."""
    inside = onnx.ModelProto()
    inside.CopyFrom(model)
    del inside.graph.initializer[:]
    for tensor in model.graph.initializer:
        inside.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    artifact = mhsa.compile(inside)
    assert artifact.manifest.ops == mhsa.compile(model).manifest.ops
    assert {info.name for info in artifact.manifest.weights} == {"w", "b", "v"}
    x = np.random.default_rng(0).standard_normal((2, 6, 5, 13)).astype("f4")
    assert np.array_equal(mhsa.load(artifact)(x=x), mhsa.load(mhsa.compile(model))(x=x))


WIDE = {  # as whisper's encoder and ViT begin: x, w, and the attributes
    "a signal": ((2, 80, 101), (64, 80, 3), {"strides": [2], "pads": [1, 1]}),
    "patches of an image": ((2, 3, 64, 48), (96, 3, 16, 16), {"strides": [16, 16]}),
}
ON_TILES = {"bfloat16": ("auto", "cpu.linear_on_tiles"), "float32": ("bf16x6", "cpu.float32_linear_on_tiles")}


def wide(name: str, dtype: str) -> onnx.ModelProto:
    dims, shape, attributes = WIDE[name]
    weights = np.random.default_rng(0).standard_normal(shape).astype(getattr(ml_dtypes, dtype, dtype))
    kind = helper.np_dtype_to_tensor_dtype(weights.dtype)
    node = helper.make_node("Conv", ["x", "w"], ["y"], **attributes)
    return model_of([node], {"x": (kind, dims)}, {"y": (kind, None)}, {"w": weights})


@pytest.mark.thorough_but("bfloat16-a signal")
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", ON_TILES)
def test_wide_ones_are_linears_on_tiles(dtype: str, name: str) -> None:
    word, kernel = ON_TILES[dtype]
    model = wide(name, dtype)
    artifact = mhsa.compile(model, "sapphirerapids", without_attention="accept", float32_products=word)  # type: ignore[arg-type]
    assert [op.kernel for op in artifact.manifest.ops if op.op == "linear"] == [kernel]
    assert not any("conv" in op.op for op in artifact.manifest.ops)


@with_tiles
@pytest.mark.thorough
@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("dtype", ON_TILES)
def test_wide_ones_on_tiles_are_as_exact(dtype: str, name: str) -> None:
    model, word = wide(name, dtype), ON_TILES[dtype][0]
    artifact = mhsa.compile(model, without_attention="accept", float32_products=word)  # type: ignore[arg-type]
    assert ON_TILES[dtype][1] in {op.kernel for op in artifact.manifest.ops}
    x = np.random.default_rng(1).standard_normal(WIDE[name][0]).astype(getattr(ml_dtypes, dtype, dtype))
    (truth,), (yardstick,) = oracle(model, {"x": x}), eager(model, {"x": x})
    assert max_error(truth, mhsa.load(artifact)(x=x)) <= budget(truth, yardstick, dtype)

"""Values of eight-bit floats are the same numbers in float32: what ONNX Runtime computes, to the bit where it rounds
alone.

ONNX Runtime runs without its optimisations: they make operators of such floats that it does not have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError

KINDS = {
    "e4m3fn": TensorProto.FLOAT8E4M3FN,
    "e4m3fnuz": TensorProto.FLOAT8E4M3FNUZ,
    "e5m2": TensorProto.FLOAT8E5M2,
    "e5m2fnuz": TensorProto.FLOAT8E5M2FNUZ,
}
node = helper.make_node


def zeros(kind: int, count: int | None = None, name: str = "z") -> onnx.TensorProto:
    return helper.make_tensor(name, kind, [] if count is None else [count], [0.0] * (count or 1))


def with_tensors(model: onnx.ModelProto, *tensors: onnx.TensorProto) -> onnx.ModelProto:
    model.graph.initializer.extend(tensors)
    return model


def of_onnx_runtime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def numbers_around(kind: int) -> np.ndarray:
    """All numbers of a kind, the middles between neighbours, what lies beside those, and what is none of them."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    own = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    own = np.unique(own[np.isfinite(own)])
    middles = (own[1:] + own[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(side * np.inf)) for side in (-1, 1)]
    others = np.array([1e9, -1e9, np.inf, -np.inf, np.nan, 1e-12, -1e-12, 0], np.float32)
    return np.concatenate([own, middles, *beside, others]).astype(np.float32)


@pytest.mark.thorough_but("e4m3fn", "e4m3fnuz")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_number_and_what_lies_between(kind: int) -> None:
    """Rounded by a Cast, and by a QuantizeLinear in steps of a scale for each column, to the bit."""
    nodes = [
        node("Cast", ["x"], ["q"], to=kind),
        node("Cast", ["q"], ["cast"], to=TensorProto.FLOAT),
        node("QuantizeLinear", ["x", "s", "z"], ["r"], axis=1),
        node("DequantizeLinear", ["r", "s", "z"], ["steps"], axis=1),
    ]
    scales = np.array([1, 0.37], np.float32)
    model = model_of(nodes, {"x": ["N", 2]}, {"cast": ["N", 2], "steps": ["N", 2]}, {"s": scales}, opset=19)
    with_tensors(model, zeros(kind, 2))
    x = np.stack([numbers_around(kind), numbers_around(kind) * scales[1]], 1)
    actual = mhsa.load(mhsa.compile(model, without_attention="accept"))(x)
    for own, other in zip(actual, of_onnx_runtime(model, {"x": x}), strict=True):
        np.testing.assert_array_equal(own, other)
    assert np.isinf(x).any() and not np.isinf(actual[0]).any()


def test_weights_are_bytes_until_they_are_bound(tmp_path) -> None:
    """A linear between pairs, in the branch of an If, too; the artifact has as many bytes as the file."""
    kind, rng = TensorProto.FLOAT8E4M3FN, np.random.default_rng(0)
    inner = [node("Cast", ["d"], ["c"], to=kind), node("DequantizeLinear", ["c", "s"], ["t"])]
    other = [node("Neg", ["d"], ["e"])]
    branches = [
        helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)])
        for nodes, name in ((inner, "t"), (other, "e"))
    ]
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["q"]),
        node("DequantizeLinear", ["q", "s", "z"], ["d"]),
        node("ReduceSum", ["x"], ["sum"], keepdims=0),
        node("Greater", ["sum", "limit"], ["large"]),
        node("If", ["large"], ["again"], then_branch=branches[0], else_branch=branches[1]),
        node("DequantizeLinear", ["w", "ws"], ["weight"], axis=1),
        node("MatMul", ["again", "weight"], ["y"]),
    ]
    constants = {"s": np.float32(0.02), "ws": rng.uniform(0.1, 1, 80).astype(np.float32), "limit": np.float32(0)}
    model = model_of(nodes, {"x": ["N", 96]}, {"y": ["N", 80]}, constants, opset=19)
    weight = rng.standard_normal((96, 80)).astype(helper.tensor_dtype_to_np_dtype(kind))
    with_tensors(model, zeros(kind), numpy_helper.from_array(weight, "w"))
    artifact = mhsa.compile(model, without_attention="accept", check=True)
    artifact.save(tmp_path / "a.mhsa")
    assert (tmp_path / "a.mhsa" / "weights.safetensors").stat().st_size < 2 * weight.size
    compiled = mhsa.load(artifact)
    x = rng.standard_normal((5, 96)).astype(np.float32)
    for feed in (np.abs(x), -np.abs(x)):
        (expected,) = of_onnx_runtime(model, {"x": feed})
        np.testing.assert_allclose(compiled(feed), expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def _cast(**words: Any) -> onnx.ModelProto:
    nodes = [node("Cast", ["x"], ["q"], to=KINDS["e5m2"], **words), node("Cast", ["q"], ["y"], to=1)]
    return model_of(nodes, {"x": ["N"]}, {"y": ["N"]}, opset=19)


def _pair(zero: float) -> onnx.ModelProto:
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    model = model_of(nodes, {"x": ["N"]}, {"y": ["N"]}, {"s": np.float32(1)}, opset=19)
    return with_tensors(model, helper.make_tensor("z", KINDS["e4m3fn"], [], [zero]))


def _edge(operator: str) -> onnx.ModelProto:
    narrow, wide = (KINDS["e4m3fn"], ["N"]), ["N"]
    takes = operator == "input"
    one = node("Cast", ["x"], ["y"], to=1 if takes else KINDS["e4m3fn"])
    return model_of([one], {"x": narrow if takes else wide}, {"y": wide if takes else narrow}, opset=19)


REFUSED = {
    "saturate=1 beside floats of eight bits, got saturate=0": lambda: _cast(saturate=0),
    "0 as zero point 'z' of floats of eight bits, got 1.0": lambda: _pair(1.0),
    "input 'x': expected .* got one of float8_e4m3fn": lambda: _edge("input"),
    "output 'y': expected .* got one of float8_e4m3fn": lambda: _edge("output"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    with pytest.raises(ModelError, match=message):
        mhsa.compile(REFUSED[message](), without_attention="accept")

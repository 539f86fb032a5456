"""Softmax along each axis against NumPy's in float64: ragged and free sizes, hidden scores, NaN, threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import mhsa_compile as mhsa


@pytest.fixture(scope="module", params=[0, 1, 2])
def softmax(request: pytest.FixtureRequest) -> tuple[int, Any]:
    node = helper.make_node("Softmax", ["x"], ["y"], axis=request.param)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["A", "B", "C"]) for name in "xy")
    graph = helper.make_graph([node], "softmax", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return request.param, mhsa.compile(onnx.shape_inference.infer_shapes(model), without_attention="accept")


def right(x: Any, axis: int) -> Any:
    x = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_along_each_axis(softmax: tuple[int, Any], threads: int) -> None:
    axis, artifact = softmax
    assert [(op.op, op.kernel) for op in artifact.manifest.ops] == [("softmax", "cpu.softmax")]
    call = mhsa.load(artifact, threads=threads)
    for shape in [(3, 131, 67), (1, 1, 1), (2, 5, 16), (7, 3, 301), (2, 0, 3)]:
        x = np.random.default_rng(sum(shape)).normal(0, 20, shape).astype("f4")
        if x.size:
            assert np.abs(call(x) - right(x, axis)).max() < 1e-6
        else:
            assert call(x).shape == shape


def test_scores_that_are_no_numbers(softmax: tuple[int, Any]) -> None:
    axis, artifact = softmax
    x = np.random.default_rng(0).normal(0, 1, (19, 37, 23)).astype("f4")
    x[0, 0, 0] = x[2, 30, 20] = -np.inf
    x[5, 36, 22] = np.nan
    np.testing.assert_allclose(mhsa.load(artifact)(x), right(x, axis), atol=1e-6)

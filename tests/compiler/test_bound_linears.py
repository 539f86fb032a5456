"""Products with what is made of weights alone: linears, with their biases, and right."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mhsa_compile as mhsa
from mhsa_compile.runtime.artifact.artifact import Artifact

K, N = 24, 40
RNG = np.random.default_rng(0)
W, S, B = (RNG.standard_normal(shape).astype(np.float32) for shape in ((N, K), (N, 1), (N,)))
SCALED = [helper.make_node("Mul", ["W", "S"], ["w"]), helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0])]
PRODUCT = helper.make_node("MatMul", ["x", "wt"], ["p"])


def compiled(nodes: list[onnx.NodeProto], output: str = "y", left: tuple[str, ...] = ("B", "L", "K")) -> Artifact:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [K if dim == "K" else dim for dim in left])
    y = helper.make_tensor_value_info(output, TensorProto.FLOAT, None)
    weights = [numpy_helper.from_array(array, name) for name, array in (("W", W), ("S", S), ("B", B))]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return mhsa.compile(model, without_attention="accept")


def kernels(artifact: Artifact) -> list[tuple[str, str]]:
    return [(op.op, op.kernel) for op in artifact.manifest.ops]


GRAPHS: dict[str, tuple[list[onnx.NodeProto], Callable[[np.ndarray], np.ndarray]]] = {
    "a bias": ([*SCALED, PRODUCT, helper.make_node("Add", ["p", "B"], ["y"])], lambda p: p + B),
    "a bias first": ([*SCALED, PRODUCT, helper.make_node("Add", ["B", "p"], ["y"])], lambda p: p + B),
    "a bias and what follows": (
        [*SCALED, PRODUCT, helper.make_node("Add", ["p", "B"], ["q"]), helper.make_node("Relu", ["q"], ["y"])],
        lambda p: np.maximum(p + B, 0),
    ),
    "no bias": ([*SCALED, PRODUCT, helper.make_node("Relu", ["p"], ["y"])], lambda p: np.maximum(p, 0)),
}


@pytest.mark.thorough_but("a bias and what follows")
@pytest.mark.parametrize(("nodes", "expected"), GRAPHS.values(), ids=GRAPHS)
def test_weights_that_a_graph_computes_are_packed(
    nodes: list[onnx.NodeProto], expected: Callable[[np.ndarray], np.ndarray]
) -> None:
    artifact = compiled(nodes)
    assert kernels(artifact) == [("linear", "cpu.linear")]
    x = RNG.standard_normal((3, 7, K)).astype(np.float32)
    np.testing.assert_allclose(mhsa.load(artifact)(x), expected(x @ (W * S).T), atol=2e-5)


def test_a_product_that_is_read_twice_keeps_its_own_value() -> None:
    nodes = [
        *SCALED,
        PRODUCT,
        helper.make_node("Add", ["p", "B"], ["q"]),
        helper.make_node("Mul", ["p", "q"], ["y"]),
    ]
    artifact = compiled(nodes)
    x = RNG.standard_normal((2, 5, K)).astype(np.float32)
    p = x @ (W * S).T
    assert ("linear", "cpu.linear") in kernels(artifact)
    np.testing.assert_allclose(mhsa.load(artifact)(x), p * (p + B), rtol=1e-4, atol=2e-4)


def test_weights_on_the_left_are_no_linear() -> None:
    nodes = [helper.make_node("Mul", ["W", "S"], ["w"]), helper.make_node("MatMul", ["w", "x"], ["y"])]
    artifact = compiled(nodes, left=("K", "L"))
    assert "linear" not in dict(kernels(artifact))
    x = RNG.standard_normal((K, 5)).astype(np.float32)
    np.testing.assert_allclose(mhsa.load(artifact)(x), (W * S) @ x, atol=2e-5)


def test_other_weights_take_their_place_when_an_artifact_is_loaded() -> None:
    artifact = compiled(GRAPHS["a bias"][0])
    x = RNG.standard_normal((1, 2, K)).astype(np.float32)
    others = {"W": W[::-1].copy(), "S": S + 1, "B": B - 1}
    actual = mhsa.load(artifact, weights=others)(x)
    np.testing.assert_allclose(actual, x @ (others["W"] * others["S"]).T + others["B"], atol=5e-5)

"""Weights that a float64 evaluation leaves narrow: the same results as of weights in float64."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.onnx_models import model_of

from mhsa_compile.verification.oracle import evaluate
from mhsa_compile.verification.oracle.narrow_weights import narrow_weights, widened_product

rng = np.random.default_rng(0)
TABLE, SQUARE = rng.standard_normal((300, 256)).astype(np.float32), rng.standard_normal((256, 257)).astype(np.float32)


def _model(*nodes: onnx.NodeProto, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    return model_of(nodes, {"ids": (TensorProto.INT64, ["B", 3])}, {"y": None}, weights)


def _chain(kind: type) -> onnx.ModelProto:
    return _model(
        helper.make_node("Gather", ["table", "ids"], ["x"]),
        helper.make_node("MatMul", ["x", "square"], ["m"]),
        helper.make_node("Transpose", ["square"], ["turned"], perm=[1, 0]),
        helper.make_node("MatMul", ["m", "turned"], ["n"]),
        helper.make_node("Reshape", ["n", "rows"], ["r"]),
        helper.make_node("Gemm", ["r", "square", "c"], ["y"], alpha=0.5, beta=2.0),
        weights={
            "table": TABLE.astype(kind),
            "square": SQUARE.astype(kind),
            "rows": np.array([-1, 256]),
            "c": rng.standard_normal(257).astype(kind),
        },
    )


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_products_and_rows_are_those_of_wide_weights(kind: type) -> None:
    model, ids = _chain(kind), rng.integers(-300, 300, (2, 3))
    weights = evaluate.promote(model, {})[1]
    assert narrow_weights(model.graph) == {"table", "square"} and weights["square"].dtype == kind
    exact = evaluate.oracle(model, {"ids": ids})[0]
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    x = w["table"][ids] @ w["square"] @ w["square"].T
    expected = 0.5 * x.reshape(-1, 256) @ w["square"] + 2.0 * w["c"]
    assert exact.dtype == np.float64 and np.allclose(exact, expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 1), (7, 70_000), (70_000, 7), (257, 521)])
@pytest.mark.parametrize("turned", [False, True])
def test_parts_of_a_weight_make_the_whole_product(shape: tuple[int, int], turned: bool) -> None:
    b = rng.standard_normal(shape[::-1] if turned else shape).astype(np.float32)
    b = b.T if turned else b
    a = rng.standard_normal((3, shape[0]))
    assert np.allclose(widened_product(a, b), a @ b.astype(np.float64), rtol=1e-12, atol=1e-9)


def test_a_weight_that_others_read_too_is_wide() -> None:
    for reader in (
        helper.make_node("Add", ["square", "square"], ["y"]),
        helper.make_node("MatMul", ["square", "x"], ["y"]),
        helper.make_node("MatMul", ["x", "square"], ["y"], domain="com.example"),
        helper.make_node("Identity", ["square"], ["y"]),  # an output
    ):
        model = _model(helper.make_node("Gather", ["table", "ids"], ["x"]), reader, weights={"square": SQUARE})
        assert narrow_weights(model.graph) == set()


def test_whole_numbers_stay_whole() -> None:
    a, b = rng.integers(-9, 9, (3, 300)), rng.integers(-9, 9, (300, 300))
    assert widened_product(a, b).dtype == np.int64

"""Sums of float16 and bfloat16 against float64: one rounding of the result, not one an addition; and what has no code
of its own in bfloat16."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa

ALLOWED = {"float16": 2e-3, "bfloat16": 1e-2}
WIDTH = 3001


def _wide(x: Any) -> dict[str, Any]:
    """Each output's right value, of x (2, WIDTH)."""
    return {
        "mean": x.mean(1, keepdims=True),
        "l2": np.sqrt((x**2).sum(1, keepdims=True)),
        "logsumexp": np.log(np.exp(x).sum(1, keepdims=True)),
        "running": np.cumsum(x, 1),
        "pooled": x[:, None].mean(2, keepdims=True),
        "norm": (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5),
        "einsum": np.einsum("ab,cb->ac", x, x),
        "power": x**x,
        "largest": 1.0 * (np.arange(x.shape[1]) == x.argmax(1)[:, None]),
    }


@pytest.fixture(scope="module", params=list(ALLOWED))
def outputs(request: pytest.FixtureRequest) -> tuple[Any, Any, float]:
    allowed = ALLOWED[request.param]
    dtype = np.dtype(getattr(ml_dtypes, request.param, request.param))
    node = helper.make_node
    nodes = [
        node("ReduceMean", ["x", "last"], ["mean"]),
        node("ReduceL2", ["x", "last"], ["l2"]),
        node("ReduceLogSumExp", ["x", "last"], ["logsumexp"]),
        node("CumSum", ["x", "one"], ["running"]),
        node("Unsqueeze", ["x", "ones"], ["channel"]),
        node("GlobalAveragePool", ["channel"], ["pooled"]),
        node("LayerNormalization", ["x", "scale"], ["norm"], axis=-1),
        node("Einsum", ["x", "x"], ["einsum"], equation="ab,cb->ac"),
        node("Pow", ["x", "x"], ["power"]),
        node("Hardmax", ["x"], ["largest"]),
    ]
    constants = {"last": [-1], "one": 1, "ones": [1], "scale": np.ones(WIDTH, dtype)}
    x = np.random.default_rng(0).uniform(0.5, 1, (2, WIDTH)).astype(dtype)
    right = _wide(x.astype(np.float64))
    dims = {name: list(value.shape) for name, value in right.items()}
    kinds = dict.fromkeys(("x", *dims), request.param)
    model = model_of(nodes, {"x": [2, WIDTH]}, dims, constants, kinds=kinds, opset=21)
    results = mhsa.load(mhsa.compile(model, without_attention="accept"))(x)
    return dict(zip(right, results, strict=True)), right, allowed


def test_each_sum_is_rounded_once(outputs: tuple[Any, Any, float]) -> None:
    results, right, allowed = outputs
    for name, value in right.items():
        got = np.asarray(results[name], np.float64)
        assert np.abs((got - value) / (np.abs(value) + (name in ("largest", "norm")))).max() < allowed, name


def test_elementary_functions_in_vectors() -> None:
    """Of bfloat16, whose rounding reads what it rounds twice."""
    names = ("Elu", "LogSoftmax", "Softplus")
    nodes = [helper.make_node(name, ["x"], [name]) for name in names]
    kinds = dict.fromkeys(("x", *names), "bfloat16")
    model = model_of(nodes, {"x": ["n", 16]}, dict.fromkeys(names, ("n", 16)), kinds=kinds, opset=22)
    x = np.linspace(-3, 3, 64).reshape(4, 16).astype(ml_dtypes.bfloat16)
    results, wide = mhsa.load(mhsa.compile(model, without_attention="accept"))(x), x.astype(np.float64)
    right = [np.where(wide < 0, np.expm1(wide), wide), wide - np.log(np.exp(wide).sum(1, keepdims=True)),
             np.logaddexp(0, wide)]  # fmt: skip
    for result, value in zip(results, right, strict=True):
        np.testing.assert_allclose(np.asarray(result, np.float64), value, rtol=ALLOWED["bfloat16"], atol=1e-3)

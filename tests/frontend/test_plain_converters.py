"""Operators that are written in Relax here, all in one graph with a free size, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.onnx_models import model_of

import mhsa_compile as mhsa

RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]
ZEROS = np.zeros(3, np.float32)


@pytest.fixture(scope="module")
def call() -> Any:
    """x (n, 3, 4), a narrow one of the same numbers, and an axis that comes by the call."""
    node = helper.make_node
    nodes = [
        node("CumSum", ["x", "axis"], ["sums"]),
        node("CumSum", ["x", "axis"], ["behind"], exclusive=1, reverse=1),
        node("CumProd", ["x", "axis"], ["products"]),
        node("CumSum", ["narrow", "axis"], ["narrow_sums"]),
        node("IsInf", ["x"], ["above"], detect_negative=0),
        node("IsInf", ["x"], ["below"], detect_positive=0),
        node("IsInf", ["x"], ["neither"], detect_positive=0, detect_negative=0),
        node("Elu", ["narrow"], ["elu"], alpha=0.5),
        node("LpNormalization", ["narrow"], ["unit"], axis=-2, p=1),
        node("Dropout", ["x"], ["same", "mask"]),
        node("BitCast", ["x"], ["bits"], to=TensorProto.INT32),
        node("GroupNormalization", ["x", "ones", "zeros"], ["groups"], num_groups=3),
        node("InstanceNormalization", ["x", "ones", "zeros"], ["instances"]),
        node("Atanh", ["x"], ["atanh"]),
        node("Mish", ["x"], ["mish"]),
        node("Softplus", ["x"], ["softplus"]),
        node("Selu", ["narrow"], ["selu"]),
    ]
    kinds = dict.fromkeys(("narrow", "narrow_sums", "elu", "selu", "unit"), "float16")
    kinds |= dict.fromkeys(("above", "below", "neither", "mask"), "bool") | {"bits": "int32", "axis": "int64"}
    names = [name for each in nodes for name in each.output]
    inputs = {"x": ["n", 3, 4], "narrow": ["n", 3, 4], "axis": []}
    affine = {"ones": np.ones(3, "f4"), "zeros": ZEROS}
    outputs = dict.fromkeys(names, ("n", 3, 4))
    model = model_of(nodes, inputs, outputs, affine, kinds=kinds, opset=26, ir_version=11)
    compiled = mhsa.load(mhsa.compile(model, without_attention="accept"))
    return lambda x, axis: dict(
        zip(names, map(np.asarray, compiled(x, x.astype(np.float16), np.array(axis))), strict=True)
    )


@pytest.mark.parametrize("axis", range(-3, 3))
@pytest.mark.parametrize("n", [2, 5])
def test_an_axis_that_comes_by_the_call(call: Any, axis: int, n: int) -> None:
    x = RNG.uniform(0.5, 1.5, (n, 3, 4)).astype(np.float32)
    results, wide = call(x, axis), x.astype(np.float64)
    np.testing.assert_allclose(results["sums"], wide.cumsum(axis), rtol=1e-5)
    np.testing.assert_allclose(results["products"], wide.cumprod(axis), rtol=1e-5)
    behind = np.flip(np.flip(wide, axis).cumsum(axis), axis) - wide
    np.testing.assert_allclose(results["behind"], behind, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results["narrow_sums"], x.astype(np.float16).astype(np.float64).cumsum(axis), rtol=1e-3)


def test_groups_far_from_zero(call: Any) -> None:
    """Of which the mean of squares less the square of the mean leaves nothing."""
    x = (1000 + 0.1 * RNG.standard_normal((4, 3, 4))).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean(2, keepdims=True)) / np.sqrt(wide.var(2, keepdims=True) + 1e-5)
    results = call(x, 0)
    np.testing.assert_allclose(results["groups"], expected, atol=5e-3)
    np.testing.assert_array_equal(results["instances"], results["groups"])  # of one channel each


def test_small_and_large_arguments(call: Any) -> None:
    """Of functions that lose what is small beside 1 where they are written out by exponentials and logarithms."""
    x = np.array([0, 1e-30, -1e-30, 1e-4, -1e-3, 0.5, -0.9, 1, -1, 20, -20, -80], np.float32).reshape(1, 3, 4)
    with np.errstate(all="ignore"):
        results, wide = call(x, 0), x.astype(np.float64)
        expected = {
            "atanh": np.arctanh(wide),
            "softplus": np.logaddexp(0, wide),
            "mish": wide * np.tanh(np.logaddexp(0, wide)),
        }
    for name, values in expected.items():
        np.testing.assert_allclose(results[name], values, rtol=1e-6, err_msg=name)


def test_infinities_bits_and_zeros(call: Any) -> None:
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    x[0, 0], x[1, :, 1] = [np.inf, -np.inf, np.nan, -0.0], 0
    results = call(x, 0)
    np.testing.assert_array_equal(results["above"], np.isposinf(x))
    np.testing.assert_array_equal(results["below"], np.isneginf(x))
    assert not results["neither"].any()
    assert results["mask"].all()
    np.testing.assert_array_equal(results["same"], x)
    np.testing.assert_array_equal(results["bits"], x.view(np.int32))
    wide = x.astype(np.float16).astype(np.float64)
    np.testing.assert_allclose(results["elu"], np.where(wide < 0, 0.5 * np.expm1(wide), wide), rtol=2e-3, atol=1e-3)
    selu = 1.05070102 * np.where(wide < 0, 1.67326319 * np.expm1(wide), wide)
    np.testing.assert_allclose(results["selu"], selu, rtol=2e-3, atol=1e-3)
    norm = np.abs(wide[1]).sum(0, keepdims=True)
    np.testing.assert_allclose(results["unit"][1], wide[1] / np.where(norm == 0, 1, norm), rtol=2e-3, atol=1e-4)


def test_mean_and_variance_of_the_axes_that_onnx_leaves_out() -> None:
    """Batch and places; onnx's inference refuses a node that says no axes."""
    nodes = [helper.make_node("MeanVarianceNormalization", ["x"], ["y"])]
    model = model_of(nodes, {"x": ["B", 3, 4, 5]}, {"y": ["B", 3, 4, 5]}, opset=22)
    x = RNG.uniform(1, 3, (2, 3, 4, 5)).astype(np.float32)
    wide = x.astype(np.float64)
    expected = (wide - wide.mean((0, 2, 3), keepdims=True)) / wide.std((0, 2, 3), keepdims=True)
    actual = mhsa.load(mhsa.compile(model, without_attention="accept"))(x)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5)

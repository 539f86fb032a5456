"""CumSum and CumProd as functions of ours, against NumPy: every axis, both directions, free sizes, several dtypes."""

import numpy as np
import onnx
import pytest
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa


def along_all_axes(op: str, shape: tuple, dtype: str, **attributes: int) -> onnx.ModelProto:
    """One graph with an output for each axis."""
    axes = range(len(shape))
    nodes = [helper.make_node(op, ["x", f"axis{i}"], [f"y{i}"], **attributes) for i in axes]
    value, constants = (
        (helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape),
        {f"axis{i}": np.array(i) for i in axes},
    )
    return model_of(nodes, {"x": value}, {f"y{i}": value for i in axes}, constants, opset=26)


def expected(op: str, x: np.ndarray, axis: int, exclusive: int, reverse: int) -> np.ndarray:
    wide = x.astype(np.float64) if x.dtype.kind == "f" else x
    wide = np.flip(wide, axis) if reverse else wide
    y = (np.cumsum if op == "CumSum" else np.cumprod)(wide, axis=axis, dtype=wide.dtype)
    if exclusive:
        y = np.insert(np.delete(y, -1, axis), 0, 0 if op == "CumSum" else 1, axis)
    return np.flip(y, axis) if reverse else y


@pytest.mark.thorough_but("CumSum-int32-1-0")
@pytest.mark.parametrize(
    ("op", "dtype", "exclusive", "reverse"),
    [
        ("CumSum", "float32", 0, 0),
        ("CumSum", "float32", 1, 1),
        ("CumSum", "int32", 1, 0),
        pytest.param("CumSum", "float16", 0, 1, marks=pytest.mark.thorough),
        pytest.param("CumProd", "float32", 0, 0, marks=pytest.mark.thorough),
        ("CumProd", "float32", 1, 1),
    ],
)
def test_running_sums_and_products(op, dtype, exclusive, reverse):
    model = along_all_axes(op, ("B", 3, "L", 70), dtype, exclusive=exclusive, reverse=reverse)
    call = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))
    for sizes in ((1, 3, 1, 70), (2, 3, 131, 70), (5, 3, 2, 70)):
        x = np.clip(np.random.default_rng(0).standard_normal(sizes) * 3, -1, 1).astype(dtype)
        for axis, y in enumerate(call(x)):
            truth = expected(op, x, axis, exclusive, reverse)
            assert y.dtype == x.dtype
            np.testing.assert_allclose(y, truth, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-4)


def test_a_first_minus_zero_stays_one_and_nan_goes_on():
    call = mhsa.load(mhsa.compile(along_all_axes("CumSum", (3, 5), "float32"), without_attention="accept", check=False))
    x = np.full((3, 5), -0.0, np.float32)
    x[1, 2] = np.nan
    down, along = call(x)
    assert np.signbit(down[0]).all() and np.signbit(along[0]).all()
    np.testing.assert_array_equal(np.isnan(along), [[0] * 5, [0, 0, 1, 1, 1], [0] * 5])
    np.testing.assert_array_equal(np.isnan(down)[:, 2], [0, 1, 1])

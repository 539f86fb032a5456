"""TopK along any axis: in order, the earlier of equals first, NaN the largest."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from support.onnx_models import model_of

import mhsa_compile as mhsa

CASES = [(-1, 1, 3, (5, 8)), (0, 0, 2, (7, 3)), (1, 1, 5, (2, 5, 3)), (1, 0, 4, (3, 9, 4)), (-1, 1, 50, (3, 3000)),
         (-1, 0, 1, (4, 6)), (1, 1, 700, (2, 700, 2))]  # fmt: skip


@pytest.mark.thorough_but("float16")
@pytest.mark.parametrize("kind", ["float32", "int64", "float16"])
def test_the_best_in_order(kind: str) -> None:
    code = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    rng, nodes, inputs, constants, feeds = np.random.default_rng(0), [], {}, {}, {}
    for i, (axis, largest, k, shape) in enumerate(CASES):
        nodes.append(helper.make_node("TopK", [f"x{i}", f"k{i}"], [f"v{i}", f"p{i}"], axis=axis, largest=largest))
        dims = [size if place == axis % len(shape) else f"d{i}{place}" for place, size in enumerate(shape)]
        inputs[f"x{i}"], constants[f"k{i}"] = (code, dims), np.array([k])
        feeds[f"x{i}"] = rng.integers(-9, 9, shape).astype(kind)
        if kind != "int64":
            feeds[f"x{i}"].reshape(-1)[rng.integers(0, feeds[f"x{i}"].size, 3)] = np.nan
    outputs = {f"v{i}": (code, None) for i in range(len(CASES))}
    outputs |= {f"p{i}": (TensorProto.INT64, None) for i in range(len(CASES))}
    model = model_of(nodes, inputs, outputs, constants, opset=18)
    results = mhsa.load(mhsa.compile(model, without_attention="accept", check=False))(**feeds)
    for i, (axis, largest, k, _) in enumerate(CASES):
        x = feeds[f"x{i}"].astype(np.float64)
        rank = np.where(np.isnan(x), np.inf, x)
        order = np.argsort(-rank if largest else rank, axis=axis, kind="stable")
        expected = np.take(order, np.arange(k), axis=axis)
        np.testing.assert_array_equal(results[len(CASES) + i], expected)
        np.testing.assert_array_equal(results[i], np.take_along_axis(x, expected, axis))

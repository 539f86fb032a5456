"""NaN and infinities through operators that choose the larger or the smaller: as NumPy and PyTorch have them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa

X = np.array([[np.nan, -1, 2, np.inf], [-np.inf] * 4, [1, np.nan, -np.inf, 3], [2, -np.nan, 0.5, -3]], np.float32)
LINES = {
    "clip": "Clip(x, low, high)",
    "hard_sigmoid": "HardSigmoid(x)",
    "hard_swish": "HardSwish(x)",
    "larger": "Max(x, t)",
    "leaky": "LeakyRelu(x)",
    "relu": "Relu(x)",
    "sign": "Sign(x)",
    "smaller": "Min(x, t)",
}
REDUCED = {"high": "ReduceMax(x, one)", "low": "ReduceMin(x, one)"}


@pytest.mark.thorough_but("float64-double")
@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "float"), (np.float64, "double"), (np.float16, "float16")])
def test_not_a_number_stays_one(dtype: type, name: str) -> None:
    outputs = [f"{name}[L, 4] {line}" for line in LINES] + [f"{name}[L, 1] {line}_of" for line in REDUCED]
    body = [f"{line} = {text}" for line, text in LINES.items()]
    body += [f"{line}_of = {text}" for line, text in REDUCED.items()]
    graph = parser.parse_graph(f"g ({name}[L, 4] x, {name}[L, 4] t) => ({', '.join(outputs)}) {{ {' '.join(body)} }}")
    arrays = {"low": np.array(-1, dtype), "high": np.array(1, dtype), "one": np.array([1])}
    graph.initializer.extend(numpy_helper.from_array(array, key) for key, array in arrays.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    feeds = {"x": X.astype(dtype), "t": X[:, ::-1].astype(dtype)}
    compiled = mhsa.load(mhsa.compile(model, without_attention="accept"))
    with np.errstate(all="ignore"):
        expected = ReferenceEvaluator(model).run(None, feeds)
    for line, one, other in zip((*LINES, *REDUCED), compiled(**feeds), expected, strict=True):
        assert np.allclose(one, other, rtol=2e-3, atol=2e-3, equal_nan=True), line


def test_a_constant_bound_that_is_no_number_is_none() -> None:
    graph = parser.parse_graph(
        "g (float[L, 4] x) => (float[L, 4] a, float[L, 4] b, float[L, 4] c) "
        "{ a = Clip(x, none, half) b = Clip(x, half, most) c = Clip(x, most, half) }"
    )
    arrays = {"none": np.nan, "half": 0.5, "most": np.inf}
    graph.initializer.extend(numpy_helper.from_array(np.float32(array), key) for key, array in arrays.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    results = mhsa.load(mhsa.compile(model, without_attention="accept"))(X)
    nothing = np.where(np.isnan(X), X, np.float32(0.5))
    for y, expected in zip(results, (np.minimum(X, 0.5), np.maximum(X, 0.5), nothing), strict=True):
        assert np.array_equal(y, expected, equal_nan=True)


def test_pooling_carries_what_is_not_a_number() -> None:
    x = np.random.default_rng(0).standard_normal((1, 2, 7, 6)).astype(np.float32)
    x[0, 0, :3, :3], x[0, 1, 2, 2], x[0, 0, 4, 4] = -np.inf, np.nan, np.inf
    graph = parser.parse_graph("g (float[1, 2, 7, 6] x) => (float[A, B, C, D] y, float[E, F, G, H] z) "
                               "{ y = MaxPool <kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]> (x) "
                               "z = GlobalMaxPool(x) }")  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    pooled, whole = mhsa.load(mhsa.compile(model, without_attention="accept"))(x)
    expected = torch.nn.functional.max_pool2d(torch.from_numpy(x), 3, 2, 1).numpy()
    assert np.array_equal(pooled, expected, equal_nan=True)
    assert np.array_equal(whole[..., 0, 0], x.max((2, 3)), equal_nan=True)


@pytest.mark.thorough
def test_a_linear_with_relu_carries_it() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    x = np.ones((2, 3, 8), np.float32)
    x[0, 1, 2] = np.nan
    example = torch.from_numpy(x)
    compiled = mhsa.load(mhsa.compile(layer, example_inputs=(example,), without_attention="accept", check=False))
    with torch.no_grad():
        expected = layer(example).numpy()
    assert np.isnan(expected[0, 1]).all() and np.allclose(compiled(x), expected, atol=1e-5, equal_nan=True)

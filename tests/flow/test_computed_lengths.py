"""Arrays whose lengths the graph computes: right at several sizes, and without loops that take a minute to compile."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest

import mhsa_compile as mhsa


def reshape_of_a_computed_length(source: str) -> onnx.ModelProto:
    """x (B, L) -> y (L - 1, B), without the first column, as relative shifts do: of an input or what is computed."""
    text = f"""
        <ir_version: 9, opset_import: ["" : 18]>
        shifted (float[B, L] x) => (float[M, N] y)
        <int64 last = {{1}}, int64[1] first = {{0}}, int64[1] one = {{1}},
         int64[1] most = {{4611686018427387904}}, int64[1] any = {{-1}}>
        {{
            positive = Relu (x)
            size = Shape (x)
            length = Gather <axis = 0> (size, last)
            less = Sub (length, last)
            rows = Unsqueeze (less, first)
            shape = Concat <axis = 0> (rows, any)
            cut = Slice ({source}, one, most, one)
            y = Reshape (cut, shape)
        }}
    """
    return onnx.parser.parse_model(text)


@pytest.mark.thorough_but("positive")
@pytest.mark.parametrize("source", ["x", "positive"])
def test_a_reshape_of_a_computed_length_is_a_view(source: str) -> None:
    shifted = mhsa.load(mhsa.compile(reshape_of_a_computed_length(source), without_attention="accept"))
    assert not any("reshape" in op.name for op in shifted.manifest.ops)
    for batch, length in ((3, 5), (1, 2), (7, 4)):
        x = np.random.default_rng(length).standard_normal((batch, length)).astype(np.float32)
        kept = x.copy()
        y = shifted(x)
        assert np.array_equal(y, (np.maximum(x, 0) if source == "positive" else x)[:, 1:].reshape(length - 1, -1))
        y += 1  # nobody else's memory
        assert np.array_equal(x, kept)


def test_a_view_of_an_input_is_no_output() -> None:
    text = """
        <ir_version: 9, opset_import: ["" : 18]>
        turned (float[B, L] x) => (float[M, N] y)
        <int64 last = {1}, int64 two = {2}, int64[1] first = {0}, int64[1] any = {-1}>
        {
            size = Shape (x)
            length = Gather <axis = 0> (size, last)
            half = Div (length, two)
            rows = Unsqueeze (half, first)
            shape = Concat <axis = 0> (rows, any)
            y = Reshape (x, shape)
        }
    """
    turned = mhsa.load(mhsa.compile(onnx.parser.parse_model(text), without_attention="accept"))
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y = turned(x)
    assert np.array_equal(y, x.reshape(2, 6))
    y[:] = -1
    assert np.array_equal(x.ravel(), np.arange(12))


def test_a_graph_without_any_code() -> None:
    text = """
        <ir_version: 9, opset_import: ["" : 18]>
        counted (float[B, L] x) => (int64 n)
        {
            n = Size (x)
        }
    """
    counted = mhsa.load(mhsa.compile(onnx.parser.parse_model(text), without_attention="accept"))
    for shape in ((3, 5), (1, 1)):
        assert counted(np.zeros(shape, np.float32)) == shape[0] * shape[1]

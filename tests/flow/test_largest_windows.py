"""Windows as large as a number allows: other programs write the largest 32-bit integer for "no end"."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import mhsa_compile as mhsa
from mhsa_compile.spec.checks import LARGEST, LONGEST

LENGTHS = ((7, 7), (5, 70), (67, 3), (1, 13))


def _expected(q, k, v, window):
    L, S = q.shape[2], k.shape[2]
    i, j = np.arange(L)[:, None], np.arange(S)
    left, right = window
    seen = ((left < 0) | (j >= i - left)) & ((right < 0) | (j <= i + right))
    scores = np.where(seen, q.astype(np.float64) @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    return np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ v


def _check(attention, window):
    rng = np.random.default_rng(0)
    for L, S in LENGTHS:
        q, k, v = (rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (L, S, S))
        assert np.abs(attention(q, k, v) - _expected(q, k, v, window)).max() < 1e-5, (L, S)


@pytest.mark.thorough
@pytest.mark.parametrize("window", [(LARGEST, 2), (LONGEST - 1, LONGEST - 1), (3, LARGEST)], ids=str)
def test_a_window_without_an_end(window) -> None:
    spec = mhsa.AttentionSpec(embed_dim=16, num_heads=2, window=window)
    _check(mhsa.load(mhsa.compile(mhsa.ScaledDotProductAttention(spec))), window)


@pytest.mark.thorough
def test_a_window_of_64_bits_in_a_file() -> None:
    tensors = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 2, length, 8])
        for name, length in (("q", "L"), ("k", "S"), ("v", "S"), ("y", "L"))
    ]
    window = {"left_window_size": 2**63 - 1, "right_window_size": 1}
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], **window)
    graph = helper.make_graph([node], "windows", tensors[:3], tensors[3:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=12)
    onnx.checker.check_model(model)
    _check(mhsa.load(mhsa.compile(model)), (-1, 1))

"""GroupQueryAttention of com.microsoft whose cache holds a window of keys alone, and what it gives of its scores,
beside ONNX Runtime.

H heads, G key heads, E their width, C the cache's capacity, W the window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError

H, G, E = 4, 2, 16


def file(batch: int, keys: int | str, outputs: int = 3, **words: Any) -> onnx.ModelProto:
    """A node that rotates, with a past of so many keys."""
    inputs = ["q", "k", "v", "past_k", "past_v", "last", "total", "cos", "sin"]
    names = ["y", "present_k", "present_v", "scores"][:outputs]
    node = helper.make_node(
        "GroupQueryAttention", inputs, names, name="gqa", domain="com.microsoft",
        num_heads=H, kv_num_heads=G, do_rotary=1, **words,
    )  # fmt: skip
    cache, after = [batch, G, keys, E], [batch, G, keys if isinstance(keys, int) else "S", E]
    shapes: dict[str, Any] = {"q": [batch, "L", H * E], "k": [batch, "L", G * E], "v": [batch, "L", G * E]}
    shapes |= {"past_k": cache, "past_v": cache}
    shapes |= {"last": (TensorProto.INT32, [batch]), "total": (TensorProto.INT32, [])}
    results = {"y": [batch, "L", H * E], "present_k": after, "present_v": after, "scores": [batch, H, "L", "T"]}
    angles = np.arange(40)[:, None] * 10.0 ** -np.linspace(0, 2, E // 2)
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    outputs_by_name = {name: results[name] for name in names}
    return model_of([node], shapes, outputs_by_name, tables, opset=21, domain="com.microsoft")


def rows(batch: int, length: int, end: int) -> dict[str, np.ndarray]:
    rng, widths = np.random.default_rng(end), {"q": H * E, "k": G * E, "v": G * E}
    feeds = {name: rng.standard_normal((batch, length, width)).astype(np.float32) for name, width in widths.items()}
    return feeds | {"last": np.full(batch, end - 1, np.int32), "total": np.array(end, np.int32)}


@pytest.mark.thorough_but("1-6-4-steps0")
@pytest.mark.parametrize(
    ("batch", "C", "W", "steps"),
    [(1, 6, 4, (3, 1, 1, 1, 1, 1, 2, 9, 1, 1)), (2, 6, 4, (3, *[1] * 9)), (1, 4, 4, (9, 1, 1, 3))],
)
def test_a_cache_of_a_window(batch: int, C: int, W: int, steps: tuple[int, ...]) -> None:
    """Prompts and tokens, one step behind the other, also longer than the cache. What lies behind the keys that it
    holds is nobody's."""
    model = file(batch, C, sliding_window_cache=1, local_window_size=W)
    ours = mhsa.load(mhsa.compile(model))
    theirs = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    caches, end = [np.zeros((batch, G, C, E), np.float32)] * 2, 0
    for length in steps:
        end += length
        feeds = rows(batch, length, end) | {"past_k": caches[0], "past_v": caches[1]}
        results, expected = ours(**feeds), theirs.run(None, feeds)
        leaving = C - W + 1
        held = end if end <= C else end - leaving * -(-(end - C) // leaving)
        assert held >= W or end < W
        for own, other in zip(results, expected, strict=True):
            assert own.shape == other.shape
            held_by_both = np.s_[...] if other is expected[0] else np.s_[:, :, :held]
            np.testing.assert_allclose(own[held_by_both], other[held_by_both], rtol=0, atol=5e-6)
        caches = [np.array(cache) for cache in results[1:]]


@pytest.mark.thorough_but("capped-1")
@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize(
    "words", [{"softcap": 3.0}, {"local_window_size": 3, "smooth_softmax": 1}], ids=["capped", "window"]
)
def test_scores(words: dict[str, Any], kind: int) -> None:
    """Before the softmax, 0 where a query does not see a key, or behind it."""
    model = file(1, "P", 4, qk_output=kind, **words)
    feeds, rng = rows(1, 3, 8), np.random.default_rng(0)
    feeds |= {name: rng.standard_normal((1, G, 5, E)).astype(np.float32) for name in ("past_k", "past_v")}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)
    actual = mhsa.load(mhsa.compile(model))(**feeds)
    for own, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=5e-6 * np.abs(other).max())
    assert (expected[3] == 0).any()


@pytest.mark.parametrize(
    ("message", "C", "outputs", "words"),
    [
        ("a local_window_size, a past", 6, 3, {"sliding_window_cache": 1}),
        ("a past of as many keys", 3, 3, {"sliding_window_cache": 1, "local_window_size": 4}),
        ("a fourth output where qk_output is 1", 6, 3, {"qk_output": 1}),
        ("qk_output=0 beside causal=0", 6, 4, {"qk_output": 2, "causal": 0}),
    ],
)
def test_what_is_refused(message: str, C: int, outputs: int, words: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=message):
        mhsa.compile(file(1, C, outputs, **words))

"""Caches that store keys and values in fewer bits than activations have.

What a cache stores is held against float64 keys and values by the format's own rounding, and what a call returns
against float64 attention over exactly what is stored: so the budget is that of float arithmetic alone, whichever way a
number near the middle of two was rounded.
"""

from __future__ import annotations

import functools

import msgspec
import numpy as np
import onnxruntime
import pytest
import torch
from support.stored_caches import HALF_STEPS, Layer, half_steps, read

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.nn.functional import to_torch
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.runtime.kv_cache import KVCache
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.position_encoding import Rope
from mhsa_compile.verification.error_budget import max_error
from mhsa_compile.verification.random_inputs import random_inputs
from mhsa_compile.verification.verify import eager

CAPACITY = 37


def spec_of(stored: str, **fields) -> AttentionSpec:
    """Sizes are no multiples of anything that a kernel likes."""
    own = {"rope": Rope(max_length=CAPACITY), "num_kv_heads": 2, "head_dim": 18, "v_head_dim": 7, **fields}
    return AttentionSpec(embed_dim=60, num_heads=6, causal=True, kv_cache={"dtype": stored}, **own)


def draw(B: int, L: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, L, 60), np.float32)


@functools.cache
def layer_of(dtype: str) -> Layer:
    return Layer(spec_of(dtype))


@pytest.fixture(params=["int8", *(pytest.param(name, marks=pytest.mark.thorough) for name in HALF_STEPS)])
def layer(request: pytest.FixtureRequest) -> Layer:
    return layer_of(request.param)


def test_rows_are_stored_by_the_rounding_of_the_format(layer: Layer) -> None:
    x, zero = draw(2, 11), np.zeros(2, np.int64)
    cache = layer.prefill.new_cache(2, CAPACITY)
    layer.prefill(x, cache=cache)
    for exact, there in zip(layer.heads(layer.exact, x, zero)[1:], read(cache), strict=True):
        truth = exact.detach().numpy()
        half, error = half_steps(cache.dtype, truth), np.abs(there[:, :, :11] - truth)
        assert (error <= half).all()
        assert error.max() > half.max() / 4  # it is rounded
        assert not there[:, :, 11:].any()
    assert cache.nbytes < layer.spec.num_kv_heads * 2 * CAPACITY * 25 * (1.5 if cache.dtype == "int8" else 2.1)


def test_prompts_and_steps_of_ragged_batches_read_what_is_stored(layer: Layer) -> None:
    """Calls of 1 and of 7 rows behind lengths of their own, to within float32's budget."""
    cache = layer.prefill.new_cache(3, CAPACITY)
    layer.prefill(draw(3, 17), cache=cache)
    cache.truncate([17, 1, 4])
    for number, rows in enumerate((1, 7, 1)):
        first, x = cache.length, draw(3, rows, seed=number + 1)
        y = (layer.step if rows == 1 else layer.prefill)(x, cache=cache)
        assert layer.share_of_budget(y, x, cache, first) <= 1
    if cache.scales:  # the control: another scale by one part in a thousand
        y = layer.step(x := draw(3, 1, seed=9), cache=cache)
        for scales in cache.scales:
            scales *= np.float32(1.001)
        assert layer.share_of_budget(y, x, cache, cache.length - 1) > 3


def test_what_was_forgotten_is_gone(layer: Layer) -> None:
    x = draw(1, 9)
    cache = layer.prefill.new_cache(1, 9)
    first = layer.prefill(x[:, :5], cache=cache)
    right = layer.step(x[:, 5:6], cache=cache)
    cache.truncate(5)
    layer.prefill(np.full_like(x[:, 6:9], np.nan), cache=cache)
    cache.truncate(5)
    assert np.array_equal(layer.step(x[:, 5:6], cache=cache), right)
    cache.reset()
    assert np.array_equal(layer.prefill(x[:, :5], cache=cache), first)


def test_nan_is_kept_by_its_row(layer: Layer) -> None:
    """Whoever sees a row with NaN or infinity in it gets NaN; a batch entry beside it does not."""
    x = draw(2, 5)
    x[0, 2] = np.nan
    cache = layer.prefill.new_cache(2, 9)
    y = layer.prefill(x, cache=cache)
    assert np.isfinite(y[0, :2]).all() and np.isnan(y[0, 2:]).all() and np.isfinite(y[1]).all()
    assert not np.isfinite(read(cache)[1][0, :, 2]).any()


def test_bits_are_equal_over_threads() -> None:
    x, results, layer = draw(3, 13), [], layer_of("int8")
    for threads in (1, 2, 4):
        prefill, step = (mhsa.load(artifact, threads=threads) for artifact in layer.artifacts)
        cache = prefill.new_cache(3, CAPACITY)
        parts = [prefill(x[:, :12], cache=cache), step(x[:, 12:], cache=cache)]
        results.append([*parts, cache.key, cache.value, *cache.scales])
    for other in results[1:]:
        assert all(np.array_equal(one, two) for one, two in zip(results[0], other, strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"softcap": 5.0, "window": (9, 0), "sinks": True, "alibi": True, "rope": None},
        {"outputs": ("y", "lse", "top_k:3", "weights"), "num_kv_heads": 6},
    ],
)
def test_artifacts_are_verified(dtype: str, fields: dict) -> None:
    module = MultiHeadAttention(spec_of(dtype, **fields))
    for dims in ({}, {"L": 1}, {"L": 7}):
        assert mhsa.verify(mhsa.compile(module, dims=dims), cases=[{"B": 3, "C": 31, "L": 7} | dims]).ok


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_activations_of_16_bits_with_a_cache_of_int8(dtype: str) -> None:
    module = MultiHeadAttention(spec_of("int8", dtype=dtype))
    for dims in ({}, {"L": 1}):
        assert mhsa.verify(mhsa.compile(module, dims=dims)).ok


@pytest.mark.thorough_but("int8")
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_onnxruntime_computes_the_file_alike(dtype: str) -> None:
    """By the definitions that the file has of its operators; ONNX Runtime has no bfloat16 outside of it."""
    model = export(MultiHeadAttention(spec_of(dtype)))
    inputs = random_inputs(model, {"B": 2, "L": 5, "C": 31})
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    theirs, ours = session.run(None, inputs), eager(model, inputs)
    assert len(theirs) == len(model.graph.output) == (5 if dtype == "int8" else 3)
    assert np.abs(theirs[0] - ours[0]).max() < 1e-5
    for one, other in zip(theirs[1:], ours[1:], strict=True):
        assert np.mean(one != other) < 1e-3 or max_error(one, other) < 1e-6


def test_what_is_refused_is_named(layer: Layer) -> None:
    spec, x = layer.spec, draw(2, 5)
    same = msgspec.structs.replace(spec, kv_cache=True)
    other = KVCache({**same.to_dict(), "outputs": ["y"]}, 2, 9)
    with pytest.raises(InputError, match="kv_cache"):
        layer.prefill(x, cache=other)
    cache = layer.prefill.new_cache(2, 9)
    inputs = cache.inputs() | {"past_key": np.zeros(cache.key.shape, np.float32)}
    with pytest.raises(InputError, match=f"past_key.*{cache.dtype}"):
        layer.prefill(x, **inputs)
    with pytest.raises(ModelError, match="kv_cache=True stores"):
        mhsa.compile(layer.module, target="cuda-sm80")


def test_the_module_in_pytorch_rounds_alike() -> None:
    layer, x, zero = layer_of("int8"), draw(2, 6), np.zeros(2, np.int64)
    cache = layer.prefill.new_cache(2, 9)
    past = {name: to_torch(array) for name, array in cache.inputs().items()}
    with torch.no_grad():
        y, *present = layer.module(to_torch(x), **past)
    layer.prefill(x, cache=cache)
    assert np.mean(present[0].numpy() != cache.key) < 1e-2
    assert layer.share_of_budget(layer.over(layer.module, x, read(cache), zero), x, cache, zero) <= 1
    assert max_error(y.numpy(), layer.over(layer.module, x, read(cache), zero)) < 2e-2 * np.abs(y.numpy()).max()
    with pytest.raises(InputError, match="past_key_scale"):
        layer.module(to_torch(x), **{name: past[name] for name in ("past_key", "past_value", "length")})


def test_the_picture_says_what_is_stored() -> None:
    assert "of int8" in MultiHeadAttention(spec_of("int8"))._repr_html_()

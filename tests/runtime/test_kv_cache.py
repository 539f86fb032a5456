"""Decoding with a cache: every step against the whole prefill in float64, ragged batches, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import onnx
import pytest
import torch

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.nn.modules import MultiHeadAttention, weights
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.runtime.kv_cache import KVCache
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.position_encoding import Rope
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import eager, oracle

STEPS, PROMPT, CAPACITY = 256, 7, 271
SHAPES = {
    "gpt2": AttentionSpec(embed_dim=96, num_heads=6, causal=True, kv_cache=True),
    "llama": AttentionSpec(
        embed_dim=128, num_heads=8, num_kv_heads=2, bias=False, causal=True, kv_cache=True,
        rope=Rope(theta=500000.0, max_length=CAPACITY),
    ),
    "all": AttentionSpec(
        embed_dim=60, num_heads=4, num_kv_heads=2, v_head_dim=7, dtype="bfloat16", causal=True, window=(100, 0),
        kv_cache=True, softcap=20.0, alibi=True, sinks=True,
    ),
}  # fmt: skip


@dataclass
class Decoder:
    """One attention, compiled for any L and for L = 1."""

    module: MultiHeadAttention
    whole: onnx.ModelProto
    """The model of the same weights without a cache."""
    prefill: CompiledAttention
    step: CompiledAttention

    @property
    def spec(self) -> AttentionSpec:
        return self.module.spec

    def of_whole(self, x: np.ndarray) -> tuple[np.ndarray, float]:
        """What one call without a cache gives in float64, and how far from it a result may be."""
        (expected,), (yardstick,) = oracle(self.whole, {"x": x}), eager(self.whole, {"x": x})
        return expected, budget(expected, yardstick, self.spec.dtype)


@pytest.fixture(
    scope="module", params=["all", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gpt2", "llama"))]
)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    torch.manual_seed(3)
    module = MultiHeadAttention(SHAPES[request.param]).eval()
    whole = MultiHeadAttention(msgspec.structs.replace(module.spec, kv_cache=False, causal="top_left")).eval()
    whole.load_state_dict(module.state_dict())
    artifacts = (mhsa.compile(module), mhsa.compile(module, dims={"L": 1}))
    return Decoder(module, export(whole), *(mhsa.load(artifact, threads=1) for artifact in artifacts))


def draw(spec: AttentionSpec, B: int, L: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((B, L, spec.embed_dim), np.float32).astype(spec.dtype)


@pytest.mark.thorough
def test_256_steps_equal_the_whole_prefill(decoder: Decoder) -> None:
    x = draw(decoder.spec, 1, PROMPT + STEPS)
    expected, allowed = decoder.of_whole(x)
    cache = decoder.prefill.new_cache(batch=1, capacity=CAPACITY)
    memory = cache.key.ctypes.data
    y = decoder.prefill(x[:, :PROMPT], cache=cache)
    assert max_error(expected[:, :PROMPT], y) <= allowed
    for i in range(PROMPT, PROMPT + STEPS):
        assert cache.length.tolist() == [i]
        y = decoder.step(x[:, i : i + 1], cache=cache)
        assert max_error(expected[:, i : i + 1], y) <= allowed, f"step {i}"
    assert cache.key.ctypes.data == memory  # written in place
    assert not cache.key[:, :, PROMPT + STEPS :].any()


def test_sequences_of_a_batch_keep_lengths_of_their_own(decoder: Decoder) -> None:
    """Prompts are padded to one length, and cut back to their own; steps go on from there."""
    lengths = [11, 3, 1]
    prompts, steps = draw(decoder.spec, 3, 11), draw(decoder.spec, 3, 4, seed=1)
    cache = decoder.step.new_cache(batch=3, capacity=17)
    decoder.prefill(prompts, cache=cache)
    cache.truncate(lengths)
    results = [decoder.step(steps[:, i : i + 1], cache=cache) for i in range(3)]
    assert cache.length.tolist() == [14, 6, 4]
    for b, length in enumerate(lengths):
        alone = np.concatenate((prompts[b : b + 1, :length], steps[b : b + 1, :3]), axis=1)
        expected, allowed = decoder.of_whole(alone)
        for i, y in enumerate(results):
            assert max_error(expected[0, length + i], y[b, 0]) <= allowed


def test_torch_goes_in_and_comes_out_and_pieces_of_any_length_do(decoder: Decoder) -> None:
    x = torch.randn(2, 13, decoder.spec.embed_dim, dtype=getattr(torch, decoder.spec.dtype))
    cache = decoder.prefill.new_cache(2, 13)
    parts = [decoder.prefill(part, cache=cache) for part in x.split([5, 6, 2], dim=1)]
    assert {type(part) for part in parts} == {torch.Tensor}
    again = decoder.prefill.new_cache(2, 13)
    whole = decoder.prefill(x, cache=again)
    _, allowed = decoder.of_whole(draw(decoder.spec, 2, 13))
    assert (torch.cat(parts, dim=1).double() - whole.double()).abs().max() <= 2 * allowed
    assert np.array_equal(cache.length, again.length)


def test_reset_and_guesses_that_were_wrong(decoder: Decoder) -> None:
    """What lies behind the length is forgotten: the same call then gives the same bits."""
    x = draw(decoder.spec, 1, 9)
    cache = decoder.prefill.new_cache(1, 9)
    first = decoder.prefill(x[:, :5], cache=cache)
    right = decoder.step(x[:, 5:6], cache=cache)
    cache.truncate(5)
    decoder.prefill(np.full_like(x[:, 6:9], np.nan), cache=cache)
    cache.truncate(5)
    assert np.array_equal(decoder.step(x[:, 5:6], cache=cache), right)
    cache.reset()
    assert cache.length.tolist() == [0]
    assert np.array_equal(decoder.prefill(x[:, :5], cache=cache), first)


def test_a_call_without_a_cache_object_writes_into_what_it_is_given(decoder: Decoder) -> None:
    x = draw(decoder.spec, 1, 5)
    cache = decoder.prefill.new_cache(1, 8)
    y = decoder.prefill(x, cache=cache)
    key, value = np.zeros_like(cache.key), np.zeros_like(cache.value)
    again, present_key, present_value = decoder.prefill(x, key, value, np.zeros(1, np.int64))
    assert np.array_equal(y, again)
    assert present_key is key
    assert present_value is value
    assert np.array_equal(key, cache.key)
    assert np.array_equal(value, cache.value)


def test_what_a_call_with_a_cache_refuses(decoder: Decoder) -> None:
    spec, x = decoder.spec, draw(decoder.spec, 2, 5)
    cache = decoder.prefill.new_cache(2, 8)
    decoder.prefill(x, cache=cache)
    other = KVCache({**cache.spec, "num_heads": 3}, 2, 8)
    refused = {
        "room for 5 more positions, got length 5 of capacity 8. Make a larger one": (decoder.prefill, x, cache),
        "one for a batch of 1, as x has, got one for 2": (decoder.prefill, x[:1], cache),
        f"one for num_heads={spec.num_heads}, as the artifact's spec, got one for num_heads=3": (
            decoder.prefill, x, other,
        ),
        "a KVCache, got tuple. Make one: attention.new_cache": (decoder.prefill, x, (cache.key, cache.value)),
    }  # fmt: skip
    for message, (attention, given, brought) in refused.items():
        with pytest.raises(InputError) as caught:
            attention(given, cache=brought)
        assert message in str(caught.value)
        assert caught.value.argument == "cache"
    with pytest.raises(InputError, match="'x'"):
        decoder.step(x[:, :2], cache=cache)
    with pytest.raises(InputError, match="'x'"):
        decoder.prefill(x[:, :3, :-1], cache=cache)
    assert cache.length.tolist() == [5, 5]  # nothing of these counted


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        ([5], "one for each of the 2"),
        (1.0, "an integer"),
        (6, r"from 0 to what is valid, \[5, 5\]"),
        ([-1, 0], "0 to"),
        (np.ma.array([5, 1]), "without a mask"),
    ],
)
def test_lengths_a_cache_cannot_be_cut_to(length: object, expected: str) -> None:
    cache = KVCache(SHAPES["gpt2"].to_dict(), batch=2, capacity=8)
    cache.advance(5)
    with pytest.raises(InputError, match=expected):
        cache.truncate(length)


def test_what_is_fixed_at_compile_time_is_known() -> None:
    spec = AttentionSpec(embed_dim=8, num_heads=2, causal=True, kv_cache=True)
    fixed = mhsa.load(mhsa.compile(spec, dims={"B": 1, "L": 1, "C": 32}), threads=1)
    assert (fixed.new_cache().batch, fixed.new_cache().capacity) == (1, 32)
    for changes, message in (({"batch": 2}, "batch: expected 1"), ({"capacity": 33}, "capacity: expected 32")):
        with pytest.raises(InputError, match=message):
            fixed.new_cache(**changes)


@pytest.mark.parametrize("given", [0, True, None, 8.0])
def test_capacities_that_are_none(decoder: Decoder, given: object) -> None:
    with pytest.raises(InputError, match="capacity: expected a positive integer"):
        decoder.prefill.new_cache(1, given)


def test_a_cache_is_no_longer_than_its_positions(decoder: Decoder) -> None:
    if decoder.spec.rope is None:
        assert decoder.prefill.new_cache(1, 5000).capacity == 5000
        return
    with pytest.raises(InputError, match=r"at most the spec's rope\.max_length = 271"):
        decoder.prefill.new_cache(1, 272)


@pytest.fixture(scope="module")
def without_cache() -> tuple[MultiHeadAttention, mhsa.Artifact]:
    torch.manual_seed(5)
    module = MultiHeadAttention(AttentionSpec(embed_dim=40, num_heads=5)).eval()
    return module, mhsa.compile(module)


@pytest.mark.thorough
def test_a_spec_without_a_cache_has_none(without_cache: tuple[MultiHeadAttention, mhsa.Artifact]) -> None:
    plain = mhsa.load(without_cache[1], threads=1)
    cache = KVCache(SHAPES["gpt2"].to_dict(), batch=1, capacity=8)
    for call in (lambda: plain.new_cache(1, 8), lambda: plain(np.zeros((1, 3, 40), np.float32), cache=cache)):
        with pytest.raises(InputError, match="cache: expected an artifact of a spec with kv_cache"):
            call()


def test_layers_that_share_their_weights_share_one_attention(
    without_cache: tuple[MultiHeadAttention, mhsa.Artifact],
) -> None:
    """ALBERT (https://arxiv.org/abs/1909.11942): the same weights in every layer, so one load serves all."""
    module, artifact = without_cache
    attention, loaded_again = mhsa.load(artifact, threads=1), mhsa.load(artifact, weights=weights(module), threads=1)
    torch.manual_seed(5)
    x = torch.randn(2, 7, 40)
    with torch.no_grad():
        yardstick, y = (three_times(layer, x).numpy() for layer in (module, attention))
        exact = three_times(copy.deepcopy(module).double(), x.double()).numpy()
    assert max_error(exact, y) <= budget(exact, yardstick, "float32")
    assert np.array_equal(attention(y), loaded_again(y))


def three_times(layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + layer(x)
    return x

"""Arguments and results of a module that are no tensors: tuples, ModelOutputs and caches of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, EncoderDecoderCache, GPT2Config, StaticCache
from transformers.modeling_outputs import BaseModelOutput

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.export.module_calls import TensorModule
from mhsa_compile.frontend.export.nested_values import taken_apart, tensors_by_name

B, H, P, E = 2, 3, 5, 4


def filled(length: int, layers: int = 2) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(layers):
        cache.update(torch.randn(B, H, length, E), torch.randn(B, H, length, E), layer)
    return cache


class Decoder(nn.Module):
    """Adds a key and a value of ones to each layer of the cache, and returns what it was given."""

    def forward(self, x: Tensor, past_key_values: Any, encoder_outputs: Any = None) -> Any:
        caches = past_key_values
        own = caches.self_attention_cache if isinstance(caches, EncoderDecoderCache) else caches
        for layer in range(len(own)):
            own.update(torch.ones(B, H, 1, E), torch.ones(B, H, 1, E), layer)
        return {"y": x, "past_key_values": caches, "encoder_outputs": encoder_outputs}


def test_a_cache_is_keys_and_values_by_name() -> None:
    cache, x = filled(P), torch.zeros(B, 7)
    inputs, nested = taken_apart(Decoder(), [x, cache])  # in the order of forward
    assert list(inputs) == ["x", *(f"past_{i}_{kind}" for i in range(2) for kind in ("key", "value"))]
    for _ in range(2):  # a call leaves the example, and the call that follows, as they were
        given = {name: value + 1 for name, value in inputs.items()}
        results = TensorModule(Decoder(), nested).results(given)
        assert list(results) == ["y", *(name.replace("past", "present") for name in given if name != "x")]
        for i in range(2):
            torch.testing.assert_close(results[f"present_{i}_key"][:, :, :P], given[f"past_{i}_key"])
            assert results[f"present_{i}_value"].shape == (B, H, P + 1, E)
    assert cache.get_seq_length() == P


def test_a_cache_of_two_kinds_and_a_model_output() -> None:
    rows = torch.randn(B, 9, 8)
    pair = EncoderDecoderCache(filled(P, layers=1), filled(9, layers=1))
    examples = {"x": torch.zeros(B, 7), "past_key_values": pair, "encoder_outputs": BaseModelOutput(rows)}
    inputs, nested = taken_apart(Decoder(), examples)
    assert list(inputs)[1:] == [
        "past_0_self_key", "past_0_self_value", "past_0_cross_key", "past_0_cross_value",
        "encoder_outputs_last_hidden_state",
    ]  # fmt: skip
    arguments = nested.arguments(inputs)
    assert isinstance(arguments["encoder_outputs"], BaseModelOutput)
    assert arguments["past_key_values"].is_updated == {0: True}  # its cross-attention need not be computed
    results = TensorModule(Decoder(), nested).results(inputs)
    torch.testing.assert_close(results["present_0_cross_key"], inputs["past_0_cross_key"])
    assert results["present_0_self_key"].shape[2] == P + 1


def test_caches_that_are_more_than_their_rows() -> None:
    config = GPT2Config(n_layer=1, n_embd=12, n_head=3)
    static = StaticCache(config, max_cache_len=8)
    with pytest.raises(InputError, match=r"'past_key_values'.*got one with a StaticLayer\. Pass a DynamicCache\(\)"):
        taken_apart(Decoder(), {"x": torch.zeros(B, 7), "past_key_values": static})
    with pytest.raises(ModelError, match=r"got StaticCache 'past_key_values'\. Have the module return"):
        list(tensors_by_name("past_key_values", static, lambda: "Have the module return tensors."))
    assert list(tensors_by_name("past_key_values", DynamicCache(), str)) == []
    with pytest.raises(InputError, match="one input called 'past_0_key', got two"):
        taken_apart(Decoder(), {"past_0_key": torch.zeros(B, 7), "past_key_values": filled(P)})

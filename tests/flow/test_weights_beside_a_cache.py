"""`weights`, and what else is said of a softmax, beside a cache: a column for each of its places, used or not, as NumPy
has it in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

import mhsa_compile as mhsa

pytestmark = pytest.mark.thorough
D, H, G, E, CAPACITY = 24, 4, 2, 5, 11
OUTPUTS = ("y", "weights", "lse", "entropy", "top_k:3")


class Expected:
    """The softmax of all queries so far, over the places of a cache (B, H, L, CAPACITY), and what is said of it."""

    def __init__(self, module: mhsa.MultiHeadAttention, x: Any, lengths: Any, new: int, window: int | None) -> None:
        weights = {name: value.detach().double().numpy() for name, value in module.named_parameters()}

        def projected(name: str, heads: int) -> Any:
            rows = x.astype(np.float64) @ weights[f"{name}_proj.weight"].T + weights[f"{name}_proj.bias"]
            return rows.reshape(*x.shape[:2], heads, E).swapaxes(1, 2)

        q, k = projected("q", H), np.repeat(projected("k", G), H // G, axis=1)
        B, L = x.shape[:2]
        self.weights, self.lse = np.zeros((B, H, new, CAPACITY)), np.zeros((B, H, new))
        for b in range(B):
            places = np.arange(CAPACITY)
            for i in range(new):
                p = lengths[b] + i  # where the query lies in its sequence
                seen = (places <= p) & (places >= (0 if window is None else p - window))
                keys = self._cached(k, b, lengths[b], new)
                scores = np.einsum("he,hce->hc", q[b, :, L - new + i], keys) / np.sqrt(E)
                terms = np.where(seen, np.exp(scores), 0.0)
                self.weights[b, :, i] = terms / terms.sum(-1, keepdims=True)
                self.lse[b, :, i] = np.log(terms.sum(-1))
        logs = np.log(self.weights, where=self.weights > 0, out=np.zeros_like(self.weights))
        self.entropy = -(self.weights * logs).sum(-1)
        self.top_k_weights = -np.sort(-self.weights)[..., :3]

    @staticmethod
    def _cached(k: Any, b: int, length: int, new: int) -> Any:
        """Keys by place of sequence b, whose first `length` tokens and last `new` ones it has."""
        keys = np.zeros((H, CAPACITY, E))
        keys[:, :length] = k[b, :, :length]
        keys[:, length : length + new] = k[b, :, k.shape[2] - new :]
        return keys


@pytest.fixture(scope="module", params=[None, 2], ids=["all keys", "a window"])
def layer(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    window = None if request.param is None else (request.param, 0)
    sizes = {"num_kv_heads": G, "head_dim": E, "window": window}
    spec = mhsa.AttentionSpec(embed_dim=D, num_heads=H, causal=True, kv_cache=True, outputs=OUTPUTS, **sizes)
    module = mhsa.MultiHeadAttention(spec)
    return module, mhsa.load(mhsa.compile(module)), request.param


def test_a_column_for_each_place_of_the_cache(layer: Any) -> None:
    """A prompt, of which the second sequence keeps less, then a step: what lies behind the length, or was taken back,
    has the weight 0."""
    module, attention, window = layer
    x = np.random.default_rng(1).standard_normal((2, 7, D)).astype(np.float32)
    cache = attention.new_cache(batch=2, capacity=CAPACITY)
    assert [info.dims for info in attention.outputs if info.name == "weights"] == [("B", H, "L", "C")]
    for new, lengths in ((6, [0, 0]), (1, [6, 4])):
        if new == 1:
            cache.truncate(lengths)
        given = x[:, :6] if new == 6 else x[:, 6:]
        result = attention(given, cache=cache)
        expected = Expected(module, x[:, :6] if new == 6 else x, lengths, new, window)
        assert result.weights.shape == (2, H, new, CAPACITY)
        np.testing.assert_allclose(result.weights, expected.weights, atol=2e-6)
        assert not result.weights[expected.weights == 0].any()
        np.testing.assert_allclose(result.lse, expected.lse, atol=1e-5)
        np.testing.assert_allclose(result.entropy, expected.entropy, atol=1e-5)
        np.testing.assert_allclose(result.top_k_weights, expected.top_k_weights, atol=2e-6)
        taken = np.take_along_axis(expected.weights, np.maximum(result.top_k_keys, 0), -1)
        np.testing.assert_allclose(np.where(result.top_k_keys < 0, 0, taken), expected.top_k_weights, atol=2e-6)
        assert result.top_k_keys.max() < lengths[0] + new  # a key's number is its place in the cache


def test_the_columns_of_a_file_are_those_of_its_present_keys() -> None:
    """onnx's own evaluator gives them as what the operator is asked for after its softmax."""
    shapes: dict[str, list[str | int]] = {
        "q": ["B", H, "L", E], "k": ["B", G, "L", E], "v": ["B", G, "L", E],
        "past_k": ["B", G, "P", E], "past_v": ["B", G, "P", E],
    }  # fmt: skip
    outputs = {"y": ["B", H, "L", E], "present_k": ["B", G, "T", E], "present_v": ["B", G, "T", E]}

    def model(*more: str) -> onnx.ModelProto:
        made = [*outputs, *more]
        node = helper.make_node("Attention", ["q", "k", "v", "", "past_k", "past_v"], made, is_causal=1)
        if more:
            node.attribute.append(helper.make_attribute("qk_matmul_output_mode", 3))
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        given = {**outputs, "scores": ["B", H, "L", "T"]}
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, given[name]) for name in made]
        graph = helper.make_graph([node], "decoder", infos, results)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)

    attention = mhsa.load(mhsa.compile(model(), outputs=("weights",)))
    rng, sizes = np.random.default_rng(2), {"B": 2, "L": 3, "P": 4}
    arrays = {
        name: rng.standard_normal([sizes.get(str(size), size) for size in shape], np.float32)
        for name, shape in shapes.items()
    }
    *_, expected = ReferenceEvaluator(model("scores")).run(None, arrays)
    weights = attention(**arrays).layer0_weights
    assert weights.shape == expected.shape == (2, H, 3, 7)
    np.testing.assert_allclose(weights, expected, atol=2e-6)

"""A Llama in OpenVINO's own operators, with its caches as the model's states, as optimum-intel exports one.

OpenVINO's CPU plugin makes one operation of a state, what is appended to it, and attention over both
(`ScaledDotProductAttentionWithKVCache`), and stores the state as KV_CACHE_PRECISION says. It looks for the graph that
is written here: a ReadValue, a Gather by beam_idx, a Concat, key heads spread to query heads,
ScaledDotProductAttention.

Notation: L tokens of this call, S keys with those of the past.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
from openvino import opset13 as ops


@dataclass(frozen=True)
class Sizes:
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    epsilon: float


@dataclass
class _Graph:
    weights: Mapping[str, np.ndarray]
    sizes: Sizes
    assigned: list[Any] = field(default_factory=list)

    def norm(self, x: Any, name: str) -> Any:
        mean = ops.reduce_mean(ops.power(x, np.float32(2)), np.array([-1]), keep_dims=True)
        root = ops.sqrt(ops.add(mean, np.float32(self.sizes.epsilon)))
        return ops.multiply(ops.constant(self.weights[name]), ops.multiply(x, ops.divide(np.float32(1), root)))

    def linear(self, x: Any, name: str) -> Any:
        return ops.matmul(x, ops.constant(self.weights[f"{name}.weight"]), False, True)

    def heads_apart(self, rows: Any, heads: int) -> Any:
        shape = np.array([0, 0, heads, self.sizes.head_dim])
        return ops.transpose(ops.reshape(rows, shape, True), np.array([0, 2, 1, 3]))

    def rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        half, far = np.array([self.sizes.head_dim // 2]), np.array([2**31 - 1])
        one, axis, zero = np.array([1]), np.array([3]), np.array([0])
        lower, upper = ops.slice(x, zero, half, one, axis), ops.slice(x, half, far, one, axis)
        turned = ops.concat([ops.multiply(upper, np.float32(-1)), lower], -1)
        return ops.add(ops.multiply(x, cos), ops.multiply(turned, sin))

    def with_past(self, new: Any, name: str, batch: Any, beams: Any) -> Any:
        """Keys or values (1, G, S, E), those of the state first; the state becomes they."""
        sizes = self.sizes
        shape = ops.concat([batch, ops.constant(np.array([sizes.kv_heads, 0, sizes.head_dim]))], 0)
        empty = ops.broadcast(np.float32(0), shape)
        state = ops.read_value(
            empty, name, openvino.Type.f32, openvino.PartialShape([-1, sizes.kv_heads, -1, sizes.head_dim])
        )
        whole = ops.concat([ops.gather(state, beams, np.int64(0)), new], 2)
        self.assigned.append(ops.assign(whole, name))
        return whole

    def of_query_heads(self, x: Any) -> Any:
        """(1, G, S, E) -> (1, H, S, E): each key head as often as it has query heads."""
        sizes, repeats = self.sizes, self.sizes.heads // self.sizes.kv_heads
        spread = ops.broadcast(
            ops.unsqueeze(x, np.array([2])), np.array([1, 1, repeats, 1, 1]), broadcast_spec="BIDIRECTIONAL"
        )
        return ops.reshape(spread, np.array([0, sizes.heads, -1, sizes.head_dim]), True)

    def attention(self, x: Any, layer: int, angles: tuple[Any, Any], mask: Any, batch: Any, beams: Any) -> Any:
        name, sizes = f"model.layers.{layer}.self_attn", self.sizes
        query = self.rotated(self.heads_apart(self.linear(x, f"{name}.q_proj"), sizes.heads), *angles)
        key = self.rotated(self.heads_apart(self.linear(x, f"{name}.k_proj"), sizes.kv_heads), *angles)
        value = self.heads_apart(self.linear(x, f"{name}.v_proj"), sizes.kv_heads)
        keys, values = (
            self.of_query_heads(self.with_past(new, f"past.{layer}.{role}", batch, beams))
            for role, new in (("key", key), ("value", value))
        )
        y = ops.scaled_dot_product_attention(query, keys, values, mask)
        together = ops.reshape(ops.transpose(y, np.array([0, 2, 1, 3])), np.array([0, 0, -1]), True)
        return self.linear(together, f"{name}.o_proj")

    def hidden(self, x: Any, layer: int) -> Any:
        name = f"model.layers.{layer}.mlp"
        gate = ops.swish(self.linear(x, f"{name}.gate_proj"))
        return self.linear(ops.multiply(gate, self.linear(x, f"{name}.up_proj")), f"{name}.down_proj")

    def angles(self, positions: Any) -> tuple[Any, Any]:
        """cos and sin (1, 1, L, E) at positions (1, L)."""
        half = self.sizes.head_dim // 2
        frequencies = self.sizes.rope_theta ** (-np.arange(half, dtype=np.float32) / half)
        row = ops.convert(ops.unsqueeze(positions, np.array([1])), "f32")
        each = ops.matmul(frequencies[None, :, None], row, False, False)
        turns = ops.transpose(each, np.array([0, 2, 1]))
        both = ops.concat([turns, turns], -1)
        return ops.unsqueeze(ops.cos(both), np.array([1])), ops.unsqueeze(ops.sin(both), np.array([1]))


def stateful_llama(weights: Mapping[str, np.ndarray], sizes: Sizes) -> openvino.Model:
    """input_ids and position_ids (1, L), attention_mask (1, S), beam_idx (1,) -> the logits of the last token.

    The weights are transformers'; the head is the embedding. No token of the attention mask may be hidden: it says how
    many there are.
    """
    graph = _Graph(weights, sizes)
    ids, positions, known = (ops.parameter([-1, -1], np.int64) for _ in range(3))
    beams = ops.parameter([-1], np.int32)
    parameters = {"input_ids": ids, "position_ids": positions, "attention_mask": known, "beam_idx": beams}
    for name, node in parameters.items():
        node.output(0).set_names({name})
    batch = ops.gather(ops.shape_of(ids), np.array([0]), np.int64(0))
    count = ops.gather(ops.shape_of(known), np.int64(1), np.int64(0))
    keys = ops.range(np.int64(0), count, np.int64(1), "i64")
    visible = ops.less_equal(ops.unsqueeze(keys, np.array([0, 1, 2])), ops.unsqueeze(positions, np.array([1, 3])))
    mask = ops.select(visible, np.float32(0), np.float32(np.finfo(np.float32).min))
    table, angles = ops.constant(weights["model.embed_tokens.weight"]), graph.angles(positions)
    x = ops.gather(table, ids, np.int64(0))
    for layer in range(sizes.layers):
        norm = f"model.layers.{layer}.{{}}_layernorm.weight"
        x = ops.add(x, graph.attention(graph.norm(x, norm.format("input")), layer, angles, mask, batch, beams))
        x = ops.add(x, graph.hidden(graph.norm(x, norm.format("post_attention")), layer))
    far, one = np.array([2**31 - 1]), np.array([1])
    last = ops.slice(graph.norm(x, "model.norm.weight"), np.array([-1]), far, one, one)
    logits = ops.matmul(last, table, False, True)
    return openvino.Model([ops.result(logits)], graph.assigned, list(parameters.values()), "llama")

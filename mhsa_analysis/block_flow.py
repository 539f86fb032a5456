"""What one layer makes of the tokens of one text, from x to y, as arrays of every step.

Notation: L length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhsa_analysis.layer_weights import LayerWeights, as_array, weights_of
from mhsa_compile.errors import InputError

_NEEDED = ("y", "heads", "lse", "weights")


@dataclass(frozen=True, eq=False)
class BlockFlow:
    """One text through one layer.

    layer    its weights
    x        (L, D), and y (L, D)
    queries  (H, L, E), keys (G, L, E), values (G, L, F): x W + b by the layer's weights, before rotary positions
    scores   (H, L, L): ln(weights) + lse, so what the softmax was of, whatever made it; -inf where the weight is 0
    weights  (H, L, L), and heads (H, L, F), as the layer or its artifact gave them
    """

    layer: LayerWeights
    tokens: tuple[str, ...]
    x: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    scores: np.ndarray
    weights: np.ndarray
    heads: np.ndarray
    y: np.ndarray

    def values_of(self, head: int) -> np.ndarray:
        """(L, F): the values that a head mixes; several share them where G < H."""
        return np.asarray(self.values[head // (len(self.heads) // len(self.values))])

    @property
    def clearest(self) -> tuple[int, int]:
        """(head, query) of the largest weight, where it can be on neither the query itself nor the ends of the text."""
        others = self.weights * (1 - np.eye(len(self.tokens)))
        others[:, :, [0, -1]] = 0
        weights = others if others.any() else self.weights
        head, query, _ = np.unravel_index(int(weights.argmax()), weights.shape)
        return int(head), int(query)


def flow_of(layer: Any, x: Any, outputs: Any, tokens: Sequence[str]) -> BlockFlow:
    """The flow of one text through `layer`, a MultiHeadAttention of self-attention or an artifact of one: x (1, L, D),
    and what a call returned, with y, heads, lse and weights. Raises InputError."""
    arrays = outputs._asdict() if hasattr(outputs, "_asdict") else outputs
    if missing := [name for name in _NEEDED if name not in arrays]:
        hint = f"Compile the layer with outputs={','.join(_NEEDED)}."
        raise InputError("outputs", f"{', '.join(_NEEDED)}", f"none named {', '.join(missing)}", hint)
    y, heads, lse, weights = (as_array(arrays[name])[0].astype(np.float64) for name in _NEEDED)
    source = weights_of(layer)
    states = as_array(x)[0].astype(np.float64)
    if source.spec.is_cross or len(tokens) != len(states):
        raise InputError("tokens", f"a word for each of {len(states)} places of self-attention", f"{len(tokens)} words")
    with np.errstate(divide="ignore"):
        scores = np.log(weights) + lse[..., np.newaxis]
    queries, keys, values = (_projected(source, part, states) for part in "qkv")
    return BlockFlow(source, tuple(tokens), states, queries, keys, values, scores, weights, heads, y)


def _projected(layer: LayerWeights, part: str, x: np.ndarray) -> np.ndarray:
    """(heads, L, dims of a head)."""
    blocks = layer.blocks(part)
    bias = layer.arrays.get(f"{part}_proj.bias", np.zeros(blocks.shape[0] * blocks.shape[1]))
    projected: np.ndarray = np.einsum("ld,hed->hle", x, blocks, optimize=True) + bias.reshape(len(blocks), 1, -1)
    return projected

"""nn.TransformerEncoderLayer around an attention that is replaced: its parts are called, not PyTorch's one operator for
all of them, but for calls so small that the operator is as fast. Calls with a mask stay ours, however small: the
operator differs in rows that see no key, and in what NaN at hidden keys does.

Notation: B batch, L length, D embed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from mhsa_compile.integrations.attention_operator import is_recorded

SMALL = 1_500_000
"""Multiply-adds of a call from which on the parts are faster. One thread of PyTorch's operator spends some 25 us less
outside of its products; on two threads of a Zen 5 both take the same time at D 64 and L 30, D 128 and L 9, D 512 and
L 1."""
_WHY = "a layer of an encoder on so little that PyTorch's one operator is as fast"


class EncoderLayerForward:
    """The forward of an encoder's layer whose forward is PyTorch's own. `left` is told of calls that are left to its
    operator."""

    def __init__(self, layer: nn.TransformerEncoderLayer, left: Callable[[str], None]) -> None:
        self._layer, self._left = layer, left

    def __reduce__(self) -> Any:
        return type(self), (self._layer, self._left)

    def __call__(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """src (B, L, D) -> (B, L, D); masks as `nn.TransformerEncoderLayer.forward` takes them."""
        layer = self._layer
        forward: Callable[..., Tensor] = type(layer).forward
        arguments = (src, src_mask, src_key_padding_mask, is_causal)
        if is_recorded():  # what PyTorch does is as right
            return forward(layer, *arguments)
        if src_mask is None and src_key_padding_mask is None and self._is_small(src):
            self._left(_WHY)
            return forward(layer, *arguments)
        parts = object.__new__(type(layer))
        vars(parts).update(vars(layer), activation_relu_or_gelu=0)  # an activation that the operator lacks
        return forward(parts, *arguments)

    def _is_small(self, src: Tensor) -> bool:
        """Whether a call is PyTorch's operator's, as far as a glance tells, and better left to it."""
        layer = self._layer
        if torch.is_grad_enabled() or layer.training or src.ndim != 3 or src.is_nested:
            return False
        parts: dict[str, Any] = layer._modules  # a third of the time that attributes take
        plain = type(parts["linear1"]) is nn.Linear and parts["self_attn"].batch_first
        if not (plain and layer.activation_relu_or_gelu):
            return False
        B, L, D = src.shape
        products = 4 * D * D + 2 * D * parts["linear1"].out_features + 2 * L * D
        return B * L * products < SMALL and torch.backends.mha.get_fastpath_enabled()


def is_plain(layer: nn.Module) -> TypeGuard[nn.TransformerEncoderLayer]:
    """Whether a module is an encoder's layer that computes what PyTorch's class does."""
    own = type(layer).forward is nn.TransformerEncoderLayer.forward
    return isinstance(layer, nn.TransformerEncoderLayer) and own and "forward" not in vars(layer)

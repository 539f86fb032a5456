"""nn.TransformerEncoderLayer around an attention that is replaced: one artifact, or its parts. PyTorch's one operator
for all of them computes calls so small that it is as fast, and longer ones on which it was measured to be faster. Calls
with a mask stay ours, however small: the operator differs in rows that see no key, and in what NaN at hidden keys does.

Padded batches go through nn.TransformerEncoder without their padding, several sequences in a row. PyTorch's encoder
turns such a batch into nested tensors, whose padding is zeros in the end. Here the sequences of a batch are laid into
as few rows of the longest one's length as hold them, and a mask keeps them apart: linears and norms work on tokens, and
attention stays within a row.

Notation: B batch, L length, D embed, P rows, R length of a row, H heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from mhsa_compile.integrations.call_context import StandsForFunction, is_recorded, wants_gradient, why_not_numbers
from mhsa_compile.integrations.copies import fields_of_its_own
from mhsa_compile.integrations.layers.whole import Attended, WholeCall, WholeLayerForward

SMALL = 1_500_000
"""Multiply-adds of a call from which on the parts are faster. One thread of PyTorch's operator spends some 25 us less
outside of its products; on two threads of a Zen 5 both take the same time at D 64 and L 30, D 128 and L 9, D 512 and
L 1."""
_WHY = "a layer of an encoder on so little that PyTorch's one operator is as fast"


_WORTH = 0.9
"""What rows may hold of a padded batch's places, so that it is worth laying it out anew."""


class EncoderLayerForward(WholeLayerForward):
    """The forward of an encoder's layer whose forward is PyTorch's own: one artifact, or its parts."""

    def __call__(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """src (B, L, D) -> (B, L, D); masks as `nn.TransformerEncoderLayer.forward` takes them."""
        arguments = (src, src_mask, src_key_padding_mask, is_causal)
        if self._is_pytorchs():  # what PyTorch does is as right
            return self._by_pytorch(*arguments)
        if src_mask is None and src_key_padding_mask is None and self._is_small(src):
            return self._by_pytorch(*arguments, why=_WHY)
        attended = (Attended(src_mask, src_key_padding_mask, is_causal),)
        result = self._fastest(WholeCall(arguments, (src,), attended))
        return self._by_parts(*arguments) if result is None else result

    def _by_parts(self, *arguments: Any) -> Tensor:
        layer = self._layer
        parts = object.__new__(type(layer))
        vars(parts).update(fields_of_its_own(layer), activation_relu_or_gelu=0)  # an activation that the operator lacks
        forward: Callable[..., Tensor] = type(layer).forward
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


class EncoderForward(StandsForFunction):
    """The forward of an encoder all of whose attentions are replaced, and which PyTorch would have run on nested
    tensors. Its result at padding is 0, as PyTorch's is."""

    def __init__(self, encoder: nn.TransformerEncoder) -> None:
        self._encoder = encoder
        self.is_restored = False

    def _function(self) -> Any:
        return type(self._encoder).forward.__get__(self._encoder)

    def __call__(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """src (B, L, D), src_key_padding_mask (B, L), True at padding -> (B, L, D)."""
        encoder, padding = self._encoder, src_key_padding_mask
        forward: Callable[..., Tensor] = type(encoder).forward
        rows = _rows(padding) if padding is not None and mask is None and self._may_pack(src, padding) else None
        if rows is None or padding is None:
            return forward(encoder, src, mask, src_key_padding_mask, is_causal)
        places, sequences = _layout(rows, padding)
        tokens = src.reshape(-1, src.shape[-1])
        packed = tokens[places.clamp(min=0)]
        heads = encoder.layers[0].self_attn.num_heads
        apart = sequences[:, None, :] != sequences[:, :, None]
        y = forward(encoder, packed, apart.repeat_interleave(heads, 0), None, False)
        result = torch.zeros_like(tokens)
        result[places[places >= 0]] = y[places >= 0]
        return result.view_as(src)

    def _may_pack(self, src: Tensor, padding: Tensor) -> bool:
        """Whether PyTorch would have dropped the padding of this call, and artifacts can compute it."""
        encoder = self._encoder
        plain = src.ndim == 3 and padding.dtype == torch.bool and padding.shape == src.shape[:2]
        if not plain or self.is_restored or is_recorded() or encoder.training:
            return False
        if not torch.backends.mha.get_fastpath_enabled():
            return False
        return not why_not_numbers(src, padding) and not wants_gradient(src, *encoder.parameters())


def _rows(padding: Tensor) -> list[list[int]] | None:
    """Which sequences share a row of the longest one's length, the longest first; None where that saves little."""
    B, L = padding.shape
    lengths = (L - padding.sum(1)).tolist()
    longest = max(lengths, default=0)
    rows: list[list[int]] = []
    room: list[int] = []
    for sequence in sorted(range(B), key=lambda number: -lengths[number]):
        size = lengths[sequence]
        row = next((i for i, space in enumerate(room) if space >= size), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(longest)
        rows[row].append(sequence)
        room[row] -= size
    return rows if longest and len(rows) * longest < _WORTH * B * L else None


def _layout(rows: Sequence[Sequence[int]], padding: Tensor) -> tuple[Tensor, Tensor]:
    """(places (P, R) of tokens among B * L, -1 where a row has room; sequences (P, R), -1 there)."""
    L, valid = padding.shape[1], ~padding
    tokens = [torch.cat([sequence * L + valid[sequence].nonzero()[:, 0] for sequence in row]) for row in rows]
    places = nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=-1)
    return places, torch.where(places < 0, -1, torch.div(places, L, rounding_mode="floor"))

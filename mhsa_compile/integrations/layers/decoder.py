"""nn.TransformerDecoderLayer around attentions that are replaced: one artifact, or its parts.

Notation: B batch, L query length, S key length, D embed.
"""

from __future__ import annotations

from torch import Tensor

from mhsa_compile.integrations.layers.whole import Attended, WholeCall, WholeLayerForward


class DecoderLayerForward(WholeLayerForward):
    """The forward of a decoder's layer."""

    def __call__(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """tgt (B, L, D), memory (B, S, D) -> (B, L, D); masks as `nn.TransformerDecoderLayer.forward` takes them."""
        padding = (tgt_key_padding_mask, memory_key_padding_mask)
        arguments = (tgt, memory, tgt_mask, memory_mask, *padding, tgt_is_causal, memory_is_causal)
        if self._is_pytorchs():  # what PyTorch does is as right
            return self._by_pytorch(*arguments)
        attended = (Attended(tgt_mask, padding[0], tgt_is_causal), Attended(memory_mask, padding[1], memory_is_causal))
        result = self._fastest(WholeCall(arguments, (tgt, memory), attended))
        return self._by_parts(*arguments) if result is None else result

"""What masks of calls say together: that all keys are seen, a band of them, or what every call has to say itself.

Notation: B batch, L query length, S key length, H heads.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.masks import HIDES
from mhsa_compile.spec.window import window_of
from mhsa_compile.verification.error_budget import agrees


@dataclass(frozen=True)
class VisibleBand:
    """`causal` and `window` of an AttentionSpec."""

    causal: str | None = None
    window: tuple[int, int] | None = None

    def visible(self, L: int, S: int) -> Tensor:
        """Which keys each query sees, (L, S) bool."""
        left, right = self.window or (-1, -1)
        band = window_of(left, right if self.causal is None else 0, self.causal or "top_left")
        return torch.ones(L, S, dtype=torch.bool) if band is None else torch.from_numpy(band.visible(range(L), L, S))


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """The mask of one call with L queries and S keys: bool, True takes part, or added; broadcastable to (B, H, L, S).

    window   how many keys back the caller says a query sees, itself among them
    """

    mask: Tensor | None
    L: int
    S: int
    window: int | None = None

    def is_band(self, band: VisibleBand) -> bool:
        """Whether the mask is what `band` says."""
        visible = band.visible(self.L, self.S)
        return bool(visible.all()) if self.mask is None else bool((self.mask == visible).all())

    def rows(self, B: int) -> Tensor:
        """(B, L) bool: queries that see a key."""
        if self.mask is None or self.mask.dtype != torch.bool:
            return torch.ones(B, self.L, dtype=torch.bool)
        heads = self.mask.expand(*self.mask.shape[:-1], self.S) if self.mask.ndim == 4 else self.mask[None, None]
        return heads.any(-1).any(1).expand(B, self.L)


def bool_where_it_hides(mask: Tensor | None) -> Tensor | None:
    """A mask that is added, as bool if it does nothing but hide."""
    if mask is None or mask.dtype == torch.bool:
        return mask
    hidden = mask <= max(HIDES, torch.finfo(mask.dtype).min)
    return ~hidden if bool((hidden | (mask == 0)).all()) else mask.detach()


def mask_kind(calls: Sequence[VisibleKeys]) -> str:
    """Returns "additive" where one of the masks is added, else "bool"."""
    return "bool" if all(call.mask is None or call.mask.dtype == torch.bool for call in calls) else "additive"


def mask_for(spec: AttentionSpec, call: VisibleKeys, dtype: torch.dtype) -> Tensor | None:
    """What a call of a module with this spec takes as `mask=`."""
    if spec.mask is None:
        return None
    if spec.mask == "bool":
        return torch.ones(1, 1, call.L, call.S, dtype=torch.bool) if call.mask is None else call.mask
    if call.mask is None:
        return torch.zeros(1, 1, call.L, call.S, dtype=dtype)
    if call.mask.dtype == torch.bool:
        return torch.zeros_like(call.mask, dtype=dtype).masked_fill(~call.mask, -torch.inf)
    return call.mask.to(dtype)


def gives(module: MultiHeadAttention, inputs: Sequence[Tensor | None], call: VisibleKeys, y: Tensor) -> bool:
    """Whether a module gives y (B, L, D) for these rows, as closely as float32 computes it, where a query sees a
    key."""
    results = []
    for dtype in (torch.float64, torch.float32):
        tensors = [rows.to(dtype) for rows in inputs if rows is not None]
        results.append(copy.deepcopy(module).to(dtype)(*tensors, mask=mask_for(module.spec, call, dtype)))
    sees = call.rows(len(y))
    return agrees(results[0][sees], results[1][sees], y[sees])


def constant_band(calls: Sequence[VisibleKeys]) -> VisibleBand | None:
    """The band that explains all masks; None if there is none, so that each call has to bring its own."""
    if mask_kind(calls) == "additive":
        return None
    windows = sorted({call.window for call in calls if call.window is not None})
    bands = [VisibleBand("top_left", (one - 1, 0)) for one in windows] + [VisibleBand(), VisibleBand("top_left")]
    bands += [VisibleBand(None, (side, side)) for one in windows for side in (one, one - 1)]
    return next((band for band in bands if all(call.is_band(band) for call in calls)), None)

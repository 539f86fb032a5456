"""What one attention of an artifact means, as its manifest states it."""

from __future__ import annotations

from typing import Literal

import msgspec


class BandMeaning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys a query sees by its place p: p - left to p + right, where None is unbounded. p = i of query i, or
    i + S - L where it is "bottom_right"."""

    left: int | None
    right: int | None
    alignment: Literal["top_left", "bottom_right"]


class Semantics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing is left to a default that another library sets otherwise. `op` is its name; words are for people."""

    op: str
    operator: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    dtype: str
    causal: Literal["top_left", "bottom_right"] | None = None
    band: BandMeaning | None = None
    static_mask: str | None = None
    softcap: float | None = None
    lengths: str | None = None
    sinks: bool = False
    alibi: bool = False
    mask: str | None = None
    bool_mask: str
    fully_masked_row: str
    softmax: str
    mask_mod: str | None = None
    score_mod: str | None = None
    steps: dict[str, str | float] | msgspec.UnsetType = msgspec.UNSET
    """What else is done to scores, by the names of the steps; absent where nothing is."""

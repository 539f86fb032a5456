"""What one attention of an artifact means, as its manifest states it."""

from __future__ import annotations

from typing import Literal

import msgspec

from mhsa_compile.spec.window import WindowSpec


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
    band: WindowSpec | None = None
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

    @property
    def needs_lengths(self) -> bool:
        """Whether a constant mask, which is not here itself, hides some pairs."""
        return self.static_mask is not None

    @property
    def hides_later_keys(self) -> bool:
        return self.band is not None and self.band.right == 0

    @property
    def from_end(self) -> bool:
        """Whether places are counted from the last key."""
        return self.band is not None and self.band.alignment == "bottom_right"

    def visible_pairs(self, L: int, S: int) -> int:
        """The number of pairs of a query and a key that places leave."""
        return L * S if self.band is None else self.band.pairs(L, S)

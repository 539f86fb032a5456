"""What one attention of an artifact means, as its manifest states it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
        if self.band is None:
            return L * S
        left, right = (-1 if side is None else side for side in (self.band.left, self.band.right))
        first, last = visible_keys(L, S, left, right, from_end=self.from_end)
        return int((last - first).clip(0).sum())


def visible_keys(L: int, S: int, left: int, right: int, *, from_end: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """(the first key that each query sees by its place, the one behind the last); -1 is unbounded."""
    import numpy as np  # what only reads a manifest or a spec does not load it

    place = np.arange(L) + (S - L if from_end else 0)
    first = np.zeros(L, np.int64) if left < 0 else np.clip(place - left, 0, S)
    return first, np.full(L, S, np.int64) if right < 0 else np.clip(place + right + 1, 0, S)

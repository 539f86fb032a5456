"""Which keys a query sees by its place: causality and windows together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class WindowSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys a query sees by its place: query i stands at p = i, or i + S - L where it is "bottom_right", and sees
    the keys p - left to p + right. None is unbounded; causality is right = 0."""

    left: int | None
    right: int | None
    alignment: Literal["top_left", "bottom_right"] = "top_left"

    def summary(self) -> str:
        if self.left is None and self.right == 0:
            return f"{self.alignment} causal"
        return f"window {self.left}, {self.right}, {self.alignment}"

    def keys(self, rows: Sequence[int], L: int, S: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """(the first key that each of some of L queries sees, the one behind the last)."""
        import numpy as np  # what only reads a manifest or a spec does not load it

        place = np.asarray(rows, np.int64) + (S - L if self.alignment == "bottom_right" else 0)
        first = np.zeros_like(place) if self.left is None else np.clip(place - self.left, 0, S)
        return first, np.full_like(place, S) if self.right is None else np.clip(place + self.right + 1, 0, S)

    def visible(self, rows: Sequence[int], L: int, S: int) -> NDArray[np.bool_]:
        """(rows, S) bool: the keys that some of L queries see."""
        import numpy as np

        first, end = self.keys(rows, L, S)
        keys = np.arange(S)
        visible: NDArray[np.bool_] = (first[:, np.newaxis] <= keys) & (keys < end[:, np.newaxis])
        return visible

    def pairs(self, L: int, S: int) -> int:
        """The number of pairs of a query and a key that see each other."""
        first, end = self.keys(range(L), L, S)
        return int((end - first).clip(0).sum())


def window_of(left: int, right: int, alignment: str) -> WindowSpec | None:
    """That of numbers of keys, of which -1 is unbounded; None where both are."""
    before, after = (None if side < 0 else side for side in (left, right))
    if before is None and after is None:
        return None
    return WindowSpec(before, after, alignment)  # type: ignore[arg-type]

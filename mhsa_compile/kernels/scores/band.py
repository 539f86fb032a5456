"""The keys that a query sees by its place: causality, windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhsa_compile.kernels.interface.score_step import NodeScores, RowMeaning, ScoreStep, SomeRows
from mhsa_compile.spec.checks import LONGEST
from mhsa_compile.spec.window import WindowSpec


@dataclass(frozen=True)
class Band(ScoreStep):
    """Hides what lies outside of a window around the place of each query. One without ends hides nothing, and says what
    places are counted from."""

    window: WindowSpec
    hides = True
    absent_key = {"band": None}  # noqa: RUF012

    @classmethod
    def mistake(cls, node: NodeScores) -> tuple[str, ...] | None:
        for name in ("left_window_size", "right_window_size"):
            if (size := node.words.get(name, -1)) < -1:
                return f"{name} of -1 or more", str(size)
        causal = node.words.get("is_causal", 0)
        return None if causal in (0, 1) else ("is_causal of 0 or 1", str(causal))

    @classmethod
    def sides(cls, words: Mapping[str, Any]) -> tuple[int, int]:
        """(left, right): how many keys before and behind its place a query sees, causality in it; -1 is all."""
        sizes = (words.get(name, -1) for name in ("left_window_size", "right_window_size"))
        left, right = (-1 if size >= LONGEST else size for size in sizes)  # no key lies so far away
        return left, 0 if words.get("is_causal") else right

    @classmethod
    def read(cls, node: NodeScores) -> Band | None:
        return None if node.window is None else Band(node.window)

    def meaning(self, own: Sequence[np.ndarray], rows: SomeRows) -> RowMeaning:
        left, right = self.window.left, self.window.right
        visible = np.ones_like(rows.distance, np.bool_)
        visible &= True if left is None else -rows.distance <= left
        visible &= True if right is None else rows.distance <= right
        return RowMeaning(visible[None, None])

    def summary(self) -> str:
        return self.window.summary()

    def semantics(self) -> dict[str, Any]:
        window = self.window
        return {"causal": window.alignment if window.right == 0 else None, "band": window}

    def key(self) -> dict[str, Any]:
        return {"band": [self.window.left, self.window.right, self.window.alignment]}

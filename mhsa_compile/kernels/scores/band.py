"""The keys that a query sees by its place: causality, windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mhsa_compile.kernels.interface.ops import WindowSpec
from mhsa_compile.kernels.interface.score_step import Array, RowMeaning, ScoreStep, SomeRows
from mhsa_compile.spec.semantics import BandMeaning


@dataclass(frozen=True)
class Band(ScoreStep):
    """Hides what lies outside of a window around the place of each query. One without ends hides nothing, and says what
    places are counted from."""

    window: WindowSpec
    hides = True
    absent_key = {"band": None}  # noqa: RUF012

    def meaning(self, own: Sequence[Array], rows: SomeRows) -> RowMeaning:
        left, right = self.window.left, self.window.right
        visible = np.ones_like(rows.distance, np.bool_)
        visible &= True if left is None else -rows.distance <= left
        visible &= True if right is None else rows.distance <= right
        return RowMeaning(visible[None, None])

    def summary(self) -> str:
        return self.window.summary()

    def semantics(self) -> dict[str, Any]:
        window = self.window
        return {"causal": window.alignment if window.right == 0 else None, "band": BandMeaning(**asdict(window))}

    def key(self) -> dict[str, Any]:
        return {"band": [self.window.left, self.window.right, self.window.alignment]}

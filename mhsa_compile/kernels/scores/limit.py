"""What steps of one number have in common, which change a score by itself: a formula of the spec's, in kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from mhsa_compile.kernels.interface.score_step import NodeScores, RowMeaning, ScoreStep, SomeRows

SMALLEST, LARGEST = 1e-12, 1e12


@dataclass(frozen=True)
class Limit(ScoreStep):
    """Bends scores so that they stay between -limit and limit. `attribute` is the formula's name."""

    limit: float
    bends = True
    elementwise = True

    @classmethod
    def mistake(cls, node: NodeScores) -> tuple[str, ...] | None:
        value = float(node.words.get(cls.attribute, 0.0))
        return None if 0 <= value < math.inf else (f"{cls.attribute} of 0 (none) or more", str(value))

    @classmethod
    def read(cls, node: NodeScores) -> Self | None:
        value = node.words.get(cls.attribute, 0.0)
        return cls(float(value)) if value else None

    def why_not(self) -> str | None:
        if SMALLEST <= self.limit <= LARGEST:
            return None
        return f"a {self.attribute} from {SMALLEST:g} to {LARGEST:g}, or 0 for none, not {self.limit:g}"

    def meaning(self, own: Sequence[np.ndarray], rows: SomeRows) -> RowMeaning:
        return RowMeaning(limits={self.attribute: self.limit})

    def summary(self) -> str:
        return f"{self.attribute} {self.limit:g}"

    def semantics(self) -> dict[str, Any]:
        return {self.attribute: self.limit}

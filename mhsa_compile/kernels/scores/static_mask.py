"""A mask that is known when the attention is compiled. Tiled kernels make a plan of `pairs`, which skips what no row of
a tile sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
from tvm import tirx
from tvm.ir import Expr

from mhsa_compile.kernels.common.plain_parts import Pair, PlainPart
from mhsa_compile.kernels.interface.score_step import NodeScores, RowMeaning, ScoreStep, SomeRows
from mhsa_compile.kernels.scores.call_mask import ChosenRows


class _StaticMaskPlain(PlainPart):
    """Its own input is the mask itself, behind those of the call."""

    def sees(self, pair: Pair) -> Expr:
        (mask,) = self.task.own
        return mask[tirx.min(pair.h, mask.shape[0] - 1), pair.i, pair.j]


@dataclass(frozen=True, eq=False)
class StaticMask(ScoreStep):
    """A mask bool (1 or H, L, S), True takes part, for fixed lengths."""

    visible: np.ndarray[Any, Any]
    hides = True
    absent_key = {"static_mask": None}  # noqa: RUF012
    plain = _StaticMaskPlain

    @property
    def pairs(self) -> np.ndarray[Any, Any]:
        return self.visible

    @classmethod
    def read(cls, node: NodeScores) -> StaticMask | None:
        return None if node.pairs is None else StaticMask(node.pairs)

    def meaning(self, own: Sequence[np.ndarray], rows: SomeRows) -> RowMeaning:
        return RowMeaning(self.visible[None, :, rows.rows])

    def semantics(self) -> dict[str, Any]:
        shape, share = list(self.visible.shape), self.visible.mean()
        return {"static_mask": f"bool {shape}, {share:.1%} visible, sha256 {self._digest()}"}

    def key(self) -> dict[str, Any]:
        return {"static_mask": self._digest()[:16]}

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        return {"masks": 24}

    def _digest(self) -> str:
        return sha256(self.visible.tobytes()).hexdigest()

    def of_rows(self, rows: tuple[int, ...]) -> tuple[ScoreStep, np.ndarray[Any, Any]]:
        heads, L, S = self.visible.shape
        visible = np.zeros((heads, len(rows), S), np.bool_)
        for i, row in enumerate(rows):
            if -L <= row < L:
                visible[:, i] = self.visible[:, row]
        return ChosenRows("bool", (1, heads, 1, S)), visible

"""A function of scores in FlexAttention's form: what a score becomes, after softcap and before any mask or bias."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.plain_parts import Pair, PlainMath, PlainPart, plain_function
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.score_functions import HIDDEN, number
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, materialize, store
from mhsa_compile.kernels.cuda.attention.thread_parts import CellScore
from mhsa_compile.kernels.scores.function_step import FunctionRows, FunctionStep, FunctionThread, FunctionTile


class _ScoreModPlain(PlainPart):
    score_hides = True
    step: ScoreMod

    def score(self, score: Expr, pair: Pair) -> Expr:
        result, holds = plain_function(self.step.traced(self.task), self.task, pair, score)
        return tirx.Select(holds, result, PlainMath().constant(math.nan))


class _ScoreModTile(FunctionTile):
    def begin(self, mask: TileMask, keys: int) -> None:
        super().begin(mask, keys)
        self.score_hides = self.step.hides
        # The scores of a block, where some may be hidden by what they became.
        self._modified = T.alloc_buffer((keys, mask.queries), "float32") if self.score_hides else None

    def score(self, tile: RegisterTile, keys: list[Expr], base: Expr) -> None:
        numbers = [number(materialize(key)) for key in keys]

        def modified(r: int, c: int) -> Expr:
            score = self.computed.score(*tile.columns[c], numbers[r], tile.get(r, c))
            if self._modified is not None:
                first, lanes = tile.columns[c]
                score = materialize(score, "float32", lanes)
                store(self._modified, [base + r, T.int64(first)], score, lanes)
            return score

        tile.each(modified)

    def sees(self, lane: Expr, row: Expr, key: Expr) -> Expr | None:
        return None if self._modified is None else self._modified[row, lane] != T.float32(HIDDEN)


class _ScoreModRows(FunctionRows):
    def score(self, score: Expr, key: Expr, vector: int) -> Expr:
        score = self.computed.score(vector * self.lanes, self.lanes, self.keys(key), score)
        return materialize(score, "float32", self.lanes)


class _ScoreModThread(FunctionThread):
    def of_row(self, row: int, first_key: Expr) -> CellScore:
        of_row = self.computed.of_row(self.mask, row)
        return lambda score, offset: of_row.score(score, first_key + self.mask.cells.first + offset)


@dataclass(frozen=True)
class ScoreMod(FunctionStep):
    """What a score becomes; one of -inf hides its key."""

    attribute = role = "score_mod"
    plain = _ScoreModPlain
    cpu_tile = _ScoreModTile
    cpu_rows = _ScoreModRows
    cuda_rows = _ScoreModThread

    @property
    def hides(self) -> bool:  # type: ignore[override]
        return self.function.may_be_infinite

    @property
    def blind(self) -> bool:  # type: ignore[override]
        return self.hides

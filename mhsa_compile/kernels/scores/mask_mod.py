"""A function of places in FlexAttention's form: whether a query sees a key."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.plain_parts import Pair, PlainMath, PlainPart, plain_function
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.score_functions import HIDDEN, SEEN, number
from mhsa_compile.kernels.cpu.simd.vectors import (
    Chunk,
    RegisterTile,
    any_lane,
    constant,
    let,
    load,
    materialize,
    splat,
    store,
)
from mhsa_compile.kernels.cuda.attention.thread_parts import CellScore
from mhsa_compile.kernels.scores.function_step import FunctionRows, FunctionStep, FunctionThread, FunctionTile


class _MaskModPlain(PlainPart):
    step: MaskMod

    def score(self, score: Expr, pair: Pair) -> Expr:
        """NaN where the function has no result."""
        _, holds = plain_function(self.step.traced(self.task), self.task, pair, None)
        return tirx.Select(holds, score, PlainMath().constant(math.nan))

    def sees(self, pair: Pair) -> Expr:
        visible, holds = plain_function(self.step.traced(self.task), self.task, pair, None)
        return tirx.Or(visible, tirx.Not(holds))


class _MaskModTile(FunctionTile):
    """Computes the function for a block before its scores, so that blocks of which nothing is seen are left out, and of
    blocks that are seen wholly nothing is masked."""

    looks = True

    def begin(self, mask: TileMask, keys: int) -> None:
        super().begin(mask, keys)
        self._bias = T.alloc_buffer((keys, mask.queries), "float32")
        self._hides: Expr | None = None  # whether anything of the block is hidden

    def look(self, first_key: Expr, count: Expr) -> Expr:
        visible, hidden = (RegisterTile(1, self.columns, "int32") for _ in range(2))
        for tile in (visible, hidden):
            tile.each(lambda r, c: splat(T.int32(0), self.columns[c][1]))
        with T.serial(count) as row:
            key = number(materialize(first_key + row))
            for c, (lane, lanes) in enumerate(self.columns):
                bias = materialize(self.computed.bias(lane, lanes, key), "float32", lanes)
                store(self._bias, [row, T.int64(lane)], bias, lanes)
                one, nothing = splat(T.int32(1), lanes), constant(HIDDEN, lanes)
                visible.set(0, c, T.Select(bias == nothing, visible.get(0, c), one))
                # NaN is not seen, either: the masks make a score of it.
                hidden.set(0, c, T.Select(bias == constant(SEEN, lanes), hidden.get(0, c), one))
        self._hides = materialize(T.cast(self._any(hidden), "int32"), "int32")
        return self._any(visible)

    def _any(self, flags: RegisterTile) -> Expr:
        result = None
        for c, (_, lanes) in enumerate(self.columns):
            one = any_lane(flags.get(0, c) != splat(T.int32(0), lanes), lanes)
            result = one if result is None else T.Or(result, one)
        return result

    def whole_end(self, end: Expr) -> Expr:
        return end if self._hides is None else T.Select(self._hides != T.int32(0), T.int64(0), end)

    def hide(self, score: Expr, row: Expr, key: Expr, column: Chunk) -> Expr:
        first, lanes = column
        bias, hidden = let(load(self._bias, [row, T.int64(first)], lanes)), constant(HIDDEN, lanes)
        return T.Select(bias == hidden, hidden, score + bias)

    def sees(self, lane: Expr, row: Expr, key: Expr) -> Expr:
        return self._bias[row, lane] != T.float32(HIDDEN)


class _MaskModRows(FunctionRows):
    def hide(self, score: Expr, begin: Expr, key: Expr, vector: int) -> Expr:
        lanes = self.lanes
        bias = self.computed.bias(vector * lanes, lanes, self.keys(begin + key))
        bias, hidden = materialize(bias, "float32", lanes), constant(HIDDEN, lanes)
        return T.Select(bias == hidden, hidden, score + bias)


class _MaskModThread(FunctionThread):
    def of_row(self, row: int, first_key: Expr) -> CellScore:
        of_row = self.computed.of_row(self.mask, row)
        return lambda score, offset: of_row.hidden(score, first_key + self.mask.cells.first + offset)


@dataclass(frozen=True)
class MaskMod(FunctionStep):
    """Whether a query sees a key, beside all else that hides some."""

    attribute = role = "mask_mod"
    foreseeable = True
    hides = True
    blind = True
    not_beside = {"cpu": "a mask_mod"}  # noqa: RUF012
    plain = _MaskModPlain
    cpu_tile = _MaskModTile
    cpu_rows = _MaskModRows
    cuda_rows = _MaskModThread

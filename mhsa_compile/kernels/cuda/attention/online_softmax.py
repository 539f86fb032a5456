"""The online softmax: m, l and O of rows, brought up to date tile of keys by tile of keys.

`Softmax` is that of a thread's rows of `block_mma`. Its m stays as it is while no row of the warp outgrows it by
much, so few tiles scale O (FlashAttention-4 does so). `update_row_max` is one row's step where m always follows.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores
from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.simt import cell, exp2, materialize, over_quad, registers, set_register

GROWTH = 8.0
"""How much a maximum may grow, in units of log2, before sums are brought to it: probs are up to 2^8 then, which all
types hold as exactly as 1."""


class Softmax:
    """The softmax of `rows` rows, with tiles of so many fragments of scores and of values."""

    def __init__(self, rows: int, key_tiles: int, value_tiles: int, scores: ThreadScores) -> None:
        self.rows, self.key_tiles, self.value_tiles, self.scores = range(rows), key_tiles, value_tiles, scores
        self.acc_s = registers(rows * key_tiles * 2)  # S and then P: tile (m, n) from 4 (m key_tiles + n) on
        self.acc = registers(rows * value_tiles * 2)  # O
        self.row_max, self.row_sum = registers(rows), registers(rows)  # m and this thread's part of l
        self._rescale = registers(rows)  # from sums by the last m to those by the new one

    def begin(self) -> None:
        for row in self.rows:
            self.scores.begin(self.row_max, self.row_sum, row)
            for at in self._sums(row):
                set_register(self.acc, at, T.float32(0))

    def update_max(self) -> Expr:
        """Maxima that are outgrown become the new ones, and l is brought to them. Gives whether any is, of the warp's:
        then `rescale_acc` has to follow, sooner or later."""
        new_max = registers(len(self.rows))
        grows = T.bool(False)
        for row in self.rows:
            set_register(new_max, row, T.float32(-math.inf))
            for a, b in self._pairs(row):  # in pairs, so that fewer wait for the one before
                set_register(new_max, row, T.max(new_max[row], T.max(self.acc_s[a], self.acc_s[b])))
            over_quad(new_max, row, T.max)
            # Of plain products: the factor is positive then, so their maximum is that of the scores.
            row_max = materialize(new_max[row] * T.float32(self.scores.factor), "float32")
            outgrown = materialize(row_max > self.row_max[row] + T.float32(GROWTH), "bool")
            set_register(new_max, row, T.Select(outgrown, row_max, self.row_max[row]))
            grows = T.Or(grows, outgrown)
        # The warp decides together, so that its lanes stay together for the products.
        some = materialize(simt.any_of_warp(grows), "bool")
        with T.If(some), T.Then():
            for row in self.rows:
                # 2^(-inf - 0) = 0 while a row has seen nothing; -inf - -inf would be NaN.
                exp2(self._rescale, row, self.row_max[row] - _reference(new_max[row]))
                set_register(self.row_max, row, new_max[row])
                set_register(self.row_sum, row, self.row_sum[row] * self._rescale[row])
        return some

    def rescale_acc(self) -> None:
        """Brings O to the new maxima."""
        for row in self.rows:
            for at in self._sums(row):
                set_register(self.acc, at, self.acc[at] * self._rescale[row])

    def softmax_step(self) -> None:
        """Scores become probs, and are added up."""
        for row in self.rows:
            reference = zero_if_unseen(self.row_max[row])
            for pair in self._pairs(row):
                for at in pair:
                    exp2(self.acc_s, at, self.acc_s[at] * T.float32(self.scores.factor) - reference)
                # Pairs first: half as many additions wait for the one before.
                set_register(self.row_sum, row, self.row_sum[row] + (self.acc_s[pair[0]] + self.acc_s[pair[1]]))

    def is_spoilt(self) -> Expr:
        """Whether anything that this thread has summed is NaN: then the sum of it all is, too."""
        sums = registers(len(self.rows))
        for row in self.rows:
            set_register(sums, row, T.float32(0))
            for at in self._sums(row):
                set_register(sums, row, sums[row] + self.acc[at])
            if row:
                set_register(sums, 0, sums[0] + sums[row])
        return T.isnan(sums[0])

    def inverse_row_sum(self, row: int) -> Expr:
        """1 / l at the end, 0 where the row has seen nothing."""
        # Only now: until the end each lane sums its own columns.
        over_quad(self.row_sum, row, lambda a, b: a + b)
        return inverse(self.row_sum[row])

    def _pairs(self, row: int) -> list[tuple[int, int]]:
        """The indices of a row's scores, two neighbours at a time."""
        return [(cell(row, self.key_tiles, n, 0), cell(row, self.key_tiles, n, 1)) for n in range(self.key_tiles)]

    def _sums(self, row: int) -> list[int]:
        return [cell(row, self.value_tiles, n, e) for n in range(self.value_tiles) for e in range(2)]


def inverse(row_sum: Expr) -> Expr:
    """1 / l, 0 where a row has seen nothing."""
    return materialize(T.Select(row_sum == T.float32(0), T.float32(0), T.float32(1) / row_sum), "float32")


def zero_if_unseen(row_max: Expr) -> Expr:
    """What scores are counted from: their maximum, 0 where nothing was seen."""
    return materialize(_reference(row_max), "float32")


def update_row_max(new: Expr, row_max: Expr, row_sum: Expr, rescale: Expr, row: int) -> Expr:
    """Raises the maximum of a row to that of `new` scores, and brings l to that; O is to become `rescale[row]` times
    what it was. Gives what the new scores are to be counted from."""
    maximum = materialize(T.max(row_max[row], new), "float32")
    origin = zero_if_unseen(maximum)
    exp2(rescale, row, row_max[row] - origin)
    set_register(row_max, row, maximum)
    set_register(row_sum, row, row_sum[row] * rescale[row])
    return origin


def _reference(row_max: Expr) -> Expr:
    """`zero_if_unseen` as an expression, for use in one place."""
    return T.Select(row_max == T.float32(-math.inf), T.float32(0), row_max)

"""The online softmax: m, l and O of rows, brought up to date tile of keys by tile of keys.

`Softmax` is that of a thread's rows of `block_mma`. Its m stays as it is while no row of the warp outgrows it by
much, so few tiles scale O (FlashAttention-4 does so). `raised` is one row's step where m always follows.
"""

from __future__ import annotations

import math

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.score_mods import RowScoreMods
from mhsa_compile.kernels.cuda.primitives.fragments import cell
from mhsa_compile.kernels.cuda.primitives.warp import (
    Expr,
    any_of_warp,
    exp2,
    over_quad,
    put,
    registers,
    settle,
)

GROWTH = 8.0
"""How much a maximum may grow, in units of log2, before sums are brought to it: probs are up to 2^8 then, which all
types hold as exactly as 1."""


class Softmax:
    """The softmax of `rows` rows, with tiles of so many fragments of scores and of values."""

    def __init__(self, rows: int, key_tiles: int, value_tiles: int, scores: RowScoreMods) -> None:
        self.rows, self.key_tiles, self.value_tiles, self.scores = range(rows), key_tiles, value_tiles, scores
        self.scored = registers(rows * key_tiles * 2)  # S and then P: tile (m, n) from 4 (m key_tiles + n) on
        self.summed = registers(rows * value_tiles * 2)  # O
        self.largest, self.total = registers(rows), registers(rows)  # m and this thread's part of l
        self._shrink = registers(rows)  # from sums by the last m to those by the new one

    def begin(self) -> None:
        for row in self.rows:
            self.scores.begin(self.largest, self.total, row)
            for at in self._sums(row):
                put(self.summed, at, T.float32(0))

    def raise_maxima(self) -> Expr:
        """Maxima that are outgrown become the new ones, and l is brought to them. Gives whether any is, of the warp's:
        then `scale_sums` has to follow, sooner or later."""
        raised = registers(len(self.rows))
        grows = T.bool(False)
        for row in self.rows:
            put(raised, row, T.float32(-math.inf))
            for a, b in self._pairs(row):  # in pairs, so that fewer wait for the one before
                put(raised, row, T.max(raised[row], T.max(self.scored[a], self.scored[b])))
            over_quad(raised, row, T.max)
            # Of plain products: the factor is positive then, so their maximum is that of the scores.
            largest = settle(raised[row] * T.float32(self.scores.factor), "float32")
            outgrown = settle(largest > self.largest[row] + T.float32(GROWTH), "bool")
            put(raised, row, T.Select(outgrown, largest, self.largest[row]))
            grows = T.Or(grows, outgrown)
        # The warp decides together, so that its lanes stay together for the products.
        some = settle(any_of_warp(grows), "bool")
        with T.If(some), T.Then():
            for row in self.rows:
                exp2(self._shrink, row, self.largest[row] - _reference(raised[row]))
                put(self.largest, row, raised[row])
                put(self.total, row, self.total[row] * self._shrink[row])
        return some

    def scale_sums(self) -> None:
        """Brings O to the new maxima."""
        for row in self.rows:
            for at in self._sums(row):
                put(self.summed, at, self.summed[at] * self._shrink[row])

    def weigh(self) -> None:
        """Scores become probs, and are added up."""
        for row in self.rows:
            reference = zero_if_unseen(self.largest[row])
            for pair in self._pairs(row):
                for at in pair:
                    exp2(self.scored, at, self.scored[at] * T.float32(self.scores.factor) - reference)
                # Pairs first: half as many additions wait for the one before.
                put(self.total, row, self.total[row] + (self.scored[pair[0]] + self.scored[pair[1]]))

    def is_spoilt(self) -> Expr:
        """Whether anything that this thread has summed is NaN: then the sum of it all is, too."""
        sums = registers(len(self.rows))
        for row in self.rows:
            put(sums, row, T.float32(0))
            for at in self._sums(row):
                put(sums, row, sums[row] + self.summed[at])
            if row:
                put(sums, 0, sums[0] + sums[row])
        return T.isnan(sums[0])

    def part_of(self, row: int) -> Expr:
        """1 / l at the end, 0 where the row has seen nothing."""
        # Only now: until the end each lane sums its own columns.
        over_quad(self.total, row, lambda a, b: a + b)
        total = self.total[row]
        return settle(T.Select(total == T.float32(0), T.float32(0), T.float32(1) / total), "float32")

    def _pairs(self, row: int) -> list[tuple[int, int]]:
        """Where a row's scores are, two neighbours at a time."""
        return [(cell(row, self.key_tiles, n, 0), cell(row, self.key_tiles, n, 1)) for n in range(self.key_tiles)]

    def _sums(self, row: int) -> list[int]:
        return [cell(row, self.value_tiles, n, e) for n in range(self.value_tiles) for e in range(2)]


def zero_if_unseen(largest: Expr) -> Expr:
    """What scores are counted from: their maximum, 0 where nothing was seen."""
    return settle(_reference(largest), "float32")


def raised(new: Expr, largest: Expr, total: Expr, shrink: Expr, row: int) -> Expr:
    """Raises the maximum of a row to that of `new` scores, and brings l to that; O is to become `shrink[row]` times
    what it was. Gives what the new scores are to be counted from."""
    maximum = settle(T.max(largest[row], new), "float32")
    origin = zero_if_unseen(maximum)
    exp2(shrink, row, largest[row] - origin)
    put(largest, row, maximum)
    put(total, row, total[row] * shrink[row])
    return origin


def _reference(largest: Expr) -> Expr:
    """`zero_if_unseen` as an expression, for use in one place."""
    return T.Select(largest == T.float32(-math.inf), T.float32(0), largest)

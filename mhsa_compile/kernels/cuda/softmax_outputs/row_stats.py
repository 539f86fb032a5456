"""What each row of a softmax adds up to: every lane sums the keys that come to it, and in the end they join their sums.

With a reference m, the largest score so far, as in `row_scores` of two parts,

    Z = sum 2^(s - m),  U = sum 2^(s - m) (s - m)
    where m becomes m':  U = (U + (m - m') Z) 2^(m - m'),  Z = Z 2^(m - m')
    lse = m ln 2 + ln Z,  entropy = ln Z - ln 2 U / Z

A lane's sums are of one key in 32, so their rounding grows with S / 32 only.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives.warp import WARP, exp2, materialize, registers, set_register, shuffle_xor
from mhsa_compile.kernels.cuda.softmax_outputs.row_scores import RowScores

LN_2 = math.log(2.0)
_NOTHING = -math.inf


def power(value: Expr) -> Expr:
    """2^value."""
    cell = registers(1)
    exp2(cell, 0, value)
    return T.Bind(cell[0])


class WarpRowStats:
    """m, Z and U of the rows of a warp. m is -inf while a lane has seen nothing."""

    def __init__(self, scores: RowScores) -> None:
        self.scores, self.count = scores, len(scores.rows)
        self.row_max, self.keys = registers(self.count), registers(self.count, "int32")
        self.row_sum, self.moment = registers(self.count), registers(self.count)
        self.inverse = registers(self.count)
        """1 / Z, and 0 where a row saw nothing; known from `join` on."""

    def clear(self) -> None:
        """Begins with rows that have seen nothing; of a sink, which lies at a row's own place, the first lane knows."""
        for r, place in enumerate(self.scores.places):
            sink: Expr = T.float32(_NOTHING)
            if self.scores.sink is not None:
                sink = T.Select(self.scores.lane == 0, self.scores.sink, sink)
            set_register(self.row_max, r, sink)
            set_register(self.keys, r, place)
            set_register(self.row_sum, r, T.Select(self.row_max[r] == T.float32(_NOTHING), T.float32(0), T.float32(1)))
            set_register(self.moment, r, T.float32(0))

    def beyond(self, base: Expr, key: Expr, other_base: Expr, other_key: Expr) -> Expr:
        """How far a score of a row is above another one."""
        distance = base - other_base
        if self.scores.tilt is None:
            return distance
        return distance + self.scores.tilt * T.cast(key - other_key, "float32")

    def take(self, first_key: Expr) -> None:
        """Adds the bases that have just been made to the sums."""
        key = materialize(first_key + self.scores.lane)
        for r in range(self.count):
            base = materialize(self.scores.bases[r], "float32")
            with T.If(T.Not(base == T.float32(_NOTHING))), T.Then():
                self._add(r, base, key)

    def _add(self, r: int, base: Expr, key: Expr) -> None:
        is_first = materialize(self.row_max[r] == T.float32(_NOTHING), "bool")
        gap = self.beyond(base, key, self.row_max[r], self.keys[r])
        gap = materialize(T.Select(is_first, T.float32(0), gap), "float32")
        factor = power(_negative_magnitude(gap))
        with T.If(T.Or(is_first, gap > T.float32(0))):
            with T.Then():
                # Before Z shrinks: U takes the old one.
                set_register(self.moment, r, (self.moment[r] - gap * self.row_sum[r]) * factor)
                set_register(self.row_sum, r, self.row_sum[r] * factor + _one_if_finite(base))
                set_register(self.row_max, r, base)
                set_register(self.keys, r, key)
            with T.Else():
                set_register(self.moment, r, self.moment[r] + gap * factor)
                set_register(self.row_sum, r, self.row_sum[r] + factor)

    def join(self) -> None:
        """All lanes come to know the sums of all."""
        apart = 1
        while apart < WARP:
            for r in range(self.count):
                self._join_with(r, apart)
            apart *= 2
        for r in range(self.count):
            row_sum = self.row_sum[r]
            set_register(self.inverse, r, T.Select(row_sum == T.float32(0), T.float32(0), T.float32(1) / row_sum))

    def _join_with(self, r: int, apart: int) -> None:
        base, row_sum, moment = (
            materialize(shuffle_xor(cells[r], apart), "float32") for cells in (self.row_max, self.row_sum, self.moment)
        )
        key, nothing = materialize(shuffle_xor(self.keys[r], apart)), T.float32(_NOTHING)
        alone = T.Or(self.row_max[r] == nothing, base == nothing)
        gap = self.beyond(base, key, self.row_max[r], self.keys[r])
        gap = materialize(T.Select(alone, T.float32(0), gap), "float32")
        takes = materialize(T.Or(self.row_max[r] == nothing, gap > T.float32(0)), "bool")
        exponent = materialize(_negative_magnitude(gap), "float32")
        factor = power(exponent)
        pairs = ((self.row_sum[r], row_sum), (self.moment[r], moment))
        less, less_moment = (materialize(T.Select(takes, own, other), "float32") for own, other in pairs)
        more, more_moment = (materialize(T.Select(takes, other, own), "float32") for own, other in pairs)
        # Whichever was counted from the lower reference is brought to the higher one, by the equations above.
        set_register(self.row_sum, r, more + less * factor)
        set_register(self.moment, r, more_moment + (less_moment + exponent * less) * factor)
        set_register(self.row_max, r, T.Select(takes, base, self.row_max[r]))
        set_register(self.keys, r, T.Select(takes, key, self.keys[r]))

    # From `join` on.

    def prob(self, r: int, base: Expr, key: Expr) -> Expr:
        """2^(s - m) / Z: 0 of what is hidden; NaN in all of a row that sees one."""
        m = materialize(T.Select(self.row_max[r] == T.float32(_NOTHING), T.float32(0), self.row_max[r]), "float32")
        return materialize(power(self.beyond(base, key, m, self.keys[r])) * self.inverse[r], "float32")

    def lse(self, r: int) -> Expr:
        row_max = self.beyond(self.row_max[r], self.keys[r], T.float32(0), self.scores.places[r])
        value = row_max * T.float32(LN_2) + natural_log(self.row_sum[r])
        return T.Select(self.row_sum[r] == T.float32(0), T.float32(_NOTHING), value)

    def entropy(self, r: int) -> Expr:
        row_sum, zero = self.row_sum[r], T.float32(0)
        value = materialize(natural_log(row_sum) - T.float32(LN_2) * (self.moment[r] / row_sum), "float32")
        # Rounding may leave less than nothing; and what saw nothing is 0 / 0.
        return T.Select(T.Or(row_sum == zero, value < zero), zero, value)


def natural_log(value: Expr) -> Expr:
    """CUDA's logf, to one unit: what T.log becomes on a GPU is coarser."""
    return T.call_pure_extern("float32", "logf", value)


def _one_if_finite(value: Expr) -> Expr:
    """NaN of what is infinite or NaN: its row is then. TVM takes x - x to be 0, unless x comes from two places."""
    return T.float32(1) + (materialize(value, "float32") - materialize(value, "float32"))


def _negative_magnitude(gap: Expr) -> Expr:
    """-|gap|, NaN for NaN."""
    return T.Select(gap > T.float32(0), T.float32(0) - gap, gap)

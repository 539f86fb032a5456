"""What each row of a softmax adds up to: every lane sums the keys that come to it, and in the end they join their sums.

With a reference m, the largest score so far, as in `row_scores` of two parts,

    Z = sum 2^(s - m),  U = sum 2^(s - m) (s - m)
    where m becomes m':  U = (U + (m - m') Z) 2^(m - m'),  Z = Z 2^(m - m')
    lse = m ln 2 + ln Z,  entropy = ln Z - ln 2 U / Z

A lane's sums are of one key in 32, so their rounding grows with S / 32 only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.simt import WARP, load, materialize, registers, set_register, warp_barrier
from mhsa_compile.kernels.cuda.softmax_outputs.row_scores import RowScores

LN_2 = math.log(2.0)
_NOTHING = -math.inf


def power(value: Expr) -> Expr:
    """2^value."""
    cell = registers(1)
    simt.exp2(cell, 0, value)
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
        """Begins with rows that have seen nothing; the first lane has a score of no key, from a row's own place."""
        for r, place in enumerate(self.scores.places):
            score: Expr = T.float32(_NOTHING)
            if self.scores.no_key is not None:
                score = T.Select(self.scores.lane == 0, self.scores.no_key, score)
            set_register(self.row_max, r, score)
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
            materialize(simt.shuffle_xor(cells[r], apart), "float32")
            for cells in (self.row_max, self.row_sum, self.moment)
        )
        key, nothing = materialize(simt.shuffle_xor(self.keys[r], apart)), T.float32(_NOTHING)
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


class Largest:
    """The `k` largest weights of each row: a sorted list in the output itself, into which its warp inserts. `weights`
    and `keys` are (B, H, L, k), `at` is where each row lies in them, and `there` whether it does.

    While the keys go by, the list holds bases instead of weights. Most keys are smaller than its last entry, and pass
    by without anybody looking at it. It passes from lane to lane in global memory, so it is read and written by
    instructions: TVM makes every argument __restrict__, which lets a compiler keep what a lane has read, whatever
    barriers of the warp there are.
    """

    def __init__(
        self, sums: WarpRowStats, weights: Expr, keys: Expr, at: list[list[Expr]], there: list[Expr], k: int
    ) -> None:
        self.sums, self.scores, self.k = sums, sums.scores, k
        self.weights, self.keys, self.at, self.there = weights, keys, at, there
        count = len(there)
        self._least, self._least_key = registers(count), registers(count, "int32")  # the last entry of the list
        self._pending = registers(1, "uint32")  # lanes whose key may belong into it
        self._read = registers(1), registers(2, "uint32")

    def clear(self) -> None:
        for r in range(len(self.there)):
            set_register(self._least, r, T.float32(-math.inf))
            set_register(self._least_key, r, T.int32(-1))
        self._each_entry(lambda r, slot: self._set(r, slot, T.float32(-math.inf), T.int32(-1)))
        warp_barrier()

    def take(self, first_key: Expr) -> None:
        """Inserts into the lists the bases that have just been made, where they belong there."""
        for r in range(len(self.there)):
            key = materialize(first_key + self.scores.lane)
            base = materialize(self.scores.bases[r], "float32")
            set_register(self._pending, 0, simt.ballot(T.And(self.there[r], self._exceeds(r, base, key))))
            with T.While(self._pending[0] != T.uint32(0)):
                source = materialize(T.cuda.ffs_u32(self._pending[0]) - 1)
                set_register(self._pending, 0, self._pending[0] & (self._pending[0] - T.uint32(1)))
                candidate = materialize(simt.from_lane(base, source), "float32")
                # Asked again: what was inserted meanwhile may be larger.
                with T.If(self._exceeds(r, candidate, first_key + source)), T.Then():
                    self._insert(r, candidate, materialize(first_key + source))

    def _exceeds(self, r: int, base: Expr, key: Expr) -> Expr:
        """Whether a key belongs into the list; of equals the first one does, and they come in order."""
        more = self.sums.beyond(base, key, self._least[r], self._least_key[r]) > T.float32(0)
        return T.And(base > T.float32(-math.inf), more)

    def _insert(self, r: int, base: Expr, key: Expr) -> None:
        """Inserts a base and its key: from where it is larger on, each entry moves down by one, 32 of them at a time,
        the last ones first."""
        turns = -(-self.k // WARP)
        with T.serial(T.int32(turns)) as turn:
            slot = materialize((turns - 1 - turn) * WARP + self.scores.lane)
            inside = materialize(slot < self.k, "bool")
            own, before = (materialize(T.max(T.int32(0), T.min(slot - back, T.int32(self.k - 1)))) for back in (0, 1))
            # Both are read before anyone writes: lanes move entries that others read.
            there, neighbour = ((self._base(r, i), self._key(r, i)) for i in (own, before))
            stays = materialize(self._is_before(there, base, key), "bool")
            here = materialize(T.Or(slot == 0, self._is_before(neighbour, base, key)), "bool")
            warp_barrier()
            with T.If(T.And(inside, T.Not(stays))), T.Then():
                self._set(r, own, T.Select(here, base, neighbour[0]), T.Select(here, key, neighbour[1]))
            warp_barrier()
        last = T.int32(self.k - 1)
        set_register(self._least, r, self._base(r, last))
        set_register(self._least_key, r, self._key(r, last))

    def _is_before(self, entry: tuple[Expr, Expr], base: Expr, key: Expr) -> Expr:
        """Whether an entry stays in front of a key that comes after it; an empty one is -inf, and does not."""
        return T.Not(self.sums.beyond(base, key, *entry) > T.float32(0))

    def write(self) -> None:
        """Makes weights of what is in the lists; to be called when the sums are joined."""

        def entry(r: int, slot: Expr) -> None:
            base, key = self._base(r, slot), self._key(r, slot)
            self._set(r, slot, self.sums.prob(r, base, key), key)

        self._each_entry(entry)

    def _each_entry(self, body: Callable[[int, Expr], None]) -> None:
        """body(row, slot) for the entries of all lists, shared among the lanes."""
        for r, there in enumerate(self.there):
            with T.If(there), T.Then(), T.serial(T.int32(-(-self.k // WARP))) as turn:
                slot = materialize(turn * WARP + self.scores.lane)
                with T.If(slot < self.k), T.Then():
                    body(r, slot)

    def _address(self, of: Expr, r: int, slot: Expr) -> Expr:
        return T.address_of(of[(*self.at[r], T.cast(slot, "int64"))])

    def _base(self, r: int, slot: Expr) -> Expr:
        load(self._read[0], 0, 1, self._address(self.weights, r, slot), "global")
        return materialize(self._read[0][0], "float32")

    def _key(self, r: int, slot: Expr) -> Expr:
        load(self._read[1], 0, 2, self._address(self.keys, r, slot), "global")
        return materialize(T.reinterpret("int32", self._read[1][0]))

    def _set(self, r: int, slot: Expr, base: Expr, key: Expr) -> None:
        simt.store(self._address(self.weights, r, slot), [base], "global")
        key = materialize(key)
        # An int64 as two words, the upper one full of the sign: -1 is none.
        halves = [T.reinterpret("uint32", half) for half in (key, T.shift_right(key, T.int32(31)))]
        simt.store(self._address(self.keys, r, slot), halves, "global")

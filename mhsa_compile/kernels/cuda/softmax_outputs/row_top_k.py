"""The largest weights of each row: a sorted list in the output itself, into which its warp inserts.

While the keys go by, the list holds bases instead of weights. Most keys are smaller than its last entry, and pass by
without anybody looking at it.

The list passes from lane to lane in global memory, so it is read and written by instructions: TVM makes every argument
__restrict__, which lets a compiler keep what a lane has read, whatever barriers of the warp there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives.warp import (
    WARP,
    ballot,
    load,
    materialize,
    of_lane,
    registers,
    set_register,
    store,
    warp_barrier,
)
from mhsa_compile.kernels.cuda.softmax_outputs.row_stats import WarpRowStats


class Largest:
    """The `k` largest of each row: `weights` and `keys` are (B, H, L, k), `at` is where each row lies in them, and
    `there` whether it does."""

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
            set_register(self._pending, 0, ballot(T.And(self.there[r], self._exceeds(r, base, key))))
            with T.While(self._pending[0] != T.uint32(0)):
                source = materialize(T.cuda.ffs_u32(self._pending[0]) - 1)
                set_register(self._pending, 0, self._pending[0] & (self._pending[0] - T.uint32(1)))
                candidate = materialize(of_lane(base, source), "float32")
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
        store(self._address(self.weights, r, slot), [base], "global")
        key = materialize(key)
        # An int64 as two words, the upper one full of the sign: -1 is none.
        halves = [T.reinterpret("uint32", half) for half in (key, T.shift_right(key, T.int32(31)))]
        store(self._address(self.keys, r, slot), halves, "global")

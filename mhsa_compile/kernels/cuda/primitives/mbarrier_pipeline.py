"""A ring of tiles between the warp that copies and those that compute, guarded by mbarriers.

Each tile has two barriers: `full`, which the copy engine's bytes complete, and `empty`, at which every warp that
consumes it arrives. The n-th use of a slot waits for the n-th phase of it.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives.hopper_ptx import arrive, begin_barrier, wait
from mhsa_compile.kernels.cuda.primitives.hopper_tma import SwizzledTiles
from mhsa_compile.kernels.cuda.primitives.warp import materialize

BARRIER_BYTES = 8
REGISTERS = {2: (24, 240), 3: (32, 160)}
"""Registers of a thread that copies, and of one that computes, by the number of warpgroups that compute: together they
are no more than what the block begins with, 65536 in equal shares."""


class Slots:
    """Tiles that the copy engine fills, and those who compute empty."""

    def __init__(self, tiles: SwizzledTiles, barriers: Expr, count: int) -> None:
        self.tiles, self.count = tiles, count
        self._full, self._empty = barriers, barriers + T.uint32(BARRIER_BYTES * count)

    def begin(self, consumer_warps: int) -> None:
        for slot in range(self.count):
            # One arrival, of the thread that asks for the copies; their bytes count beside it.
            begin_barrier(self._full + T.uint32(BARRIER_BYTES * slot), 1)
            begin_barrier(self._empty + T.uint32(BARRIER_BYTES * slot), consumer_warps)

    def slot(self, use: Expr) -> Expr:
        """Which slot it is whose turn comes as number `use`, of all uses of all slots."""
        return materialize(T.truncmod(use, T.int32(self.count))) if self.count > 1 else T.int32(0)

    def full(self, slot: Expr) -> Expr:
        return self._full + T.cast(slot, "uint32") * T.uint32(BARRIER_BYTES)

    def wait_full(self, use: Expr) -> None:
        wait(self.full(self.slot(use)), self._phase(use))

    def wait_empty(self, use: Expr) -> None:
        # The other parity: a slot's first use waits for the phase before the first, which is over.
        wait(self._empty_of(use), T.bitwise_xor(self._phase(use), T.int32(1)))

    def release(self, use: Expr, lane: Expr) -> None:
        """Tells the one who fills the slot of this use that this warp is done with it."""
        with T.If(lane == 0), T.Then():
            arrive(self._empty_of(use))

    def _empty_of(self, use: Expr) -> Expr:
        return self._empty + T.cast(self.slot(use), "uint32") * T.uint32(BARRIER_BYTES)

    def _phase(self, use: Expr) -> Expr:
        return T.bitwise_and(T.truncdiv(use, T.int32(self.count)), T.int32(1))

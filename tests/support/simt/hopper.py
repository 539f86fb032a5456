"""Runs Hopper kernels in NumPy: warpgroups with roles of their own, mbarriers, the copy engine, wgmma.

As `simt`, whose Machine it extends, but each warpgroup runs by itself until it has to wait: a thread of Python's, of
which one runs at a time. Copies arrive as late as they may, when all warpgroups wait, in any order; or, with a `seed`,
at random. So what is not waited for is garbage. What waits for something that cannot come is a deadlock, and is said.

What it proves beside that which `simt` does: descriptors and swizzles as PTX has them, phases and bytes of mbarriers,
and that no access depends on luck (vector clocks, `simt_hopper_memory`). What it does not: that a warp which runs apart
from its warpgroup does no harm between two barriers; anything of speed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from support.simt import hopper_ptx, hopper_tma, interpreter
from support.simt.hopper_memory import HopperShared, Mbarrier, NamedBarrier
from support.simt.hopper_tma import TensorMap
from support.simt.hopper_wgmma import Product
from support.simt.memory import Array, Lanes, SimtError
from support.simt.threads import Registers, Thunk, View

WARPGROUP = 128
REGISTERS = 65536  # of a multiprocessor
BLOCKS_TOGETHER = 8


class _Stopped(BaseException):
    """Ends the other warpgroups when one has failed."""


@dataclass
class Strand:
    """One warpgroup of all blocks that run together."""

    number: int
    lanes: Lanes
    values: dict[int, Any]
    views: dict[int, View]
    products: list[list[Product]] = field(default_factory=lambda: [[]])  # groups; the last is open
    uncommitted: list[tuple[TensorMap, int, int, list[int], int]] = field(default_factory=list)
    stores: list[tuple[TensorMap, int, int, list[int], int]] = field(default_factory=list)
    fenced: int = 0
    registers: int | None = None
    ready: Callable[[], bool] = lambda: True
    waits_for: str = ""
    is_over: bool = False
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))


@dataclass
class Copy:
    """A box on its way into shared memory."""

    tensor: TensorMap
    corner: list[int]
    block: int
    places: Array  # bytes of shared memory
    barrier: Mbarrier
    clock: Array


class HopperMachine(interpreter.Machine):
    """A Hopper kernel, translated; to be called as often as one likes."""

    def __init__(self, func: Any, blocks_together: int = BLOCKS_TOGETHER, seed: int | None = None) -> None:
        self.random = None if seed is None else random.Random(seed)
        self._strand: Strand | None = None
        self.clock = 0
        self.blocks_at_once: int | None = None  # as its launch bounds say
        super().__init__(func, blocks_together)

    # The warpgroups, one of which runs at a time.

    @property
    def strand(self) -> Strand:
        assert self._strand is not None
        return self._strand

    def _launch(self, extents: dict[str, tuple[int, Thunk]], body: Thunk) -> None:
        (grid_key, grid), (thread_key, thread) = extents["blockIdx.x"], extents["threadIdx.x"]
        blocks, threads = int(grid()), int(thread())
        if threads % WARPGROUP or blocks < 0:
            raise SimtError(f"a launch of {blocks} blocks of {threads} threads")
        outside = self.values, self.views, self.lanes
        self._begin_launch()
        for first in range(0, blocks, self.blocks_together):
            count = min(self.blocks_together, blocks - first)
            self.blocks, self.threads = count, threads
            self.memory: HopperShared | None = None
            self.mbarriers: dict[int, Mbarrier] = {}
            self.named: dict[tuple[int, int], NamedBarrier] = {}
            self.copies_on_the_way: list[Copy] = []
            self.failure: BaseException | None = None
            strands = []
            for number in range(threads // WARPGROUP):
                lanes = Lanes(count, WARPGROUP, first, threads)
                lanes.thread = lanes.thread + np.int32(WARPGROUP * number)
                strand = Strand(number, lanes, dict(outside[0]), dict(outside[1]))
                strand.values[grid_key] = (lanes.block + first).astype(np.int32)
                strand.values[thread_key] = lanes.thread.astype(np.int32)
                strands.append(strand)
            self._run(strands, body)
            self.values, self.views, self.lanes = outside
        self._strand = None

    def _run(self, strands: list[Strand], body: Thunk) -> None:
        self._scheduler = threading.Semaphore(0)
        threads = [threading.Thread(target=self._live, args=(strand, body), daemon=True) for strand in strands]
        for thread in threads:
            thread.start()
        try:
            while not all(strand.is_over for strand in strands):
                self._step(strands)
        finally:
            self.failure = self.failure or _Stopped()
            for strand in strands:
                strand.turn.release()
            for thread in threads:
                thread.join()
        if self.copies_on_the_way or any(barrier.come for barrier in self.named.values()):
            raise SimtError("the block ends while copies are on their way, or somebody is expected at a barrier")
        if any(strand.registers is not None for strand in strands):
            begin = self.registers_at_begin()
            registers, most = (
                WARPGROUP * n for n in (sum(s.registers or begin for s in strands), begin * len(strands))
            )
            if registers > most:
                raise SimtError(f"setmaxnreg: {registers} registers of {most}: somebody waits for ever")

    def _step(self, strands: list[Strand]) -> None:
        """Lets one warpgroup run until it waits, or a copy arrive."""
        waiting = [strand for strand in strands if not strand.is_over]
        if self.random:
            self.random.shuffle(waiting)
        early = self.random is not None and self.copies_on_the_way and self.random.random() < 0.3
        runnable = None if early else next((strand for strand in waiting if strand.ready()), None)
        if runnable is None and self.copies_on_the_way:
            at = self.random.randrange(len(self.copies_on_the_way)) if self.random else -1
            hopper_tma.deliver(self, self.copies_on_the_way.pop(at))
            return
        if runnable is None:
            what = "; ".join(f"warpgroup {strand.number} waits for {strand.waits_for}" for strand in waiting)
            raise SimtError(f"deadlock: {what}")
        self._strand = runnable
        self.lanes, self.values, self.views = runnable.lanes, runnable.values, runnable.views
        runnable.turn.release()
        self._scheduler.acquire()
        if self.failure is not None:
            raise self.failure

    def _live(self, strand: Strand, body: Thunk) -> None:
        strand.turn.acquire()
        try:
            if self.failure is None:
                with np.errstate(all="ignore"):
                    body()
                if any(strand.products) or strand.stores or strand.uncommitted:
                    raise SimtError("a warpgroup ends before its products or stores do")
        except _Stopped:
            return
        except BaseException as error:
            self.failure = error
        strand.is_over = True
        self._scheduler.release()

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Lets others run until `ready` says so."""
        strand = self.strand
        while not ready():
            strand.ready, strand.waits_for = ready, what
            self._scheduler.release()
            strand.turn.acquire()
            if self.failure is not None:
                raise _Stopped
        strand.ready = lambda: True
        if self.random is not None and self.random.random() < 0.5:  # somebody else may go first
            self._scheduler.release()
            strand.turn.acquire()
            if self.failure is not None:
                raise _Stopped

    # Registers are dealt out when a block begins.

    def registers_at_begin(self) -> int:
        """The registers of a thread when a block begins: what ptxas makes of the launch's bounds (PTX ISA 9.7.20.5:
        setmaxnreg needs such). Raises SimtError where there are no bounds."""
        if self.blocks_at_once is None:
            raise SimtError("setmaxnreg: no bounds say how many registers there are when a block begins")
        return int(min(248, REGISTERS // (self.blocks_at_once * self.threads) // 8 * 8))

    def _AttrStmt(self, node: Any) -> Thunk:
        if node.attr_key == "tirx.launch_bounds_min_blocks_per_sm":
            self.blocks_at_once = int(node.value)
        return super()._AttrStmt(node)

    # Each warpgroup has views of its own, and knows when it wrote to which registers.

    def shared_memory(self, count: int) -> HopperShared:
        if self.memory is None:
            self.memory = HopperShared(self.blocks, self.threads // 32, count)
        return self.memory

    def store(self, view: View, indices: list[Any], value: Any) -> None:
        if isinstance(view.memory, Registers):
            self.clock += 1
            view.memory.written = self.clock  # type: ignore[attr-defined]
        super().store(view, indices, value)

    def _Call(self, node: Any) -> Thunk:
        name = str(node.op.name).removeprefix("tirx.").removeprefix("prim.")
        if name in hopper_ptx.INSTRUCTIONS:
            return hopper_ptx.INSTRUCTIONS[name](self, node)
        if name in hopper_ptx.AT_SHARED_ADDRESSES:
            return hopper_ptx.at_shared_address(self, node, name)
        if name == "address_of" and type(node.args[0]).__name__ == "Var":
            return self.expression(node.args[0])
        if name == "reinterpret" and "PointerType" in type(node.ty).__name__:
            return self.expression(node.args[-1])
        return super()._Call(node)

"""What the threads of a Hopper block share: memory that knows who may touch what, barriers in it, named barriers.

Who happens before whom is kept in vector clocks, one for each warp of a block and one for the copy engine: a barrier
brings its members' clocks together, an arrival leaves the warp's clock at the barrier, a wait takes the barrier's. Each
16 bytes know when each warp last read and wrote them. So an access is refused unless what it depends on is known, to
the warp that makes it, to be over: whatever the order in which this interpreter happened to run the warps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from support.simt.memory import WARP, Array, Lanes, Memory, SimtError

if TYPE_CHECKING:
    from support.simt.hopper import HopperMachine

CHUNK = 16  # bytes
MOST_BYTES = (1 << 20) - 1
"""The most bytes that a phase of an mbarrier can wait for: PTX ISA 9.7.13.15.1."""
MOST_BARRIERS = 16
"""The most named barriers of a block: PTX ISA 9.7.13.1."""


class Clocks:
    """What each warp of each block, and last the copy engine, knows of the others' time."""

    def __init__(self, blocks: int, warps: int) -> None:
        self.engine = warps
        self.known = np.zeros((blocks, warps + 1, warps + 1), np.int64)
        for warp in range(warps + 1):
            self.known[:, warp, warp] = 1

    def release(self, block: int, warp: int) -> Array:
        """What this warp knows, for others; what it does from now on is later."""
        now = self.known[block, warp].copy()
        self.known[block, warp, warp] += 1
        return now

    def acquire(self, block: int, warp: int, other: Array) -> None:
        np.maximum(self.known[block, warp], other, out=self.known[block, warp])


class HopperShared(Memory):
    """Shared memory of some blocks. Addresses begin at `base`, which is as little aligned as hardware promises; all of
    it begins as garbage."""

    base = 1024 + 48

    def __init__(self, blocks: int, warps: int, size: int) -> None:
        size = -(-size // CHUNK) * CHUNK
        super().__init__("shared memory", np.full((blocks, size), 0xFF, np.uint8))
        self.clocks = Clocks(blocks, warps)
        shape = (blocks, size // CHUNK, warps + 1)
        self.read_at, self.written_at = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.unfenced = np.zeros(shape[:2], np.int8)  # 1 + the warp whose plain stores the engines may not see yet
        self.accesses = np.zeros((blocks, warps), np.uint32)  # a bit for each lane of whose the others may not know

    def row(self, lanes: Lanes) -> Array | int:
        return lanes.block

    def note_read(self, lanes: Lanes, offset: Array, size: int) -> None:
        self._note(lanes, offset, size, is_write=False)

    def note_write(self, lanes: Lanes, offset: Array, values: Array) -> None:
        self._note(lanes, offset, values.shape[1], is_write=True)

    def _note(self, lanes: Lanes, offset: Array, size: int, *, is_write: bool) -> None:
        assert size <= CHUNK
        block, warp, chunk = lanes.chosen(lanes.block, lanes.thread // WARP, offset // CHUNK)
        self.check(block, warp, chunk, is_write=is_write)
        stamp = self.clocks.known[block, warp, warp]
        (self.written_at if is_write else self.read_at)[block, chunk, warp] = stamp
        (lane,) = lanes.chosen(lanes.thread % WARP)
        np.bitwise_or.at(self.accesses, (block, warp), np.uint32(1) << lane.astype(np.uint32))
        if is_write:
            self.unfenced[block, chunk] = 1 + warp

    def check(self, block: Array, warp: Array, chunk: Array, *, is_write: bool) -> None:
        """Refuses what other warps may be doing still."""
        times = self.clocks.known[block, warp]
        late = self.written_at[block, chunk] > times
        if is_write:
            late |= self.read_at[block, chunk] > times
        if late.any():
            where, other = (int(n[0]) for n in np.nonzero(late))
            what = f"warp {int(np.ravel(warp)[where % np.size(warp)])} {'writes' if is_write else 'reads'}"
            at = int(np.ravel(chunk)[where % np.size(chunk)]) * CHUNK
            raise SimtError(f"{self.name}: {what} byte {at}, and nothing says that warp {other} is done with it")

    def check_engines(self, block: int, chunk: Array) -> None:
        """Refuses an access of the copy engine or the tensor cores to what was stored without a fence behind it."""
        if self.unfenced[block, chunk].any():
            raise SimtError(f"{self.name}: stored plainly, used by an engine, and no fence.proxy.async in between")

    def fence(self, lanes: Lanes) -> None:
        block, warp = lanes.chosen(lanes.block, lanes.thread // WARP)
        for b, w in set(zip(block.tolist(), warp.tolist(), strict=True)):
            self.unfenced[b][self.unfenced[b] == 1 + w] = 0


@dataclass
class Mbarrier:
    """An mbarrier of each block: PTX ISA 9.7.13.15. A phase ends when nobody is missing and no bytes are expected."""

    count: Array
    missing: Array
    phase: Array
    expected: Array
    clock: Array  # (blocks, warps + 1), of who arrived in this phase
    past: Array  # of all phases that ended
    begun_at: dict[int, tuple[int, int]] = field(default_factory=dict)  # in a block, by which warp, at its time
    unknown: set[int] = field(default_factory=set)  # blocks whose copy engine may not know of it yet

    @classmethod
    def begun(cls, blocks: int, warps: int, count: int) -> Mbarrier:
        clocks = [np.zeros((blocks, warps + 1), np.int64) for _ in range(2)]
        numbers = [np.full(blocks, n, np.int64) for n in (count, count, 0, 0)]
        return cls(*numbers, *clocks)

    def check(self, block: int, times: Array) -> None:
        """Refuses its use by a warp that may come before it was begun."""
        warp, time = self.begun_at.get(block, (0, 1 << 62))
        if times[warp] < time:
            raise SimtError("mbarrier: used, and nothing says that it was begun before")

    def fence(self, block: int, warp: int) -> None:
        """What this warp began, the copy engine knows from now on."""
        if self.begun_at.get(block, (-1, 0))[0] == warp:
            self.unknown.discard(block)

    def check_engine(self, block: int) -> None:
        """Refuses bytes that are to count for it."""
        if block in self.unknown:
            raise SimtError("mbarrier: the copy engine is to complete it, and no fence since it was begun")

    def expect(self, block: int, count: int) -> None:
        self.expected[block] += count
        if self.expected[block] > MOST_BYTES:
            raise SimtError(f"mbarrier: {self.expected[block]} bytes in a phase, which counts to {MOST_BYTES}")

    def arrive(self, block: int, clock: Array) -> None:
        self.missing[block] -= 1
        if self.missing[block] < 0:
            raise SimtError("mbarrier: more arrivals than it was begun with")
        np.maximum(self.clock[block], clock, out=self.clock[block])
        self._end(block)

    def bytes_arrived(self, block: int, count: int, clock: Array) -> None:
        self.expected[block] -= count
        np.maximum(self.clock[block], clock, out=self.clock[block])
        self._end(block)

    def _end(self, block: int) -> None:
        if self.missing[block] == 0 and self.expected[block] == 0:
            self.phase[block] += 1
            self.missing[block] = self.count[block]
            np.maximum(self.past[block], self.clock[block], out=self.past[block])

    def is_over(self, block: int, parity: int) -> bool:
        """Whether the latest phase of this parity is over, or the one before the first."""
        return bool(self.phase[block] % 2 != parity)


@dataclass
class NamedBarrier:
    """A named barrier of one block: how many have come, and for each time that it was complete what its members
    know."""

    come: int = 0
    expected: int = 0
    flag: bool = False
    clock: Array | None = None
    complete: list[tuple[Array, bool]] = field(default_factory=list)

    def arrive(self, threads: int, expected: int, clock: Array, flag: bool) -> int:
        """The number of the time that this arrival counts for."""
        turn = len(self.complete)
        if expected % WARP or (self.come and expected != self.expected):
            raise SimtError(f"named barrier: for {expected} threads, and for {self.expected} before")
        self.come += threads
        self.expected = expected
        self.clock = clock if self.clock is None else np.maximum(self.clock, clock)
        self.flag |= flag
        if self.come > expected:
            raise SimtError(f"named barrier: {self.come} threads of {expected}")
        if self.come == expected:
            self.complete.append((self.clock, self.flag))
            self.come, self.flag, self.clock = 0, False, None
        return turn


WARPGROUP = 128


def operands_of(node: Any) -> list[Any]:
    return [a for a in node.args if type(a).__name__ != "StringImm"]


def words_of(node: Any) -> list[str]:
    return [str(a.value) for a in node.args if type(a).__name__ == "StringImm"]


def active_lanes(machine: HopperMachine, *values: Any) -> list[tuple[int, ...]]:
    """For each active lane: its block, its warp, and what it has of the values."""
    lanes = machine.lanes
    arrays = [lanes.block, lanes.thread // WARP, *(machine.spread(value) for value in values)]
    return list(zip(*(array.tolist() for array in lanes.chosen(*arrays)), strict=True))


def whole_warps(machine: HopperMachine, what: str) -> list[tuple[int, int]]:
    """(block, warp) of the warps that are active, whole."""
    machine.lanes.whole(WARP, what)
    return sorted({(b, w) for b, w in active_lanes(machine)})


def whole_blocks(machine: HopperMachine, what: str) -> list[int]:
    """Blocks whose whole warpgroup is active."""
    whole = machine.lanes.whole(WARPGROUP, what)
    return [int(b) for b in np.flatnonzero(whole)]


def same_of(machine: HopperMachine, value: Any, block: int) -> int:
    """What all threads of the warpgroup have in a block. Raises SimtError where they do not agree."""
    values = machine.spread(value).reshape(-1, WARPGROUP)[block]
    if (values != values[0]).any():
        raise SimtError("an operand that is not the same for the warpgroup")
    return int(values[0])


def shared_of(machine: HopperMachine) -> Any:
    assert machine.memory is not None
    return machine.memory


def barrier_at(machine: HopperMachine, at: int) -> Mbarrier:
    if at not in machine.mbarriers:
        raise SimtError(f"no mbarrier at address {at}")
    return machine.mbarriers[at]

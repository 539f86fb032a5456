"""Memories of the SIMT interpreter: bytes that know where they end and, where threads share them, who touched each of
them since the last barrier.

Every access is of some bytes in a row for each lane, from an offset that is a multiple of their number, as a GPU has
it.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
WARP = 32
_UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # to move so many bytes at once
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "bool": np.dtype(np.bool_)}


def numpy_dtype(name: str) -> np.dtype[Any]:
    return _DTYPES.get(name) or np.dtype(name)


class SimtError(AssertionError):
    """What no run on a GPU may do: an access out of bounds, a race, a barrier that some threads do not reach."""


class Lanes:
    """The threads that run in lockstep: `blocks` x `threads`, of which `active` (None: all) execute what is next. They
    are of blocks from number `first` on, of `of_block` threads."""

    def __init__(self, blocks: int, threads: int, first: int = 0, of_block: int | None = None) -> None:
        self.blocks, self.threads, self.first, self.of_block = blocks, threads, first, of_block or threads
        self.count, self.warps = blocks * threads, -(-threads // WARP)
        self.block, self.thread = (a.ravel() for a in np.indices((blocks, threads), np.int32))
        self.active: Array | None = None
        self.barriers = np.zeros((blocks, self.warps), np.int64)  # how many each warp has met at

    def numbers(self) -> Array:
        """The number of each thread among all of the launch."""
        return (self.block + self.first) * np.int64(self.of_block) + self.thread

    def chosen(self, *arrays: Array) -> list[Array]:
        """What the active lanes hold of arrays (N, ...)."""
        return list(arrays) if self.active is None else [array[self.active] for array in arrays]

    def whole(self, group: int, what: str) -> Array:
        """Which groups of so many neighbours take part in `what`, (groups,); all of a group or none."""
        if self.active is None:
            return np.ones(-(-self.count // group), np.bool_)
        members = self.active.reshape(-1, group)
        if (members.any(axis=1) != members.all(axis=1)).any():
            raise SimtError(f"{what}: some threads of a group of {group} do not reach it")
        return members.all(axis=1)


class Memory:
    """Rows of bytes: one of global memory, one for each block of shared memory."""

    def __init__(self, name: str, data: Array) -> None:
        self.name, self.data = name, data  # (rows, bytes) uint8, contiguous

    def row(self, lanes: Lanes) -> Array | int:
        return 0

    def read(self, lanes: Lanes, offset: Array, size: int) -> Array:
        """`size` bytes from each lane's offset (N,) on -> (N, size); those of lanes that are not active say nothing."""
        at = self._units(lanes, offset, size)
        self.note_read(lanes, offset, size)
        return self.data.view(_UNITS[size]).reshape(-1)[at][:, None].view(np.uint8)

    def write(self, lanes: Lanes, offset: Array, values: Array) -> None:
        """Writes each active lane's bytes (N, size), from its offset on."""
        size = values.shape[1]
        at = self._units(lanes, offset, size)
        self.note_write(lanes, offset, values)
        at, values = lanes.chosen(at, np.ascontiguousarray(values).view(_UNITS[size])[:, 0])
        self.data.view(_UNITS[size]).reshape(-1)[at] = values

    def _units(self, lanes: Lanes, offset: Array, size: int) -> Array:
        """The number of each lane's unit of `size` bytes among all; 0 where a lane that is not active is outside."""
        length = self.data.shape[1]
        wrong = (offset < 0) | (offset > length - size) | (offset % size != 0)
        if wrong.any():
            if lanes.active is None or (wrong & lanes.active).any():
                worst = int(offset[wrong if lanes.active is None else wrong & lanes.active][0])
                raise SimtError(f"{self.name}: {size} bytes from byte {worst} on, of {length}")
            offset = np.where(wrong, 0, offset)
        return (offset + self.row(lanes) * np.int64(length)) // size

    def note_read(self, lanes: Lanes, offset: Array, size: int) -> None: ...

    def note_write(self, lanes: Lanes, offset: Array, values: Array) -> None: ...


CELL = 2
"""Bytes that shared memory tells apart when it looks for races: two threads never share an element of 16 bits."""
NOBODY, MANY = -1, -2


class GlobalMemory(Memory):
    """One argument of the call: of any length, so its bytes are moved one by one.

    Of each element it knows who wrote it in this launch. No other thread may touch it until the next one, since blocks
    know nothing of each other; but for those of the same warp, behind a barrier of it, and by an instruction: arguments
    are __restrict__ in what TVM writes (split_host_device.cc), so a compiler may keep what a thread has read plainly.
    """

    def __init__(self, name: str, array: Array) -> None:
        if not array.flags.c_contiguous:
            raise SimtError(f"{name}: arguments are contiguous")
        super().__init__(name, array.reshape(-1).view(np.uint8)[np.newaxis])
        self.element = array.itemsize
        self.writer: Array | None = None  # of each element, and how many barriers its warp had met at
        self.met_at = np.zeros(0, np.int64)

    def launched(self) -> None:
        """All that was written before can be read."""
        self.writer = None

    def read(self, lanes: Lanes, offset: Array, size: int, *, plainly: bool = False) -> Array:
        first = self._units(lanes, offset, size) * size
        if self.data.shape[1] < size:  # nobody reads
            return np.zeros((offset.size, size), np.uint8)
        if self.writer is not None:
            self._touched(lanes, first, size, "reads plainly" if plainly else "reads", plainly=plainly)
        return self.data[0][first[:, np.newaxis] + np.arange(size)]

    def write(self, lanes: Lanes, offset: Array, values: Array) -> None:
        size = values.shape[1]
        first = self._units(lanes, offset, size) * size
        self._follow()
        cell, number, barriers = self._touched(lanes, first, size, "overwrites")
        self.writer[cell], self.met_at[cell] = number, barriers
        if (self.writer[cell] != number).any():
            raise SimtError(f"{self.name}: two threads write one element at once")
        first, values = lanes.chosen(first, values)
        self.data[0][first[:, np.newaxis] + np.arange(size)] = values

    def stored(self, bytes_at: Array, number: int) -> None:
        """The copy engine writes these bytes for this thread."""
        self._follow()
        assert self.writer is not None
        cell = np.unique(bytes_at // self.element)
        if np.setdiff1d(self.writer[cell], (NOBODY, number)).size:
            raise SimtError(f"{self.name}: thread {number} stores what another wrote in the same launch")
        self.writer[cell] = number

    def _follow(self) -> None:
        if self.writer is None:
            self.writer, self.met_at = (np.full(self.data.shape[1] // self.element, NOBODY, np.int64) for _ in range(2))

    def _touched(
        self, lanes: Lanes, first: Array, size: int, what: str, *, plainly: bool = False
    ) -> tuple[Array, Array, Array]:
        """(each element that the active lanes touch, the thread that does, how many barriers its warp has met at)."""
        assert self.writer is not None
        count = max(1, size // self.element)
        barriers = lanes.barriers[lanes.block, lanes.thread % lanes.threads // WARP]
        first, number, barriers = lanes.chosen(first, lanes.numbers(), barriers)
        cell = (first[:, np.newaxis] // self.element + np.arange(count)).ravel()
        number, barriers = np.repeat(number, count), np.repeat(barriers, count)
        before = self.writer[cell]
        foreign = (before != NOBODY) & (before != number)
        if foreign.any():
            met_since = (before // WARP == number // WARP) & (self.met_at[cell] < barriers)
            wrong = foreign if plainly else foreign & ~met_since
            if wrong.any():
                t, other = int(number[wrong][0]), int(before[wrong][0])
                raise SimtError(f"{self.name}: thread {t} {what} what thread {other} wrote in the same launch")
        return cell, number, barriers


class SharedMemory(Memory):
    """One row for each block. It begins as garbage, all bits set: NaN in every float.

    Of each cell it knows who wrote it, and who read it, since the block's last barrier: a thread's number, or
    `threads` + w once warp w has synchronised (then it may touch what its threads touched, other warps may not). What
    several threads of warp w have read until then is `threads` + warps + w.
    """

    def __init__(self, name: str, lanes: Lanes, size: int) -> None:
        size = -(-size // 16) * 16
        super().__init__(name, np.full((lanes.blocks, size), 0xFF, np.uint8))
        self.cells = size // CELL
        self.writer, self.reader, self._mark = (np.full(lanes.blocks * self.cells, NOBODY, np.int32) for _ in range(3))

    def row(self, lanes: Lanes) -> Array | int:
        return lanes.block

    def block_barrier(self, blocks: Array) -> None:
        for owners in (self.writer, self.reader):
            owners.reshape(-1, self.cells)[blocks] = NOBODY

    def warp_barrier(self, lanes: Lanes, warps: Array) -> None:
        """What the threads of these warps, (blocks * warps,) bool, touched is their warps' now."""
        for owners in (self.writer, self.reader):
            cells = owners.reshape(-1, self.cells)
            block, cell = np.nonzero(cells >= 0)
            before = cells[block, cell]
            number = before - lanes.threads
            warp = np.where(number < 0, before // WARP, number % lanes.warps)
            synced = warps.reshape(lanes.blocks, -1)[block, warp]
            cells[block[synced], cell[synced]] = lanes.threads + warp[synced]

    def note_read(self, lanes: Lanes, offset: Array, size: int) -> None:
        cell, thread = self._touched(lanes, offset, size)
        self._refuse(lanes, self.writer[cell], thread, "reads what another thread wrote")
        before, warp = self.reader[cell], thread // WARP
        free = (before == NOBODY) | self._own(lanes, before, thread)
        several = lanes.threads + lanes.warps + warp
        same_warp = (before == several) | ((before < lanes.threads) & (before // WARP == warp))
        self.reader[cell] = np.where(free, thread, np.where(same_warp, several, MANY))
        self._mark[cell] = thread
        shared, other = self._mark[cell] != thread, self._mark[cell] // WARP != warp
        mine = shared & (self.reader[cell] != MANY)
        self.reader[cell[mine]] = several[mine]
        self.reader[cell[other]] = MANY

    def note_write(self, lanes: Lanes, offset: Array, values: Array) -> None:
        cell, thread = self._touched(lanes, offset, values.shape[1])
        (new,) = lanes.chosen(np.ascontiguousarray(values).view(np.uint16))
        new = new.ravel()
        # The same bits written twice are no race: whoever comes last, they are what is found there.
        changed = (self.data.view(np.uint16).reshape(-1)[cell] != new) | (self.writer[cell] == NOBODY)
        cell, thread, new = cell[changed], thread[changed], new[changed]
        self._refuse(lanes, self.writer[cell], thread, "overwrites what another thread wrote")
        self._refuse(lanes, self.reader[cell], thread, "overwrites what another thread read")
        self.writer[cell] = thread
        self._mark[cell] = new
        if (self._mark[cell] != new).any():
            raise SimtError(f"{self.name}: two threads write one place at once")

    def _touched(self, lanes: Lanes, offset: Array, size: int) -> tuple[Array, Array]:
        """(the number of every cell that the active lanes touch, the thread that does)."""
        if size < CELL:
            raise SimtError(f"{self.name}: elements of shared memory have {CELL} bytes at least")
        offset, block, thread = lanes.chosen(offset, lanes.block, lanes.thread)
        first = block * np.int64(self.cells) + offset // CELL
        count = size // CELL
        return (first[:, None] + np.arange(count)).ravel(), np.repeat(thread, count)

    def _own(self, lanes: Lanes, owners: Array, thread: Array) -> Array:
        return (owners == thread) | (owners == lanes.threads + thread // WARP)

    def _refuse(self, lanes: Lanes, owners: Array, thread: Array, what: str) -> None:
        wrong = (owners != NOBODY) & ~self._own(lanes, owners, thread)
        if wrong.any():
            t, other = int(thread[wrong][0]), int(owners[wrong][0])
            number = other - lanes.threads
            by = "several" if other == MANY else f"{other}" if number < 0 else f"warp {number % lanes.warps}"
            raise SimtError(f"{self.name}: thread {t} {what} ({by}), and no barrier in between")

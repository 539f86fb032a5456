"""Banks of shared memory: what the accesses of a kernel that the SIMT interpreter runs would cost.

There are 32 banks, each of which gives one word of 4 bytes a cycle. A warp's access is served in groups of lanes: all
of them for words, 16 for pairs, 8 for 16 bytes (CUDA C++ Best Practices Guide, "Shared Memory and Memory Banks"); a
group takes as many cycles as there are different words in the bank that has most of them. Where each lane has the
address of its neighbour (n XOR 1), or of the one after (n XOR 2), two groups of 16 bytes are served at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from support.simt.memory import WARP, Array, Lanes, SharedMemory

BANKS, WORD = 32, 4


@dataclass
class Cycles:
    """taken, and what they would be were all words of a group in different banks; of accesses to 16 bytes by whole
    warps, how many there were, and how many of these had lanes in pairs"""

    taken: int = 0
    needed: int = 0
    wide: int = 0
    paired: int = 0


@contextmanager
def counted() -> Iterator[tuple[Cycles, Cycles]]:
    """(cycles of reads, of writes) of shared memory in what follows."""
    reads, writes = Cycles(), Cycles()
    read, write = SharedMemory.note_read, SharedMemory.note_write

    def note_read(self: SharedMemory, lanes: Lanes, offset: Array, size: int) -> None:
        _add(reads, lanes, offset, size)
        read(self, lanes, offset, size)

    def note_write(self: SharedMemory, lanes: Lanes, offset: Array, values: Array) -> None:
        _add(writes, lanes, offset, values.shape[1])
        write(self, lanes, offset, values)

    SharedMemory.note_read, SharedMemory.note_write = note_read, note_write  # type: ignore[method-assign]
    try:
        yield reads, writes
    finally:
        SharedMemory.note_read, SharedMemory.note_write = read, write  # type: ignore[method-assign]


def _add(cycles: Cycles, lanes: Lanes, offset: Array, size: int) -> None:
    together = WARP // max(1, size // WORD)  # lanes of a group
    active = np.ones(lanes.count, np.bool_) if lanes.active is None else lanes.active
    if size == 16 and active.all():
        warps = offset.reshape(-1, WARP)
        cycles.wide += len(warps)
        pairs = [(warps == warps[:, np.arange(WARP) ^ apart]).all(axis=1) for apart in (1, 2)]
        cycles.paired += int((pairs[0] | pairs[1]).sum())
    for group in range(0, lanes.count, together):
        there = active[group : group + together]
        first = offset[group : group + together][there] // WORD
        words = np.unique(first[:, None] + np.arange(max(1, size // WORD)))
        if words.size:
            cycles.taken += int(np.bincount(words % BANKS).max())
            cycles.needed += -(-words.size // BANKS)

"""Packed weights on large pages, where Linux collapses small ones.

A call reads all of them. Each page of 4 KB is looked up in tables that lie in memory, on a virtual machine in those of
guest and of host, and lines that are asked for ahead wait for that (docs/lab/2026-11-27-weights-from-memory.md). The
kernel copies as many small pages as make a large one in place, so that nothing moves and no more memory is taken; it
takes half a millisecond each, beside what the process does next.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mhsa_compile.runtime.array_memory import extent
from mhsa_compile.runtime.tvm_runtime import CallsAtExit

_END = 1 << 64  # of the address space
SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
COLLAPSE = 25
"""MADV_COLLAPSE, of Linux 6.1; older kernels refuse it."""
GAP = 1 << 16
"""Bytes between two arrays that count as theirs: heads of an allocator's blocks, and small arrays."""


def collapse(calls: CallsAtExit, arrays: Sequence[Any]) -> None:
    """Has the kernel put TVM's arrays on large pages, by a thread that ends when this is done. Where it does not, or
    whoever runs the machine wants none, they stay on small ones; so does what is left when the process forks, as parent
    and child share it."""
    size = page_size()
    pieces = [] if size is None else list(pages(arrays, size))
    if pieces:
        with suppress(RuntimeError):  # no thread more
            threading.Thread(target=_collapse, args=(calls, calls.forks, arrays, pieces, size), daemon=True).start()


@functools.cache
def page_size() -> int | None:
    """Bytes of a large page; None where nobody gets any."""
    with suppress(OSError, ValueError):
        if "[never]" not in (SETTINGS / "enabled").read_text():
            return int((SETTINGS / "hpage_pmd_size").read_text())
    return None


def pages(arrays: Sequence[Any], size: int) -> Iterator[int]:
    """Where large pages begin that are full of arrays, next to each other or nearly so."""
    first = end = 0
    for begin, after in [*sorted(map(extent, arrays)), (_END, _END)]:
        if begin - end > GAP:
            yield from range(-(-first // size) * size, end // size * size, size)
            first = begin
        end = max(end, after)


def _collapse(calls: CallsAtExit, forks: int, arrays: Sequence[Any], pieces: Sequence[int], size: int) -> None:
    """`arrays` are there as long as this runs, unless the process ends, which waits for one piece."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
    for piece in pieces:
        with calls.lock:
            if calls.forks == forks:
                madvise(piece, size, COLLAPSE)

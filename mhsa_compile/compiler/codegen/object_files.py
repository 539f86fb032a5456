"""Object files that LLVM writes into memory, and Python from there to the disk.

LLVM ends the whole process where a write fails: a full disk, a quota or a limit on the sizes of files would take the
program that compiles with it. Memory has no such end but for that limit, which is looked at before; and what Python
cannot write is an error. LLVM opens files by their paths, so each place in the folder in which it writes is a link to
one in memory.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mhsa_compile.errors import OutputError
from mhsa_compile.files.room import size_limit, without_room

_NAMES = ("lib0.o", "lib1.o", "devc.o")
"""What TVM's export calls them: the code, by number, and what a module brings beside it."""
_BLOCK = 2**20
_LEAST = 2**14  # of an object file: its tables
_ZEROS = re.compile(r"^\t\.(?:zero|space|skip)\t(\d+)", re.MULTILINE)


class ObjectFiles:
    """The object files of one library, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._memory: dict[str, int] = {}

    def __enter__(self) -> ObjectFiles:
        with suppress(OSError, AttributeError):  # no such memory, or no /proc: see `check_room`
            for name in _NAMES:
                handle = os.memfd_create(name, os.MFD_CLOEXEC)
                self._memory[name] = handle
                place = f"/proc/self/fd/{handle}"
                os.stat(place)
                (self.folder / name).symlink_to(place)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._memory.values():
            os.close(handle)

    def check_room(self, most_bytes: Callable[[], int]) -> None:
        """Raises OutputError where LLVM could fail to write a file of so many bytes, and end the process: beyond a
        limit on the sizes of files or, where there is no memory that looks like files, beyond what the disk has."""
        in_memory = all((self.folder / name).exists() for name in _NAMES)
        limit = size_limit()
        if in_memory and limit is None:
            return
        size = most_bytes()
        if limit is not None and size > limit:
            hint = "Lift the limit: ulimit -f unlimited."
            raise OutputError("limit on the sizes of files", f"up to {size} bytes for code", f"{limit} bytes", hint)
        if not in_memory and (reason := without_room(self.folder, size)) is not None:
            hint = "Free some space, or point TMPDIR to another place."
            raise OutputError(f"folder {str(self.folder)!r}", f"up to {size} bytes for code", reason, hint)

    def on_disk(self, paths: Sequence[str]) -> list[str]:
        """The files, for a linker, at the same paths. Raises OSError."""
        for path in map(Path, paths):
            handle = self._memory.get(path.name) if path.parent == self.folder and path.is_symlink() else None
            if handle is not None:
                path.unlink()
                with path.open("xb") as file:
                    file.writelines(_blocks(handle))
        return list(paths)


def _blocks(handle: int) -> Iterator[bytes]:
    at = 0
    while block := os.pread(handle, _BLOCK, at):
        yield block
        at += len(block)


def most_bytes_of_code(module: Any) -> int:
    """More bytes than the object file of a module of LLVM's has. A line of assembly has a dozen characters and more,
    instructions have 15 bytes at most, and a place that the linker fills in 24; or it says how many zeros it is."""
    text = module.inspect_source("s")
    return _LEAST + 2 * len(text) + sum(map(int, _ZEROS.findall(text)))


def most_bytes_of_data(data: int) -> int:
    """More bytes than an object file has that holds `data` bytes of a module's imports."""
    return _LEAST + data

"""A file of lines that only grows, for several writers at once, any of which may die.

A line is added under a lock of the file, and is on the disk when `append` returns. A writer that dies leaves at most
the beginning of its line behind the last newline, and the next one cuts that off. `rewrite` puts a new file in the
place of the old one under the same lock: whoever waited for the old one goes on with the new.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mhsa_compile.files import input_files, system
from mhsa_compile.files.atomic_write import is_at

_BLOCK = 65_536


def read(path: Path) -> tuple[list[bytes], bytes]:
    """(the lines, what stands behind the last newline). Raises OSError."""
    with os.fdopen(input_files.regular(path), "rb") as file:
        with suppress(OSError):  # a file system without locks: a line that is being written may look torn, no more
            system.lock(file.fileno(), shared=True)
        return _split(file.read())


def append(path: Path, line: bytes, whole: Callable[[bytes], bool]) -> None:
    """Adds a line, and its folder where there is none. `whole` is asked about what stands behind the last newline: it
    stays if that lacks only its newline, and is cut off if not. Raises OSError, and leaves all whole lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path) as file:
        tail = _tail(file)
        size = os.fstat(file).st_size
        end, glue = (size, b"\n") if tail and whole(tail) else (size - len(tail), b"")
        os.ftruncate(file, end)
        try:
            _write(file, glue + line + b"\n", end)
            os.fsync(file)
        except OSError:
            os.ftruncate(file, end)
            raise
        if size == 0:
            system.sync_folder(path.parent)


def rewrite(path: Path, change: Callable[[list[bytes], bytes], Iterable[bytes]]) -> None:
    """Puts `change(lines, what stands behind the last newline)` in the place of a file, whole or not at all. A file
    that is not there counts as empty. Raises OSError, and what `change` raises."""
    path = Path(os.path.realpath(path))  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.new")  # one name will do under the lock; what a dead writer left is replaced
    with _lock(path) as old:
        with os.fdopen(os.dup(old), "rb") as file:
            lines = change(*_split(file.read()))
        if system.IS_WINDOWS:  # which puts nothing in the place of a file that is open
            _overwrite(old, b"".join(line + b"\n" for line in lines))
            return
        try:
            with staged.open("wb") as new:
                new.write(b"".join(line + b"\n" for line in lines))
                new.flush()
                os.fchmod(new.fileno(), stat.S_IMODE(os.fstat(old).st_mode))
                os.fsync(new.fileno())
        except BaseException:
            staged.unlink(missing_ok=True)
            raise
        os.replace(staged, path)  # from here on the name may be another writer's
        system.sync_folder(path.parent)


def _overwrite(file: int, data: bytes) -> None:
    os.ftruncate(file, 0)
    _write(file, data, 0)
    os.fsync(file)


@contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Opens a file, created where there is none, and holds its lock: meanwhile it is nobody else's."""
    while True:
        file = input_files.regular(path, os.O_RDWR | os.O_CREAT)
        try:
            system.lock(file)
            if is_at(file, path):
                yield file
                return
        finally:
            os.close(file)


def _write(file: int, data: bytes, offset: int) -> None:
    if system.write_at(file, data, offset) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _tail(file: int) -> bytes:
    """What stands behind the last newline."""
    begin, tail = os.fstat(file).st_size, b""
    while begin and b"\n" not in tail:
        step = min(begin, _BLOCK)
        begin -= step
        tail = system.read_at(file, step, begin) + tail
    return tail.rpartition(b"\n")[2]


def _split(raw: bytes) -> tuple[list[bytes], bytes]:
    *lines, tail = raw.split(b"\n")
    return lines, tail

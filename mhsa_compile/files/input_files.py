"""Files from outside, opened so that none of them can hang or surprise whoever reads them; JSON in which
no object names one thing twice, since readers disagree on which of the two counts. Standard library only."""

from __future__ import annotations

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

from mhsa_compile.errors import MhsaError
from mhsa_compile.files import system

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """A handle of a regular file. Raises OSError for anything else: a pipe would wait for its writer, and a device may
    have no end."""
    try:
        # A pipe that nobody writes to opens at once with O_NONBLOCK; on regular files that means nothing.
        handle = os.open(path, flags | system.NO_WAITING | system.CLOSED_ON_EXEC, 0o644)
    except ValueError as error:  # a NUL in the path, or half of a surrogate pair
        raise OSError(errno.EINVAL, str(error), os.fspath(path)) from error
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, f"it is {next((name for is_one, name in _KINDS if is_one(mode)), 'no file')}", path)


def open_file(path: str | os.PathLike[str], kind: type[MhsaError], argument: str, expected: str) -> BufferedReader:
    """A regular file, for reading. Anything else is refused by a `kind`."""
    try:
        return os.fdopen(regular(path), "rb")
    except OSError as error:
        raise kind(argument, expected, f"{str(path)!r} ({error.strerror})") from error


def read(path: str | os.PathLike[str], kind: type[MhsaError], argument: str, expected: str) -> bytes:
    """A file's bytes, read as `open_file` opens it: anything but a regular file is refused by a `kind`."""
    with open_file(path, kind, argument, expected) as file:
        return file.read()


def read_text(path: str | Path, kind: type[MhsaError], argument: str, expected: str) -> str:
    """A file's text, read as `open_file` opens it. What is no UTF-8 is refused, too."""
    raw = read(path, kind, argument, expected)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise kind(argument, expected, f"{str(path)!r} ({error})", "Save it as UTF-8.") from error


def text_or_nothing(path: Path) -> str:
    """The text of a file of the system's, as /proc and /sys have them; empty where there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def require_unique_keys(raw: bytes | str) -> None:
    """Raises ValueError for JSON with an object that has two entries of one name, and for what is no JSON."""
    json.loads(raw, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two entries of one name, {twice!r}")
    return entries

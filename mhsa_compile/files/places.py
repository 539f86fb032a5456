"""What lies at a path that anybody wrote: nothing, where the file system can have no such path. Standard library only.

pathlib raises for a name that is too long, and for a path below a file which may not be entered.
"""

from __future__ import annotations

import os
from pathlib import Path

from mhsa_compile.errors import MhsaError

AnyPath = str | os.PathLike[str]


def is_folder(path: AnyPath) -> bool:
    return os.path.isdir(path)


def is_file(path: AnyPath) -> bool:
    return os.path.isfile(path)


def is_there(path: AnyPath) -> bool:
    """Whether there is anything at a path: a file or a folder, through links."""
    return os.path.exists(path)


def neighbours(path: Path) -> list[str]:
    """The names beside a path's, none where its folder cannot be read."""
    try:
        return os.listdir(path.parent)
    except OSError:
        return []


def make_folder(folder: AnyPath, kind: type[MhsaError], argument: str) -> Path:
    """A folder, with those that it lies in: it is made where there is none. A `kind` says why it cannot be."""
    try:
        os.makedirs(folder, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise kind(argument, "a folder, or a place for one", f"{os.fspath(folder)!r} ({reason})") from error
    return Path(folder)


def check_possible(path: AnyPath, kind: type[MhsaError], argument: str) -> None:
    """Whether the file system can have such a path, whatever lies there. A `kind` says why not."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise kind(argument, "a path that this file system can have", f"{os.fspath(path)!r} ({reason})") from error


def resolve(path: AnyPath, kind: type[MhsaError], argument: str) -> Path:
    """The path without links, from the root on. What no path can be is refused by a `kind`."""
    try:
        return Path(os.path.realpath(path))
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise kind(argument, "a path of a file system", f"{str(path)!r} ({error})") from error
    except TypeError as error:
        raise kind(argument, "a path", type(path).__name__) from error

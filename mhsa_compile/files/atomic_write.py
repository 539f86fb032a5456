"""Folders and files that are written whole or not at all, and what processes that died while they wrote have left.

Each is made beside its place and renamed into it. While it is made its process holds a lock on it (flock), which ends
with the process however that ends: so whoever next makes one of the same name sees which ones nobody is making any
more, and removes them.
"""

from __future__ import annotations

import ctypes
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from mhsa_compile.errors import MhsaError, OutputError
from mhsa_compile.files import places, system
from mhsa_compile.files.user_folders import temporary_place

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of <fcntl.h> and <linux/fs.h>
_SUFFIX = ".unfinished"
_ASIDE = ".old"
_TEMPORARY = "mhsa-compile"  # in the system's folder for such


class Unfinished:
    """A folder that this process makes: removed by `remove`, or by the next process that makes one of the same name."""

    def __init__(self, parent: Path, name: str, mode: int = 0o777) -> None:
        """Makes `.NAME.xxxxxxxx.unfinished`, after it has removed those of dead processes. Raises OSError."""
        import secrets

        sweep(parent, name)
        while True:
            self.path = parent / f".{name}.{secrets.token_hex(4)}{_SUFFIX}"
            self.path.mkdir(mode)
            self._handle = -1
            if system.IS_WINDOWS:  # which locks no folders, and so sweeps none
                return
            try:
                self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | system.CLOSED_ON_EXEC)
            except FileNotFoundError:  # swept, before it was locked, by a process that makes one of the same name
                continue
            with suppress(OSError):  # a file system without locks: then it is nobody's to sweep, either
                system.lock(self._handle, shared=True)
            if is_at(self._handle, self.path):
                return
            os.close(self._handle)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Removes the folder with all that is in it; nothing happens where it was renamed or removed before."""
        import shutil

        shutil.rmtree(self.path, ignore_errors=True)
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def temporary() -> Unfinished:
    """A folder in the system's place for such, for this user's eyes only. Raises OSError, OutputError among them."""
    return Unfinished(temporary_place(), _TEMPORARY, 0o700)


def sweep(parent: Path, name: str) -> None:
    """Removes what processes of this user, dead since, left while they made `name` in `parent`."""
    if system.IS_WINDOWS:
        return
    ours = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{8}}{re.escape(_SUFFIX)}({re.escape(_ASIDE)})?")
    with suppress(OSError):
        for entry in os.scandir(parent):
            if ours.fullmatch(entry.name) and (not entry.name.endswith(_ASIDE) or (parent / name).exists()):
                _remove_if_left(parent / entry.name)


def _remove_if_left(path: Path) -> None:
    import shutil

    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | system.NO_WAITING | system.NO_LINKS | system.CLOSED_ON_EXEC)
        try:
            status = os.fstat(handle)
            if status.st_uid == system.user_number():
                system.lock(handle, wait=False)  # raises where its maker lives
                if stat.S_ISDIR(status.st_mode):
                    shutil.rmtree(path, ignore_errors=True)
                elif stat.S_ISREG(status.st_mode):
                    path.unlink()
        finally:
            os.close(handle)


def is_at(handle: int, path: Path) -> bool:
    """Whether an open file is still the one at the path: another may have taken its place meanwhile."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def atomic_folder(folder: Path, force: bool, mark: str) -> Iterator[Path]:
    """An empty folder that becomes `folder` when the block ends well; arguments and errors as `check_place`."""
    check_place(folder, force, mark)
    try:
        with Unfinished(folder.parent, folder.name) as staged:
            yield staged
            _move(staged, folder)
    except MhsaError:
        raise
    except OSError as error:
        raise unwritable(folder, error) from error


def check_place(folder: Path, force: bool, mark: str) -> None:
    """Whether something may be saved as `folder`, before it is made. Raises OutputError.

    With `force` it may replace another: a folder that has the file `mark`, which an artifact or a bundle has.
    """
    staged = folder.parent / f".{folder.name}.{'0' * 8}{_SUFFIX}"  # as long as the name while it is made
    for path in (folder, staged):
        places.check_possible(path, OutputError, "output folder")
    if not places.is_folder(folder.parent):
        raise OutputError(
            "output folder", "a place in a folder that exists", str(folder), f"Create {folder.parent} first."
        )
    if not places.is_there(folder):
        return
    if not force:
        next_step = "Choose another, or replace it: --force, or force=True."
        raise OutputError("output folder", "one that does not exist yet", str(folder), next_step)
    # What is replaced is deleted: nobody's project, only an artifact, whole or damaged, or an empty folder.
    if not folder.is_dir() or not ((folder / mark).is_file() or not any(folder.iterdir())):
        what = "a bundle" if "/" in mark else "an artifact"
        raise OutputError("output folder", f"{what} to replace", f"{str(folder)!r}, which holds something else")


def _move(staged: Path, folder: Path) -> None:
    """Moves `staged` into the place of `folder` in one step; what was there is then at `staged`, or gone."""
    import shutil

    if not folder.exists():
        staged.rename(folder)
    elif not _exchange(staged, folder):
        aside = staged.with_name(f"{staged.name}{_ASIDE}")
        folder.rename(aside)
        try:
            staged.rename(folder)
        except OSError:
            aside.rename(folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders so that neither name is ever vacant; False where the C library or the file system cannot."""
    renameat2 = None if system.IS_WINDOWS else getattr(ctypes.CDLL(None), "renameat2", None)
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return renameat2 is not None and renameat2(*paths, _RENAME_EXCHANGE) == 0


def unwritable(folder: Path, error: OSError) -> OutputError:
    place, reason = f"output folder {str(folder)!r}", error.strerror or str(error)
    return OutputError(place, "room for it, and permission", reason, "Nothing was written.")


def check_file(path: Path, argument: str) -> None:
    """Whether a file may be written as `path`, in place of the one that may be there. Raises OutputError."""
    for name in (path, path.parent / f".{path.name}.{'0' * 8}{_SUFFIX}"):
        places.check_possible(name, OutputError, argument)
    if not places.is_folder(path.absolute().parent):
        raise OutputError(argument, "a file in a folder that exists", str(path), f"Create {path.parent} first.")
    if places.is_there(path) and not places.is_file(path):
        got = f"the folder {str(path)!r}" if places.is_folder(path) else f"{str(path)!r}, which is none"
        raise OutputError(argument, "a place for a file", got, "Name a file, which may exist already.")


@contextmanager
def atomic_file(path: Path, argument: str) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` when the block ends well. Raises OutputError, and leaves what was there."""
    check_file(path, argument)
    path = places.resolve(path, OutputError, argument)  # a link stays one
    try:
        with _unfinished_file(path) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if system.IS_WINDOWS:  # which renames no file that is open
                file.close()
            os.replace(file.name, path)
    except MhsaError:
        raise
    except OSError as error:
        hint = "Free some space, or choose another place. What was there is as it was."
        raise OutputError(argument, "room for it, and permission", error.strerror or str(error), hint) from error


def write(path: Path, data: bytes, argument: str) -> None:
    """Writes a file, whole or not at all; see `atomic_file`."""
    with atomic_file(path, argument) as file:
        file.write(data)


@contextmanager
def _unfinished_file(path: Path) -> Iterator[BinaryIO]:
    """`.NAME.xxxxxxxx.unfinished` beside a path, for writing; it is gone when the block ends, unless it was renamed."""
    import secrets

    sweep(path.parent, path.name)
    while True:
        staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
        with staged.open("x+b") as file:
            try:
                with suppress(OSError):  # a file system without locks: then it is nobody's to sweep, either
                    system.lock(file.fileno(), shared=True)
                if not is_at(file.fileno(), staged):  # swept, before it was locked
                    continue
                yield file
                return
            finally:
                with suppress(OSError):
                    staged.unlink(missing_ok=True)

"""Where a user's files go: the folders of the XDG base directory specification, or, for a user who has no home, one in
the system's place for temporary files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from mhsa_compile.errors import OutputError
from mhsa_compile.files import system


def cache_home() -> Path:
    """The folder for what can be made again: $XDG_CACHE_HOME, by default ~/.cache, or that of macOS or Windows."""
    return _home("XDG_CACHE_HOME", ".cache", system.user_cache())


def data_home() -> Path:
    """The folder for what should last: $XDG_DATA_HOME, by default ~/.local/share, or that of macOS or Windows."""
    return _home("XDG_DATA_HOME", ".local/share", system.user_data())


def temporary_place() -> Path:
    """The folder in which temporary files are made: $TMPDIR, by default /tmp. Raises OutputError."""
    import tempfile

    try:
        return Path(tempfile.gettempdir())
    except OSError as error:  # not one of all the places that Python tries
        hint = "Free some space, or point TMPDIR to a folder that can be written."
        raise OutputError("temporary folder", "a folder with room, and permission", str(error), hint) from error


def spare() -> Path:
    """A folder of this user's alone in the place for temporary files, the same one for all processes; a new one, for
    this call, where somebody else has taken its name. Raises OSError."""
    import tempfile

    path = temporary_place() / f"mhsa_compile-{system.user_number()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()  # not what a link of somebody's points to
    if stat.S_ISDIR(status.st_mode) and system.is_private(status, 0o077):
        return path
    return Path(tempfile.mkdtemp(prefix="mhsa_compile-"))


def has_home() -> bool:
    """Whether this user has a home. HOME may be unset, for a number that no user has: then "~" stays what it is, a
    folder of that name."""
    return os.path.expanduser("~") != "~"


def let_tvm_load() -> None:
    """TVM's compiler names a cache of its own as it loads, and fails where there is no home: before it is imported it
    is told of another place, for this process."""
    if not os.environ.get("XDG_CACHE_HOME") and not has_home():
        os.environ["XDG_CACHE_HOME"] = str(cache_home())


def can_write(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made where there is none. Found out by making one: permissions do
    not tell of a read-only file system."""
    import tempfile

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _home(variable: str, below: str, of_user: Path) -> Path:
    if value := os.environ.get(variable):
        return Path(value)
    return of_user if has_home() else spare() / below

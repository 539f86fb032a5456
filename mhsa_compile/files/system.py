"""What is said to each operating system in its own words: locks of files, flags of `open`, whose a file is, on which
CPUs a process may run. Standard library only.

Linux and macOS have POSIX's calls, macOS without some; Windows has others. Who needs one asks here, and imports on all.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

IS_WINDOWS = os.name == "nt"
CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
"""Flags of `os.open`: no program that is started has the file, and its bytes are as they are."""
NO_WAITING = getattr(os, "O_NONBLOCK", 0)
"""A flag of `os.open`, by which a pipe opens at once."""
NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_FAIL_AT_ONCE, _EXCLUSIVE, _LOCKED_BYTE = 1, 2, 1 << 62  # of Windows; the byte is beyond the end of every file


def lock(file: int, *, shared: bool = False, wait: bool = True) -> None:
    """Locks an open file for its handle, until that is closed: for it alone, or for it and others who share it. Raises
    OSError where the file system has no locks, BlockingIOError where somebody else has it and `wait` is false."""
    if IS_WINDOWS:
        _lock_on_windows(file, (0 if shared else _EXCLUSIVE) | (0 if wait else _FAIL_AT_ONCE))
        return
    import fcntl

    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def _lock_on_windows(file: int, flags: int) -> None:
    import msvcrt

    class Overlapped(ctypes.Structure):
        """OVERLAPPED of Windows: where in the file the lock is."""

        _fields_ = (
            ("internal", ctypes.c_void_p), ("internal_high", ctypes.c_void_p),
            ("offset", ctypes.c_uint32), ("offset_high", ctypes.c_uint32), ("event", ctypes.c_void_p),
        )  # fmt: skip

    kernel: Any = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined]
    kernel.LockFileEx.argtypes = (ctypes.c_void_p, *(ctypes.c_uint32,) * 4, ctypes.c_void_p)
    place = Overlapped(offset=_LOCKED_BYTE & 0xFFFFFFFF, offset_high=_LOCKED_BYTE >> 32)
    handle = msvcrt.get_osfhandle(file)  # type: ignore[attr-defined]
    if not kernel.LockFileEx(handle, flags, 0, 1, 0, ctypes.byref(place)):
        reason = ctypes.get_last_error()  # type: ignore[attr-defined]
        if flags & _FAIL_AT_ONCE:
            raise BlockingIOError(reason, "somebody else has locked it")
        raise OSError(reason, "it cannot be locked")


def user_number() -> int:
    """The number of the user whose process this is; 0, as of every file, on Windows, which has none."""
    return os.geteuid() if hasattr(os, "geteuid") else 0


def is_private(status: os.stat_result, forbidden: int) -> bool:
    """Whether a file is this user's, and none of the `forbidden` bits of its mode is set. Windows keeps permissions
    elsewhere: there a user's own folders are."""
    return status.st_uid == user_number() and (IS_WINDOWS or not status.st_mode & forbidden)


def cpus() -> list[int]:
    """The CPUs that this process may run on; all, where the system has no such choice."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def user_cache() -> Path:
    """Where this system has a user's files that can be made again."""
    return _of_user("LOCALAPPDATA", "AppData/Local", "Library/Caches", ".cache")


def user_data() -> Path:
    """Where this system has a user's files that should last."""
    return _of_user("APPDATA", "AppData/Roaming", "Library/Application Support", ".local/share")


def _of_user(variable: str, on_windows: str, on_macos: str, elsewhere: str) -> Path:
    if IS_WINDOWS:
        return Path(os.environ.get(variable) or Path(os.path.expanduser("~"), on_windows))
    return Path(os.path.expanduser("~"), on_macos if sys.platform == "darwin" else elsewhere)


def read_at(file: int, size: int, offset: int) -> bytes:
    """`os.pread`, which Windows has not."""
    if hasattr(os, "pread"):
        return os.pread(file, size, offset)
    os.lseek(file, offset, os.SEEK_SET)
    return os.read(file, size)


def write_at(file: int, data: bytes, offset: int) -> int:
    """`os.pwrite`, which Windows has not."""
    if hasattr(os, "pwrite"):
        return os.pwrite(file, data, offset)
    os.lseek(file, offset, os.SEEK_SET)
    return os.write(file, data)


def sync_folder(folder: Path) -> None:
    """Puts a folder's entries on the disk, with the name of a new file among them. Windows opens no folders."""
    if IS_WINDOWS:
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | CLOSED_ON_EXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

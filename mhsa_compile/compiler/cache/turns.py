"""Whose turn it is to compile: of several processes that want the same thing, one compiles it and the others wait.

    ~/.cache/mhsa_compile/artifacts/.KEY.lock    while somebody compiles

The lock is the kernel's (flock): it ends with its process, however that ends, and the next one takes its turn. One that
hangs does not hold up the rest for ever: they compile for themselves then.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

WAIT_SECONDS = 900.0
"""The longest that others are waited for: a large model takes minutes on a busy machine."""
_PAUSE_SECONDS = 0.05


class Turn:
    """The turn to compile what has this key, until it is over."""

    def __init__(self, folder: Path, key: str) -> None:
        self._path = _place(folder, key)
        self._handle = -1

    def take(self) -> None:
        """Waits until nobody else has it; not at all where there can be no lock."""
        until = time.monotonic() + WAIT_SECONDS
        with suppress(
            OSError
        ):  # a full disk, or a file system without locks: it is compiled at once, as often as asked
            while not self._taken() and time.monotonic() < until:
                time.sleep(_PAUSE_SECONDS)

    def over(self) -> None:
        """Lets the next one take it."""
        if self._handle >= 0:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._handle)
            self._handle = -1

    def _taken(self) -> bool:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.path.samestat(os.fstat(handle), self._path.stat())  # or the one before removed what was locked
        except (BlockingIOError, FileNotFoundError):
            mine = False
        except BaseException:
            os.close(handle)
            raise
        if not mine:
            os.close(handle)
            return False
        self._handle = handle
        return True


def sweep(folder: Path, key: str) -> None:
    """Removes the lock of a process that died in its turn."""
    turn = Turn(folder, key)
    with suppress(OSError):
        if _place(folder, key).exists() and turn._taken():
            turn.over()


def _place(folder: Path, key: str) -> Path:
    return folder / f".{key}.lock"

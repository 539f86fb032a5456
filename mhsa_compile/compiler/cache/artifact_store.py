"""The folder of artifacts that were compiled before: looked up by key, checked by hash on use, bounded in size.

    ~/.cache/mhsa_compile/artifacts/KEY/         an artifact folder like any other
    ~/.cache/mhsa_compile/artifacts/.KEY.lock    while somebody compiles

Several processes may use it at once: an entry is renamed into place whole, and renamed away before it is deleted. What
goes wrong with the folder never stops a compilation: a damaged entry is deleted and made again, a full disk keeps
nothing. Code is mapped from here, so a folder that others may write to is not used. Imports no TVM.

Of several processes that want the same thing, one compiles it and the others wait for their turn. The lock is the
kernel's (flock): it ends with its process, however that ends, and the next one takes its turn. One that hangs does not
hold up the rest for ever: they compile for themselves then.
"""

from __future__ import annotations

import os
import stat
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mhsa_compile.errors import ArtifactError, MhsaError
from mhsa_compile.files import atomic_write, system
from mhsa_compile.files.atomic_write import Unfinished
from mhsa_compile.hardware import data_paths, environment
from mhsa_compile.runtime.artifact.artifact import Artifact, open_artifact
from mhsa_compile.runtime.artifact.manifest import WEIGHTS, Manifest

WAIT_SECONDS = 900.0
"""The longest that others are waited for: a large model takes minutes on a busy machine."""
_PAUSE_SECONDS = 0.05


SWITCH = "MHSA_CACHE"
LIMIT = 2 * 2**30
"""Bytes of all entries together; the least recently used go first. Layers have a few MB, small models some hundred."""
_DROPPED = "dropped"  # the name of an entry while it is deleted
_KEY_LENGTH = 64  # of a sha256 in hexadecimal digits
MakeWeights = Callable[[Manifest, Path], None]


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
            while not self._try_lock() and time.monotonic() < until:
                time.sleep(_PAUSE_SECONDS)

    def over(self) -> None:
        """Lets the next one take it."""
        if self._handle >= 0:
            with suppress(OSError):
                self._path.unlink()
            os.close(self._handle)
            self._handle = -1

    def _try_lock(self) -> bool:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | system.CLOSED_ON_EXEC | system.NO_LINKS, 0o600)
        try:
            system.lock(handle, wait=False)
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
        if _place(folder, key).exists() and turn._try_lock():
            turn.over()


def _place(folder: Path, key: str) -> Path:
    return folder / f".{key}.lock"


@dataclass(frozen=True)
class CacheEntry:
    """An entry: its folder, its bytes, and when it was last used, in seconds since 1970."""

    path: Path
    size: int
    used: float


def is_on() -> bool:
    """Whether the environment leaves the cache on: MHSA_CACHE=0 switches it off. Raises InputError."""
    return environment.leaves_on(SWITCH)


def find(key: str, make_weights: MakeWeights | None = None) -> Artifact | None:
    """A copy of an entry in a temporary folder, as `compile` returns it; None where there is none that is whole.

    make_weights  writes the weights to a file instead of the entry's own, which are then not read
    """
    place = data_paths.artifact_cache() / key
    if not _is_private(place.parent) or not place.is_dir():
        return None
    owner = None
    try:
        owner = atomic_write.temporary()
        with open_artifact(place) as files:
            files.copy(owner.path, without=() if make_weights is None else (WEIGHTS,))
        os.utime(place)
        if make_weights is not None:
            make_weights(files.manifest, owner.path / WEIGHTS)
            return Artifact.assemble(owner.path, files.manifest, owner=owner)
        artifact = Artifact(owner.path, files.manifest)
        weakref.finalize(artifact, owner.remove)
        return artifact
    except Exception as error:  # whatever it is, compiling does without
        if owner is not None:
            owner.remove()
        if isinstance(error, ArtifactError):
            drop(place)
        return None
    except BaseException:
        if owner is not None:
            owner.remove()
        raise


def turn(key: str) -> Turn | None:
    """The turn to make an entry, not taken yet; None where no entry can be kept."""
    root = data_paths.artifact_cache()
    with suppress(OSError):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_private(root):
            return Turn(root, key)
    return None


def keep(key: str, artifact: Artifact) -> None:
    """Makes an artifact an entry, in place of the one that may be there; of what does not fit, nothing."""
    root = data_paths.artifact_cache()
    with suppress(MhsaError, OSError):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_private(root) and _size(artifact.path) <= LIMIT:
            artifact.save(root / key, force=True)
            _bound(root)


def entries() -> list[CacheEntry]:
    """All entries, the one that was used last first."""
    artifacts = []
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        for place in data_paths.artifact_cache().iterdir():
            if _is_key(place.name):
                with suppress(OSError):  # another process drops it at this moment
                    artifacts.append(CacheEntry(place, _size(place), place.stat().st_mtime))
    return sorted(artifacts, key=lambda entry: -entry.used)


def clear() -> list[CacheEntry]:
    """Drops all entries. Returns those that are gone."""
    artifacts = entries()
    for entry in artifacts:
        drop(entry.path)
    return [entry for entry in artifacts if not entry.path.exists()]


def drop(place: Path) -> None:
    """Deletes an entry; nobody sees half of one."""
    with suppress(OSError), Unfinished(place.parent, _DROPPED, 0o700) as aside:
        place.rename(aside / place.name)


def _bound(root: Path) -> None:
    """Drops the least recently used entries until the others fit, and what dead processes left half-written."""
    keys = {place.name.split(".")[1] for place in root.iterdir() if place.name.startswith(".")}
    for name in filter(_is_key, keys):
        atomic_write.sweep(root, name)
        sweep(root, name)
    atomic_write.sweep(root, _DROPPED)
    total = 0
    for entry in entries():
        total += entry.size
        if total > LIMIT:
            drop(entry.path)


def _is_key(name: str) -> bool:
    return len(name) == _KEY_LENGTH and not set(name) - set("0123456789abcdef")


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _is_private(root: Path) -> bool:
    """Whether the folder is this user's, and nobody else may write to it."""
    try:
        status = root.stat()
    except OSError:
        return False
    return system.is_private(status, stat.S_IWGRP | stat.S_IWOTH)

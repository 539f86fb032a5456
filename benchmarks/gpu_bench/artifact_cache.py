"""Artifacts that several runs share: compiled by the first of them, and named for all that they are made of."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import mhsa_compile
from mhsa_compile.hardware import data_paths
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import MANIFEST


def artifact(folder: Path | None, make: Callable[[], Artifact], *parts: bytes) -> Artifact:
    """What `make` returns, or what it returned before for the same `parts` and the same sources of this library.

    Without a folder nothing is kept. Several processes may ask at once: the last one's stays.
    """
    if folder is None:
        return make()
    name = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in (_sources(), *parts))).hexdigest()[:32]
    place = folder / f"{name}.mhsa"
    if not (place / MANIFEST).is_file():
        folder.mkdir(parents=True, exist_ok=True)
        make().save(place, force=True)
    return Artifact.open(place)


@functools.cache
def _sources() -> bytes:
    """What makes an artifact here: this package, its targets and its records."""
    package = Path(mhsa_compile.__file__).parent
    files = sorted(
        [*package.rglob("*.py"), *data_paths.targets_folder().iterdir(), *data_paths.schedules_folder().iterdir()]
    )
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).digest()

"""The artifact: a folder that holds everything a compiled attention needs, each byte of it under a hash.

    manifest.json        what the rest is: inputs, outputs, meaning, target, kernels, versions, the sha256 of every file
    module.so            the compiled library
    weights.safetensors  in PyTorch's names and layouts; bound when the artifact is loaded
    model.onnx           the source

It is written beside its place and renamed into it. What the manifest does not list is never read, nor copied by `save`:
a note or a .DS_Store in the folder does no harm. The hashes find damage and mix-ups; they prove no origin.
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mhsa_compile.errors import ArtifactError, OutputError, did_you_mean
from mhsa_compile.files import places
from mhsa_compile.files.atomic_write import Unfinished, atomic_folder, unwritable
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.files.opened_once import HashedFile, OpenFolder
from mhsa_compile.runtime.artifact.manifest import MANIFEST, WEIGHTS, Check, Manifest, damage, read_manifest, seal
from mhsa_compile.runtime.artifact.tensor_file import read_tensors

_BLOCK = 2**20  # bytes copied at once
_ATTEMPTS = 100
"""Attempts to open an artifact that others replace: one fails if they do so within the microseconds that it takes."""


@dataclass(frozen=True, eq=False)
class Artifact:
    """An artifact on disk, found whole when it was opened.

    >>> import mhsa_compile as mhsa
    >>> artifact = mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=4), target="x86-64-v3")
    >>> _ = artifact.save("small.mhsa")
    >>> Artifact.open("small.mhsa").manifest.target.name
    'x86-64-v3'
    """

    path: Path
    manifest: Manifest = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Checks the format version, then every byte against its hash. Raises ArtifactError."""
        with open_artifact(path) as files:
            files.contents()
            return cls(files.path, files.manifest)

    def contents(self, *names: str) -> dict[str, bytes]:
        """The bytes of these files, as they were when the artifact was opened. Raises ArtifactError where they changed
        since, or another artifact was saved in its place."""
        with self._opened_again() as files:
            return files.contents(*names)

    def weights(self) -> dict[str, np.ndarray]:
        """The weights that it stores, by name. Raises ArtifactError, as `contents`."""
        with self._opened_again() as files:
            weights: dict[str, np.ndarray] = files.read({WEIGHTS: stored_weights})[WEIGHTS]
            return weights

    @contextmanager
    def _opened_again(self) -> Iterator[OpenArtifact]:
        with open_artifact(self.path) as files:
            if files.manifest.sha256 != self.manifest.sha256:
                expected, hint = "the one that was opened", "Open it again."
                raise ArtifactError(f"artifact {str(self.path)!r}", expected, "another, saved in its place", hint)
            yield files

    @classmethod
    def assemble(cls, folder: Path, manifest: Manifest, owner: Unfinished | None = None) -> Artifact:
        """Makes `folder`, which holds all files but the manifest, an artifact; `owner` removes it with the artifact.

        Raises OutputError.
        """
        try:
            names = sorted(entry.name for entry in folder.iterdir() if entry.name != MANIFEST)
            files = {name: _digest(folder / name) for name in names}
        except OSError as error:
            raise unwritable(folder, error) from error
        return cls._seal(folder.absolute(), manifest, files, owner)

    def with_check(self, check: Check, owner: Unfinished) -> Artifact:
        """The same files, and what came of their check; `owner` removes them with the artifact. Raises OutputError."""
        return self._seal(self.path, msgspec.structs.replace(self.manifest, check=check), self.manifest.files, owner)

    @classmethod
    def _seal(cls, folder: Path, manifest: Manifest, files: dict[str, str], owner: Unfinished | None) -> Artifact:
        try:
            sealed, raw = seal(manifest, files)
            (folder / MANIFEST).write_bytes(raw)
        except OSError as error:
            raise unwritable(folder, error) from error
        artifact = cls(folder, sealed)
        if owner is not None:
            weakref.finalize(artifact, owner.remove)
        return artifact

    def save(self, path: str | os.PathLike[str], force: bool = False) -> Artifact:
        """Copies the artifact to `path`, whole or not at all; `force` replaces the artifact that is there.

        Raises OutputError, and ArtifactError where its own files changed since it was opened; what was there stays.
        """
        folder = places.resolve(path, OutputError, "output folder")
        with atomic_folder(folder, force, MANIFEST) as staged:
            self.copy(staged)
        return Artifact(folder, self.manifest)

    def copy(self, folder: Path) -> None:
        """Copies its files to a folder that is there. Raises ArtifactError and OSError."""
        with self._opened_again() as files:
            files.copy(folder)


class OpenArtifact:
    """An artifact whose files are open, all at once: if its folder is replaced, these stay what they are."""

    def __init__(self, path: Path, raw: bytes, manifest: Manifest, files: dict[str, BufferedReader]) -> None:
        self.path, self._raw, self.manifest, self._files = path, raw, manifest, files

    def contents(self, *names: str) -> dict[str, bytes]:
        """The bytes of these files; see `read`."""
        return self.read(dict.fromkeys(names, HashedFile.read))

    def read(self, readers: Mapping[str, Callable[[HashedFile], Any]]) -> dict[str, Any]:
        """Checks every file against its hash, once, and returns what `readers` make of those that they name: of the
        very bytes that were checked, in this process's own memory, since a file, mapped or read again, can be changed
        by whoever may write it.

        Raises ArtifactError.
        """
        results = {}
        for name, digest in self.manifest.files.items():
            with _readable(self.path):
                source = HashedFile(self._files[name])
                try:
                    if name in readers:
                        results[name] = readers[name](source)
                finally:  # damage comes before what a reader says of damaged bytes
                    self._check(name, digest, source.digest())
        return results

    def copy(self, folder: Path, without: Collection[str] = ()) -> None:
        """Writes all of it, but for the files `without`, to a folder, and checks what was written. Raises ArtifactError
        and OSError."""
        import shutil

        for name, digest in self.manifest.files.items():
            if name in without:
                continue
            with (folder / name).open("xb") as target:
                shutil.copyfileobj(self._files[name], target, _BLOCK)
            self._check(name, digest, _digest(folder / name))
        (folder / MANIFEST).write_bytes(self._raw)

    def _check(self, name: str, digest: str, actual: str) -> None:
        if actual != digest:
            raise damage(f"artifact file {str(self.path / name)!r}", f"sha256 {digest}", actual)


def stored_weights(source: HashedFile, needs: Callable[[str], bool] = lambda name: True) -> dict[str, np.ndarray]:
    """What weights.safetensors holds, where `needs` says yes to a name. Raises ArtifactError."""
    expected = "tensors as safetensors writes them"
    with reading(ArtifactError, f"artifact file {WEIGHTS!r}", expected, "Compile it again."):
        return read_tensors(source, source.size, needs)


@contextmanager
def open_artifact(path: str | os.PathLike[str]) -> Iterator[OpenArtifact]:
    """Opens the files of an artifact, once more where `save(force=True)` replaced it meanwhile; see `contents`.

    Raises ArtifactError.
    """
    try:
        folder = Path(os.fsdecode(path)).absolute()
    except (TypeError, OSError) as error:  # no path, or a relative one where the working folder is gone
        got = f"{path!r}, from a working folder that is gone" if isinstance(error, OSError) else type(path).__name__
        raise ArtifactError(
            "artifact", "the path of a folder that `mhsa compile` wrote, or an Artifact", got
        ) from error
    if not places.is_folder(folder):
        got = "a file" if (is_file := places.is_there(folder)) else "nothing"
        others = (name for name in places.neighbours(folder) if name != folder.name)
        folders = [name for name in others if places.is_folder(folder.parent / name)]
        hint = _instead_of_file(folder) if is_file else did_you_mean(folder.name, folders, cutoff=0.8)
        raise ArtifactError("artifact", "a folder that `mhsa compile` wrote", f"{got} at {str(path)!r}", hint)
    with ExitStack() as stack:
        with _readable(folder):
            files = _open_whole(folder, stack)
        yield files


def _instead_of_file(path: Path) -> str:
    """The next step where a file stands for a folder."""
    if places.is_there(path.parent / MANIFEST):
        return f"Did you mean the folder that it lies in, {path.parent.name!r}?"
    if path.suffix in (".zip", ".tar", ".gz", ".tgz", ".whl"):
        return "Unpack it: an artifact's code is mapped from a folder."
    return "Compile it first: `mhsa compile` writes such a folder." if path.suffix in (".onnx", ".toml") else ""


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"artifact {str(folder)!r}", "files that can be read", str(error)) from error


def _open_whole(folder: Path, stack: ExitStack) -> OpenArtifact:
    for attempts in reversed(range(_ATTEMPTS)):
        with OpenFolder(folder) as here, ExitStack() as attempt:
            try:
                raw, manifest = _read_manifest(folder, here.open(MANIFEST))
                files = {name: attempt.enter_context(_open_file(folder, name, here)) for name in manifest.files}
            except ArtifactError:
                if attempts and here.was_replaced():
                    continue
                raise
            stack.push(attempt.pop_all())
            return OpenArtifact(folder, raw, manifest, files)
    raise AssertionError("the last attempt returns or raises")


def _read_manifest(folder: Path, file: BufferedReader | None) -> tuple[bytes, Manifest]:
    argument = f"artifact file {str(folder / MANIFEST)!r}"
    if file is None:
        raise ArtifactError(argument, "a manifest", "no such file", "Is this the folder that `mhsa compile` wrote?")
    with file:
        raw = file.read()
    return raw, read_manifest(raw, argument)


def _open_file(folder: Path, name: str, here: OpenFolder) -> BufferedReader:
    argument = f"artifact file {str(folder / name)!r}"
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise damage(argument, "a plain file name", repr(name))
    if (file := here.open(name)) is None:
        raise damage(argument, "a file, as the manifest lists it", "no such file")
    return file


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

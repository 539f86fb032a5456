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
import shutil
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from mhsa_compile.errors import ArtifactError
from mhsa_compile.opened import OpenFolder
from mhsa_compile.profile import TargetProfile
from mhsa_compile.refusals import reading
from mhsa_compile.semantics import Semantics
from mhsa_compile.spec import AttentionSpec
from mhsa_compile.spec_checks import LARGEST
from mhsa_compile.staging import Unfinished, replaced, unwritable

FORMAT_VERSION = 4
_READ = (3, FORMAT_VERSION)
"""Formats that are read. Of 3 `loadable` refuses some: threads disturbed each other in their code."""
MANIFEST, MODULE, WEIGHTS, MODEL = "manifest.json", "module.so", "weights.safetensors", "model.onnx"
_COPY_AGAIN = "The artifact is damaged: copy it again, or compile it again."
_UNSEALED = "0" * 64
_BLOCK = 2**20  # bytes copied at once
_ATTEMPTS = 100
"""To open an artifact that others replace: one fails if they do so within the microseconds that it takes."""

Size = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Dims = tuple[Size | str, ...]  # ints are fixed, names are symbols, "P + S" is what symbols make
DType = Literal[
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
]  # fmt: skip
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An input, an output or a weight.

    `broadcast`, on a mask, is the full size of each axis: a call may bring that or 1. ("B", 8, "L", "S"), for instance,
    beside the dims ("mask_B", "mask_H", "mask_L", "mask_S"). `pads` says that the last axis may also be shorter, which
    hides the rest. `most`, on numbers of keys, is the largest that they may be. `aligned` says that an input which a
    call writes into, and which is therefore never copied, must begin with a cache line.
    """

    name: str
    dtype: DType
    dims: Dims
    broadcast: Dims | None = None
    pads: bool = False
    most: Size | str | None = None
    aligned: bool = False

    def __post_init__(self) -> None:
        if self.broadcast is not None and len(self.broadcast) != len(self.dims):
            raise ValueError(f"{self.name!r} broadcasts to {len(self.broadcast)} axes, and has {len(self.dims)}")


class OpReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What computes one operation, and where its config comes from: `tuning` says which tuned record was used, or why
    none was."""

    name: str
    op: str
    kernel: str
    config: dict[str, int]
    source: Literal["default", "record", "fallback"]
    note: str = ""
    tuning: str = ""


class AttentionBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One attention of the source, named after its node (its Softmax, where it was several), and what became of it.

    `form` is "Attention", "decomposed", or an operator of Microsoft's. `note` is why it was not fused, or what its
    user should know.
    """

    name: str
    form: str
    fused: bool
    note: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What manifest.json holds, in its order."""

    format_version: int = FORMAT_VERSION
    mhsa_version: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    in_place: dict[str, str] = {}  # output -> the input that a call turns into it
    weights: tuple[TensorInfo, ...]
    int8_weights: bool = False  # whether linears round them to eight bits when they are bound
    semantics: tuple[Semantics, ...]  # of each attention, as resolved
    spec: AttentionSpec | None  # where one was compiled
    target: TargetProfile
    versions: dict[str, str]
    ops: tuple[OpReport, ...]
    attention: tuple[AttentionBlock, ...] = ()
    limits: dict[str, Size] = {}  # symbol -> its largest size, where a table of the model has no more rows
    files: dict[str, Digest]
    sha256: Digest = _UNSEALED  # of manifest.json itself, as it is with zeros in this place

    def __post_init__(self) -> None:
        inputs, outputs, weights = (
            [info.name for info in infos] for infos in (self.inputs, self.outputs, self.weights)
        )
        for names in (inputs, outputs, weights):
            if len(set(names)) < len(names):
                raise ValueError("two inputs, outputs or weights of one name")
        if not self.in_place.keys() <= set(outputs) or not set(self.in_place.values()) <= set(inputs):
            raise ValueError("in_place names what is no output, or no input")
        if any(isinstance(dim, str) for info in self.weights for dim in info.dims):
            raise ValueError("a weight whose size is not known")

    @property
    def has_fallbacks(self) -> bool:
        """Whether TVM's own code runs some of the operations."""
        return any(op.source == "fallback" for op in self.ops)


@dataclass(frozen=True, eq=False)
class Artifact:
    """An artifact on disk, found whole when it was opened."""

    path: Path
    manifest: Manifest = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Artifact:
        """Checks the format version, then every byte against its hash. Raises ArtifactError."""
        with opened(path) as files:
            files.contents()
            return cls(files.path, files.manifest)

    def contents(self, *names: str) -> dict[str, bytes]:
        """The bytes of these files, as they were when the artifact was opened. Raises ArtifactError where they changed
        since, or another artifact was saved in its place."""
        with self._opened_again() as files:
            return files.contents(*names)

    @contextmanager
    def _opened_again(self) -> Iterator[OpenArtifact]:
        with opened(self.path) as files:
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
            manifest = msgspec.structs.replace(manifest, files=files, sha256=_UNSEALED)
            raw = _encode(msgspec.structs.replace(manifest, sha256=hashlib.sha256(_encode(manifest)).hexdigest()))
            (folder / MANIFEST).write_bytes(raw)
        except OSError as error:
            raise unwritable(folder, error) from error
        artifact = cls(folder.absolute(), msgspec.json.decode(raw, type=Manifest))
        if owner is not None:
            weakref.finalize(artifact, owner.remove)
        return artifact

    def save(self, path: str | os.PathLike[str], force: bool = False) -> Artifact:
        """Copies the artifact to `path`, whole or not at all; `force` replaces the artifact that is there.

        Raises OutputError, and ArtifactError where its own files changed since it was opened; what was there stays.
        """
        folder = Path(path).resolve()
        with replaced(folder, force, MANIFEST) as staged, self._opened_again() as files:
            files.copy(staged)
        return Artifact(folder, self.manifest)


class OpenArtifact:
    """An artifact whose files are open, all at once: if its folder is replaced, these stay what they are."""

    def __init__(self, path: Path, raw: bytes, manifest: Manifest, files: dict[str, BufferedReader]) -> None:
        self.path, self._raw, self.manifest, self._files = path, raw, manifest, files

    def contents(self, *names: str) -> dict[str, bytes]:
        """Checks every file against its hash, once, and returns the bytes of these: the very bytes that were checked,
        in this process's own memory, since a file, mapped or read again, can be changed by whoever may write it.

        Raises ArtifactError.
        """
        held = {}
        for name, digest in self.manifest.files.items():
            with _readable(self.path):
                if name in names:
                    held[name] = self._files[name].read()
                    found = hashlib.sha256(held[name]).hexdigest()
                else:
                    found = hashlib.file_digest(self._files[name], "sha256").hexdigest()
            self._check(name, digest, found)
        return held

    def copy(self, folder: Path) -> None:
        """Writes all of it to a folder, and checks what was written. Raises ArtifactError and OSError."""
        for name, digest in self.manifest.files.items():
            with (folder / name).open("xb") as target:
                shutil.copyfileobj(self._files[name], target, _BLOCK)
            self._check(name, digest, _digest(folder / name))
        (folder / MANIFEST).write_bytes(self._raw)

    def _check(self, name: str, digest: str, found: str) -> None:
        if found != digest:
            raise _damaged(f"artifact file {str(self.path / name)!r}", f"sha256 {digest}", found)


@contextmanager
def opened(path: str | os.PathLike[str]) -> Iterator[OpenArtifact]:
    """Opens the files of an artifact, once more where `save(force=True)` replaced it meanwhile; see `contents`.

    Raises ArtifactError.
    """
    folder = Path(path).absolute()
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing"
        raise ArtifactError("artifact", "a folder that `mhsa compile` wrote", f"{got} at {str(path)!r}")
    with ExitStack() as stack:
        with _readable(folder):
            files = _open_whole(folder, stack)
        yield files


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"artifact {str(folder)!r}", "files that can be read", str(error)) from error


def _open_whole(folder: Path, stack: ExitStack) -> OpenArtifact:
    for left in reversed(range(_ATTEMPTS)):
        with OpenFolder(folder) as here, ExitStack() as attempt:
            try:
                raw, manifest = _read_manifest(folder, here.open(MANIFEST))
                files = {name: attempt.enter_context(_open_file(folder, name, here)) for name in manifest.files}
            except ArtifactError:
                if left and here.was_replaced():
                    continue
                raise
            stack.push(attempt.pop_all())
            return OpenArtifact(folder, raw, manifest, files)
    raise AssertionError("the last attempt returns or raises")


def _encode(manifest: Manifest) -> bytes:
    """The same bytes for the same content: fields in their order, keys of dicts sorted."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2) + b"\n"


def _read_manifest(folder: Path, file: BufferedReader | None) -> tuple[bytes, Manifest]:
    argument = f"artifact file {str(folder / MANIFEST)!r}"
    if file is None:
        raise ArtifactError(argument, "a manifest", "no such file", "Is this the folder that `mhsa compile` wrote?")
    with file:
        raw = file.read()
    with reading(ArtifactError, argument, f"a manifest of format version {FORMAT_VERSION}", _COPY_AGAIN):
        found = msgspec.json.decode(raw, type=_Versioned).format_version
        if found not in _READ:
            raise _other_version(argument, found)
        manifest = msgspec.json.decode(raw, type=Manifest)
    digest = hashlib.sha256(raw.replace(manifest.sha256.encode(), _UNSEALED.encode())).hexdigest()
    if digest != manifest.sha256:
        raise _damaged(argument, f"sha256 {manifest.sha256}", digest)
    if unlisted := {MODULE, WEIGHTS, MODEL} - manifest.files.keys():
        raise _damaged(argument, "a hash of each file", f"none of {', '.join(sorted(unlisted))}")
    return raw, manifest


class _Versioned(msgspec.Struct):
    """The one field that every format has; a newer one may differ in all others."""

    format_version: int


def _other_version(argument: str, found: int) -> ArtifactError:
    next_step = "Update mhsa-compile." if found > FORMAT_VERSION else "Compile it again."
    return ArtifactError(argument, f"format version {FORMAT_VERSION}", f"format version {found}", next_step)


def _open_file(folder: Path, name: str, here: OpenFolder) -> BufferedReader:
    argument = f"artifact file {str(folder / name)!r}"
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise _damaged(argument, "a plain file name", repr(name))
    if (file := here.open(name)) is None:
        raise _damaged(argument, "a file, as the manifest lists it", "no such file")
    return file


def _damaged(argument: str, expected: str, got: str) -> ArtifactError:
    return ArtifactError(argument, expected, got, _COPY_AGAIN)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

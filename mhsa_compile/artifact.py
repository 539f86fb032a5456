"""The artifact: a folder that holds everything a compiled attention needs, each byte of it under a hash.

    manifest.json        what the rest is: inputs, outputs, meaning, target, kernels, versions, the sha256 of every file
    module.so            the compiled library
    weights.safetensors  in PyTorch's names and layouts; bound when the artifact is loaded
    model.onnx           the source

It is written beside its place and renamed into it. What the manifest does not list is never read, nor copied by `save`:
a note or a .DS_Store in the folder does no harm. The hashes find damage and mix-ups; they prove no origin.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from mhsa_compile import host
from mhsa_compile.errors import ArtifactError, MhsaError, OutputError

FORMAT_VERSION = 3
MANIFEST, MODULE, WEIGHTS, MODEL = "manifest.json", "module.so", "weights.safetensors", "model.onnx"
_UNSEALED = "0" * 64
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of <fcntl.h> and <linux/fs.h>

Dims = tuple[int | str, ...]  # ints are fixed, names are symbols, "P + S" is what symbols make
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]


class TensorInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An input, an output or a weight.

    `broadcast`, on a mask, is the full size of each axis: a call may bring that or 1. ("B", 8, "L", "S"), for instance,
    beside the dims ("mask_B", "mask_H", "mask_L", "mask_S"). `pads` says that the last axis may also be shorter, which
    hides the rest. `most`, on numbers of keys, is the largest that they may be. `aligned` says that an input which a
    call writes into, and which is therefore never copied, must begin with a cache line.
    """

    name: str
    dtype: str
    dims: Dims
    broadcast: Dims | None = None
    pads: bool = False
    most: int | str | None = None
    aligned: bool = False


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
    semantics: tuple[dict[str, Any], ...]  # of each attention, as resolved
    spec: dict[str, Any] | None  # an AttentionSpec's fields, where one was compiled
    target: dict[str, Any]  # a TargetProfile's fields
    versions: dict[str, str]
    ops: tuple[OpReport, ...]
    attention: tuple[AttentionBlock, ...] = ()
    limits: dict[str, int] = {}  # symbol -> its largest size, where a table of the model has no more rows
    files: dict[str, Digest]
    sha256: Digest = _UNSEALED  # of manifest.json itself, as it is with zeros in this place

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
        folder = Path(path).absolute()
        if not folder.is_dir():
            got = "a file" if folder.exists() else "nothing"
            raise ArtifactError("artifact", "a folder that `mhsa compile` wrote", f"{got} at {str(path)!r}")
        try:
            manifest = _read_manifest(folder)
            for name, digest in manifest.files.items():
                _check_file(folder, name, digest)
        except OSError as error:
            raise ArtifactError(f"artifact {str(path)!r}", "files that can be read", str(error)) from error
        return cls(folder, manifest)

    @classmethod
    def assemble(
        cls, folder: Path, manifest: Manifest, owner: tempfile.TemporaryDirectory[str] | None = None
    ) -> Artifact:
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
            raise _unwritable(folder, error) from error
        artifact = cls(folder.absolute(), msgspec.json.decode(raw, type=Manifest))
        if owner is not None:
            weakref.finalize(artifact, owner.cleanup)  # its own finalizer would warn
        return artifact

    def save(self, path: str | os.PathLike[str], force: bool = False) -> Artifact:
        """Copies the artifact to `path`, whole or not at all; `force` replaces the artifact that is there.

        Raises OutputError, and leaves what was there, where it cannot.
        """
        folder = Path(path).resolve()
        with replaced(folder, force) as staged:
            for name in (*self.manifest.files, MANIFEST):
                shutil.copyfile(self.path / name, staged / name)
        return Artifact(folder, self.manifest)


def check_cpu(manifest: Manifest) -> None:
    """Raises ArtifactError unless this machine has the architecture and the features that the code was made for."""
    target = manifest.target
    if target["family"] != "cpu":
        raise ArtifactError("artifact", "one compiled for a CPU", f"one for {target['family']}")
    architecture = target["tvm"]["mtriple"].partition("-")[0]
    if architecture != host.architecture():
        raise ArtifactError("artifact", f"a CPU of {architecture}, as it was compiled for one", host.architecture())
    needed = set(target["hardware"]["features"])
    if missing := needed - host.cpu_features():
        raise ArtifactError(
            "artifact",
            f"a CPU with {' '.join(sorted(needed))}, as it was compiled for one",
            f"{host.cpu_model()} without {' '.join(sorted(missing))}",
            "Compile it for this machine: --target native here, or elsewhere another of `mhsa targets`.",
        )


def _encode(manifest: Manifest) -> bytes:
    """The same bytes for the same content: fields in their order, keys of dicts sorted."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2) + b"\n"


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    argument = f"artifact file {str(path)!r}"
    if not path.is_file():
        raise ArtifactError(argument, "a manifest", "no such file", "Is this the folder that `mhsa compile` wrote?")
    raw = path.read_bytes()
    try:
        found = msgspec.json.decode(raw, type=_Versioned).format_version
        if found != FORMAT_VERSION:
            raise _other_version(argument, found)
        manifest = msgspec.json.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(argument, f"a manifest of format version {FORMAT_VERSION}", str(error)) from error
    digest = hashlib.sha256(raw.replace(manifest.sha256.encode(), _UNSEALED.encode())).hexdigest()
    if digest != manifest.sha256:
        raise _damaged(argument, f"sha256 {manifest.sha256}", digest)
    if unlisted := {MODULE, WEIGHTS, MODEL} - manifest.files.keys():
        raise _damaged(argument, "a hash of each file", f"none of {', '.join(sorted(unlisted))}")
    return manifest


class _Versioned(msgspec.Struct):
    """The one field that every format has; a newer one may differ in all others."""

    format_version: int


def _other_version(argument: str, found: int) -> ArtifactError:
    next_step = "Update mhsa-compile." if found > FORMAT_VERSION else "Compile it again."
    return ArtifactError(argument, f"format version {FORMAT_VERSION}", f"format version {found}", next_step)


def _check_file(folder: Path, name: str, digest: str) -> None:
    argument = f"artifact file {str(folder / name)!r}"
    if name != os.path.basename(name) or name in ("", ".", ".."):
        raise _damaged(argument, "a plain file name", repr(name))
    if not (folder / name).is_file():
        raise _damaged(argument, "a file, as the manifest lists it", "no such file")
    if (found := _digest(folder / name)) != digest:
        raise _damaged(argument, f"sha256 {digest}", found)


def _damaged(argument: str, expected: str, got: str) -> ArtifactError:
    return ArtifactError(argument, expected, got, "The artifact is damaged: copy it again, or compile it again.")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replaced(folder: Path, force: bool, mark: str = MANIFEST) -> Iterator[Path]:
    """An empty folder that becomes `folder` when the block ends well; arguments and errors as `check_place`."""
    check_place(folder, force, mark)
    staged = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        staged.mkdir()
        yield staged
        _move(staged, folder)
    except MhsaError:
        raise
    except OSError as error:
        raise _unwritable(folder, error) from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def check_place(folder: Path, force: bool, mark: str = MANIFEST) -> None:
    """Whether an artifact may be saved as `folder`, before it is made. Raises OutputError.

    With `force` it may replace another: a folder that has the file `mark`, which an artifact or a bundle has.
    """
    if not folder.parent.is_dir():
        raise OutputError(
            "output folder", "a place in a folder that exists", str(folder), f"Create {folder.parent} first."
        )
    if not folder.exists():
        return
    if not force:
        next_step = "Choose another, or replace it: --force, or force=True."
        raise OutputError("output folder", "one that does not exist yet", str(folder), next_step)
    # What is replaced is deleted: nobody's project, only an artifact, whole or damaged, or an empty folder.
    if not folder.is_dir() or not ((folder / mark).is_file() or not any(folder.iterdir())):
        what = "an artifact" if mark == MANIFEST else "a bundle"
        raise OutputError("output folder", f"{what} to replace", f"{str(folder)!r}, which holds something else")


def _move(staged: Path, folder: Path) -> None:
    """Into place in one step; what was there is then at `staged`, or gone."""
    if not folder.exists():
        staged.rename(folder)
    elif not _exchange(staged, folder):
        aside = staged.with_name(f"{staged.name}.old")
        folder.rename(aside)
        try:
            staged.rename(folder)
        except OSError:
            aside.rename(folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two folders so that neither name is ever vacant; False where the C library or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    paths = (_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other))
    return renameat2 is not None and renameat2(*paths, _RENAME_EXCHANGE) == 0


def _unwritable(folder: Path, error: OSError) -> OutputError:
    place, reason = f"output folder {str(folder)!r}", error.strerror or str(error)
    return OutputError(place, "room for it, and permission", reason, "Nothing was written.")

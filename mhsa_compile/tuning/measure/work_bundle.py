"""Work for a device without a network: a zip that goes there; `results` is what comes back.

    with bundles.create("work.zip", order) as add:        # what is whole appears at once, or not at all
        add(task)

    manifest.json                 the order, what the tasks are made of, the sha256 of every file
    jobs/0.safetensors            arrays of the first task's job
    candidates/0-2.so             its third candidate, and what that takes beside packed weights: 0-2.safetensors

The hashes find damage and mix-ups; they prove no origin, and a bundle is code that the device runs. No pickle.
"""

from __future__ import annotations

import hashlib
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import ml_dtypes
import msgspec
import numpy as np
from safetensors.numpy import save

from mhsa_compile.errors import BundleError
from mhsa_compile.files import input_files as files
from mhsa_compile.files.atomic_write import atomic_file
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.files.input_files import require_unique_keys
from mhsa_compile.hardware.profile import Count
from mhsa_compile.records.record import Isa
from mhsa_compile.runtime.artifact.manifest import Digest, TensorDType
from mhsa_compile.runtime.artifact.tensor_file import read_tensors
from mhsa_compile.tuning.measure.job import Candidate, MeasureJob

FORMAT = 1
MANIFEST = "manifest.json"
_BFLOAT16 = ".bfloat16"  # ends the names of arrays that safetensors' NumPy side would not give back: they are uint16
_FOLDED = 100
"""Times that a bundle may unfold to its own size: code and numbers shrink to a third or so, only bombs to less."""
_MOST_ELEMENTS = 2**40
"""Of an array: more fit into no machine, and no address."""
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same bytes for the same work

FileName = Annotated[str, msgspec.Meta(pattern=r"^(jobs/[0-9]+|candidates/[0-9]+-[0-9]+)\.(safetensors|so)$")]
ArraySize = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
ArrayShape = tuple[ArraySize, ...]
Dtype = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(get_args(TensorDType))})\\Z")]
Amount = Annotated[float, msgspec.Meta(ge=0)]
Stated = TypeVar("Stated", bound=msgspec.Struct)


class WorkOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a bundle asks the device for.

    study    the sender's word for what this belongs to; comes back
    target   the target's name, for people
    isa      what the code was generated for
    threads  of a call
    seconds  of timing for each candidate
    """

    study: str
    target: str
    isa: Isa
    threads: Count
    seconds: Annotated[float, msgspec.Meta(gt=0, le=1e6)]


@dataclass(frozen=True)
class BundleTask:
    """A job and the candidates for it, the incumbent first, each of which is timed beside it.

    `label` and `labels`, of the task and of each candidate, are the sender's own words, and come back.
    """

    label: str
    job: MeasureJob
    candidates: tuple[Candidate, ...]
    labels: tuple[str, ...]


class _CandidateEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    label: str
    packed: tuple[tuple[ArrayShape, Dtype], ...]
    constants: ArraySize
    workspace: ArrayShape = ()

    def __post_init__(self) -> None:
        _check_sizes(*(shape for shape, _ in self.packed), self.workspace)


class _TaskEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    label: str
    inputs: ArraySize
    weights: ArraySize
    output: tuple[ArrayShape, Dtype]
    budget: Amount
    flops: Annotated[int, msgspec.Meta(ge=0)]
    sets: Count
    candidates: Annotated[tuple[_CandidateEntry, ...], msgspec.Meta(min_length=1)]

    def __post_init__(self) -> None:
        _check_sizes(self.output[0])


class _Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int = FORMAT
    order: WorkOrder
    tasks: tuple[_TaskEntry, ...]
    files: dict[FileName, Digest]


def _check_sizes(*shapes: ArrayShape) -> None:
    if any(math.prod(shape) > _MOST_ELEMENTS for shape in shapes):
        raise ValueError(f"an array of more than {_MOST_ELEMENTS:,} elements")


class _BundleVersion(msgspec.Struct):
    format: int


@contextmanager
def create(path: str | os.PathLike[str], order: WorkOrder) -> Iterator[Callable[[BundleTask], None]]:
    """A function that adds a task; the bundle is in its place when the block ends well. Raises OutputError."""
    tasks: list[_TaskEntry] = []
    digests: dict[str, str] = {}
    with (
        atomic_file(Path(path), repr(str(path))) as file,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as bundle,
    ):

        def put(name: str, data: bytes) -> None:
            digests[name] = hashlib.sha256(data).hexdigest()
            bundle.writestr(zipfile.ZipInfo(name, _EPOCH), data, zipfile.ZIP_DEFLATED)

        def add(task: BundleTask) -> None:
            number = len(tasks)
            put(_job_file(number), _packed(_arrays_of(task.job)))
            for which, candidate in enumerate(task.candidates):
                put(_library(number, which), candidate.library)
                if candidate.constants:
                    put(_constants(number, which), _packed(_by_number("", candidate.constants)))
            tasks.append(_entry(task))

        yield add
        manifest = _Manifest(order=order, tasks=tuple(tasks), files=digests)
        bundle.writestr(zipfile.ZipInfo(MANIFEST, _EPOCH), encoded(manifest), zipfile.ZIP_DEFLATED)


@dataclass(frozen=True)
class WorkBundle:
    """An open bundle, every byte of which was found whole."""

    order: WorkOrder
    tasks: tuple[_TaskEntry, ...]
    digest: str
    _bundle: zipfile.ZipFile

    @classmethod
    @contextmanager
    def opened(cls, path: Path) -> Iterator[WorkBundle]:
        """Opens a bundle, and checks every byte of it. Raises BundleError."""
        what = f"bundle {str(path)!r}"
        with ExitStack() as stack:
            file = stack.enter_context(files.open_file(path, BundleError, what, "a file that can be read"))
            with reading(BundleError, what, "a zip of `mhsa tune --on bundle`", COPY_AGAIN):
                work = cls._check(what, stack.enter_context(zipfile.ZipFile(file)), os.fstat(file.fileno()).st_size)
            yield work

    @classmethod
    def _check(cls, what: str, bundle: zipfile.ZipFile, size: int) -> WorkBundle:
        # A reader unfolds no more than an entry states, so what all of them state bounds what a bundle can ask for.
        if (total := sum(entry.file_size for entry in bundle.infolist())) > _FOLDED * size:
            raise BundleError(what, f"at most {_FOLDED} times the {size:,} bytes of the file in it", f"{total:,}")
        raw = bundle.read(MANIFEST)
        manifest = decoded(what, raw, _Manifest)
        if odd := {MANIFEST, *manifest.files} ^ set(bundle.namelist()):
            raise BundleError(what, "the files of its manifest", f"a difference: {', '.join(sorted(odd))}", COPY_AGAIN)
        for name, digest in manifest.files.items():
            if (actual := hashlib.sha256(bundle.read(name)).hexdigest()) != digest:
                raise BundleError(f"{what}, {name}", f"sha256 {digest}", actual, COPY_AGAIN)
        return cls(manifest.order, manifest.tasks, hashlib.sha256(raw).hexdigest(), bundle)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(task, candidate) of each measurement: every candidate beside its incumbent, or an incumbent by itself."""
        return [
            (n, i) for n, task in enumerate(self.tasks) for i in range(len(task.candidates) > 1, len(task.candidates))
        ]

    def job(self, number: int) -> MeasureJob:
        entry = self.tasks[number]
        arrays = self._arrays(_job_file(number))
        return MeasureJob(
            inputs=_in_order(arrays, "input", entry.inputs),
            weights=_in_order(arrays, "weight", entry.weights),
            output=entry.output,
            checked=_one(arrays, "checked"),
            expected=_one(arrays, "expected"),
            budget=entry.budget,
            flops=entry.flops,
            sets=entry.sets,
        )

    def candidate(self, number: int, which: int) -> Candidate:
        entry = self.tasks[number].candidates[which]
        arrays = self._arrays(_constants(number, which)) if entry.constants else {}
        library = self._bundle.read(_library(number, which))
        memory = "cuda" if self.order.isa.gpu else "cpu"
        constants = _in_order(arrays, "", entry.constants)
        return Candidate(library, entry.packed, constants, entry.workspace, memory)

    def _arrays(self, name: str) -> dict[str, np.ndarray]:
        with reading(BundleError, f"bundle, {name}", "safetensors", COPY_AGAIN):
            raw = self._bundle.read(name)
            return {
                key.removesuffix(_BFLOAT16): array.view(ml_dtypes.bfloat16) if key.endswith(_BFLOAT16) else array
                for key, array in read_tensors(BytesIO(raw), len(raw)).items()
            }


COPY_AGAIN = "Copy it again, or make it again."


def _job_file(number: int) -> str:
    return f"jobs/{number}.safetensors"


def _library(number: int, which: int) -> str:
    return f"candidates/{number}-{which}.so"


def _constants(number: int, which: int) -> str:
    return f"candidates/{number}-{which}.safetensors"


def _entry(task: BundleTask) -> _TaskEntry:
    return _TaskEntry(
        label=task.label,
        inputs=len(task.job.inputs),
        weights=len(task.job.weights),
        output=task.job.output,
        budget=task.job.budget,
        flops=task.job.flops,
        sets=task.job.sets,
        candidates=tuple(
            _CandidateEntry(label, candidate.packed, len(candidate.constants), candidate.workspace)
            for label, candidate in zip(task.labels, task.candidates, strict=True)
        ),
    )


def _arrays_of(job: MeasureJob) -> dict[str, np.ndarray]:
    results = {"checked": job.checked, "expected": job.expected}
    return {**_by_number("input", job.inputs), **_by_number("weight", job.weights), **results}


def _by_number(name: str, arrays: tuple[np.ndarray, ...]) -> dict[str, np.ndarray]:
    return {f"{name}{i}": array for i, array in enumerate(arrays)}


def _in_order(arrays: Mapping[str, np.ndarray], name: str, count: int) -> tuple[np.ndarray, ...]:
    return tuple(_one(arrays, f"{name}{i}") for i in range(count))


def _one(arrays: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in arrays:
        raise BundleError("bundle", f"an array {name!r}, as its manifest counts them", "none", COPY_AGAIN)
    return arrays[name]


def _packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    plain = {}
    for name, array in arrays.items():
        is_bfloat16 = array.dtype == ml_dtypes.bfloat16
        plain[f"{name}{_BFLOAT16}" if is_bfloat16 else name] = np.ascontiguousarray(
            array.view(np.uint16) if is_bfloat16 else array
        ).reshape(array.shape)
    return bytes(save(plain))


def encoded(value: Any) -> bytes:
    """A value as JSON, the same bytes for the same content."""
    return msgspec.json.encode(value, order="deterministic")


def decoded(what: str, raw: bytes, kind: type[Stated]) -> Stated:
    """Reads JSON back as a value of `kind`. Raises BundleError for what is damaged, newer, or something else."""
    with reading(BundleError, what, f"what format {FORMAT} states", COPY_AGAIN):
        version = msgspec.json.decode(raw, type=_BundleVersion).format
        if version != FORMAT:
            hint = "Update mhsa-compile, here or there."
            raise BundleError(what, f"format {FORMAT}", f"format {version}", hint)
        require_unique_keys(raw)
        return msgspec.json.decode(raw, type=kind)

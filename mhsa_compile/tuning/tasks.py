"""What is asked of tuning and what comes of it, however it is measured: operations in, records and a report out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from mhsa_compile import kernels
from mhsa_compile.compiler.selection.op_key import key_of, measured_at
from mhsa_compile.errors import InputError
from mhsa_compile.hardware import environment
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.interface.ops import Op
from mhsa_compile.records import record_files
from mhsa_compile.records.device import Device
from mhsa_compile.records.record import Record, for_record, isa_of
from mhsa_compile.tuning.search.sampler import TrialResult
from mhsa_compile.tuning.search.search import SearchResult
from mhsa_compile.tuning.search.space import Point, Space
from mhsa_compile.tuning.search.study import Study, StudyIdentity, digest


@dataclass(frozen=True)
class Request:
    """What to tune for, and within which limits.

    sizes       of the symbols that stay open: at these lengths they are measured
    records     the file that the records go to
    storage     an URL as Optuna takes it
    known       records at hand, for first guesses
    study       a name for the studies, instead of one that follows from what is tuned
    seconds     for all operations; None is no limit
    trials      of each operation, those of earlier runs among them; None is no limit
    exhaustive  after the search everything that is left is measured too, and the report says how near the search came
    """

    sizes: Mapping[str, int]
    records: Path
    storage: str
    known: tuple[Record, ...] = ()
    study: str | None = None
    seconds: float | None = 60.0
    trials: int | None = None
    seed: int = 0
    exhaustive: bool = False


@dataclass(frozen=True)
class TuningTask:
    """An operation, under all the names by which the source calls it."""

    names: tuple[str, ...]
    op: Op
    key: dict[str, Any]
    sizes: dict[str, int]

    @property
    def kind(self) -> str:
        return self.op.kind


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What the search of an operation came to.

    names       of the source's operations that are this one
    speedup     time of the default by that of the best, in the same rounds; 1 where the default is the best
    noise       the least difference that means something, as a share
    stopped     why the search ended, or why there was none
    space       how many configs there are
    history     the score of each trial in the order of their draws, None for one that failed
    found_us    with a sweep: what the search alone had found, measured beside the best
    """

    names: tuple[str, ...]
    op: str
    sizes: dict[str, int]
    kernel: str
    config: dict[str, int]
    default_us: float
    best_us: float
    speedup: float
    noise: float
    failures: dict[str, int]
    stopped: str
    space: int
    study: str
    history: tuple[float | None, ...] = ()
    error_share: float | None = None
    found_us: float | None = None

    @property
    def trials(self) -> int:
        """The number of trials that are done, failures among them."""
        return len(self.history)


@dataclass(frozen=True)
class TuningReport:
    """What tuning came to, operation by operation. `default_us` and `best_us` are the sums over the operations of a
    call that were measured."""

    ops: tuple[TaskResult, ...]
    seconds: float

    @property
    def trials(self) -> int:
        return sum(op.trials for op in self.ops)

    @property
    def failures(self) -> int:
        return sum(sum(op.failures.values()) for op in self.ops)

    @property
    def default_us(self) -> float:
        return sum(len(op.names) * op.default_us for op in self.ops if op.history)

    @property
    def best_us(self) -> float:
        return sum(len(op.names) * op.best_us for op in self.ops if op.history)


def tasks_of(ops: Mapping[str, Op], sizes: Mapping[str, int]) -> list[TuningTask]:
    """The operations that have something to tune, equal ones as one. Raises InputError for a symbol without a size."""
    tasks: dict[str, TuningTask] = {}
    for name, op in ops.items():
        key = key_of(op)
        if key is not None:
            try:
                point_sizes = measured_at(op, sizes)
            except KeyError as missing:
                raise InputError("dims", f"a size for {missing}", "none", "State it: --dim NAME=N.") from None
            place = digest([op.kind, key, point_sizes])
            names = (*(tasks[place].names if place in tasks else ()), name)
            tasks[place] = TuningTask(names, op, key, point_sizes)
    return list(tasks.values())


def source_digest(tasks: list[TuningTask]) -> str:
    """The digest of everything that a source wants tuned, and at which sizes."""
    return digest([[task.kind, task.key, task.sizes] for task in tasks])


def study_of(
    task: TuningTask,
    profile: TargetProfile,
    storage: Any,
    request: Request,
    source: str,
    *,
    threads: int,
    device: Device | None,
) -> Study:
    """The study of an operation. `source` is the digest of all that is tuned with it, `device` None for one that nobody
    knows yet."""
    about = {
        "op": task.kind,
        "key": task.key,
        "sizes": task.sizes,
        "isa": msgspec.to_builtins(isa_of(profile)),
        "threads": threads,
        "device": msgspec.to_builtins(device),
        "kernels": _kernels(),
    }
    name = f"{request.study}.{task.names[0]}" if request.study else None
    return Study(storage, StudyIdentity(name, about, source), Space.of(task.op, profile), seed=request.seed)


@cache
def _kernels() -> str:
    """The digest of the kernels' sources, and TVM's version: with others, what was measured says nothing any more."""
    sources = sorted(Path(str(kernels.__file__)).parent.rglob("*.py"))
    whole = sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
    return f"{whole[:16]}, tvm {environment.installed_version('apache-tvm')}"


@dataclass(frozen=True)
class MeasuredOn:
    """What something was measured on, as its record says."""

    profile: TargetProfile
    threads: int
    device: Device
    versions: dict[str, str] = field(default_factory=environment.versions)


def make_record(result: TrialResult, on: MeasuredOn, **fields: Any) -> Record:
    """The record of what was found, as of now; `fields` are those that say what of, and what computes it."""
    return Record(
        median_us=result.us,
        spread=result.spread,
        default_us=result.default_us,
        error_share=result.error_share,
        threads=on.threads,
        isa=isa_of(on.profile),
        device=for_record(on.device, on.profile),
        versions=on.versions,
        date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        **fields,
    )


def keep(task: TuningTask, study: Study, result: SearchResult, on: MeasuredOn, request: Request) -> TaskResult:
    """Writes the record of an operation that a kernel of ours computes. Raises RecordsError."""
    best, point = result.best, result.point
    record = make_record(
        best, on, op=task.kind, key=task.key, sizes=task.sizes, kernel=point.kernel, config=point.config
    )
    record_files.append(request.records, record)
    return _task_result(
        task,
        study,
        point,
        default_us=best.default_us,
        best_us=best.default_us * best.score,
        speedup=1 / best.score,
        noise=result.noise,
        failures=result.failures,
        stopped=result.stopped,
        history=tuple(t.result.score if isinstance(t.result, TrialResult) else None for t in result.trials),
        error_share=best.error_share,
        found_us=None if result.swept is None else best.default_us * result.swept.score,
    )


def not_measured(task: TuningTask, study: Study, why: str) -> TaskResult:
    """The default config, with nothing measured that could be compared with it."""
    nothing: dict[str, Any] = {"default_us": 0.0, "best_us": 0.0, "speedup": 1.0, "noise": 0.0, "failures": {}}
    return _task_result(task, study, study.space.default, stopped=why, **nothing)


def _task_result(task: TuningTask, study: Study, point: Point, **fields: Any) -> TaskResult:
    return TaskResult(
        names=task.names,
        op=task.kind,
        sizes=task.sizes,
        kernel=point.kernel,
        config=point.config,
        space=len(study.space.points),
        study=study.name,
        **fields,
    )

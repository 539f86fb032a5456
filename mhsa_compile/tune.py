"""Tuning all operations of a source: each has its share of the time, its search, and at the end its record.

    report = tune(pipeline.operations(spec, dims=dims), profile, session, Request(sizes, records, storage, seconds=60))

An operation's share is in proportion to its default time. They go from the cheapest to the dearest, so that what one
does not need is left to those that matter more. A record is written as soon as its operation is confirmed, and what
was measured is in the storage at once: killed at any time and started again, it goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import prod
from pathlib import Path
from time import monotonic
from typing import Any

import msgspec

from mhsa_compile import __version__, exercises, installation, record_files, sessions
from mhsa_compile.guesses import first_guesses
from mhsa_compile.jobs import Candidate
from mhsa_compile.kernels.operations import LinearOp, Op
from mhsa_compile.op_keys import key_of, kind_of, sized
from mhsa_compile.profile import TargetProfile
from mhsa_compile.records import Record, isa_of
from mhsa_compile.sampler import Found
from mhsa_compile.search import FINALISTS, LAST, Progress, Result, Search, Unmeasurable
from mhsa_compile.sessions import Session
from mhsa_compile.spaces import Point, Space
from mhsa_compile.studies import Identity, Study, digest
from mhsa_compile.study_storage import open_storage

LEAST_SHARE = 0.1
"""Of the dearest operation's time that each has at least: some trials for all."""
BUILDING = 0.25
"""Seconds that building a candidate takes, roughly."""

BuildPoint = Callable[[Space, Point], Candidate]


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
class Tuned:
    """What the search of an operation came to.

    names       of the source's operations that are this one
    speedup     time of the default by that of the best, in the same rounds; 1 where the default is the best
    found_us    with a sweep: what the search alone had found, measured beside the best
    history     the score of each trial in the order of their draws, None for one that failed
    stopped     why the search ended, or why there was none
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
        """That are done, failures among them."""
        return len(self.history)


@dataclass(frozen=True)
class Report:
    """`default_us` and `best_us` are the sums over the operations of a call."""

    ops: tuple[Tuned, ...]
    seconds: float

    @property
    def trials(self) -> int:
        return sum(op.trials for op in self.ops)

    @property
    def failures(self) -> int:
        return sum(sum(op.failures.values()) for op in self.ops)

    @property
    def default_us(self) -> float:
        return sum(len(op.names) * op.default_us for op in self.ops)

    @property
    def best_us(self) -> float:
        return sum(len(op.names) * op.best_us for op in self.ops)


@dataclass
class State:
    """An operation while it is tuned, for who watches. `phase` is "waiting", "searching", "sweeping", "confirming" or
    "done"."""

    subject: Subject
    phase: str = "waiting"
    progress: Progress | None = None
    tuned: Tuned | None = None


Watch = Callable[[list[State], float | None], None]
"""Is told the operations and the seconds that are left."""


@dataclass(frozen=True)
class Subject:
    """An operation, under all the names by which the source calls it."""

    names: tuple[str, ...]
    op: Op
    key: dict[str, Any]
    sizes: dict[str, int]

    @property
    def kind(self) -> str:
        return kind_of(self.op)


def subjects_of(ops: Mapping[str, Op], sizes: Mapping[str, int]) -> list[Subject]:
    """The operations that have something to tune, equal ones as one."""
    found: dict[str, Subject] = {}
    for name, op in ops.items():
        key = key_of(op)
        if key is not None:
            measured = _sizes(op, sizes)
            place = digest([kind_of(op), key, measured])
            names = (*(found[place].names if place in found else ()), name)
            found[place] = Subject(names, op, key, measured)
    return list(found.values())


def _sizes(op: Any, sizes: Mapping[str, int]) -> dict[str, int]:
    if isinstance(op, LinearOp):
        return {"rows": prod(sized(dim, sizes) for dim in op.rows)}
    dims = {"B": op.batch, "L": op.q_length, "S": op.kv_length}
    return {name: sized(dim, sizes) for name, dim in dims.items()}


def tune(
    ops: Mapping[str, Op],
    profile: TargetProfile,
    session: Session,
    request: Request,
    *,
    watch: Watch = lambda states, left: None,
    build: BuildPoint | None = None,
) -> Report:
    """Raises InputError, OutputError, RecordsError and InstallationError, and DeviceError for a device that is of
    another architecture, or stays away."""
    sessions.require(session.device, isa_of(profile))
    return _Tuning(profile, session, request, watch, build or _built).run(subjects_of(ops, request.sizes))


def _built(space: Space, point: Point) -> Candidate:
    return exercises.candidate_of(space.op, space.kernels[point.kernel], point.config, space.profile)


@dataclass
class _Tuning:
    profile: TargetProfile
    session: Session
    request: Request
    watch: Watch
    build: BuildPoint
    states: list[State] = field(default_factory=list)
    started: float = field(default_factory=monotonic)
    versions: dict[str, str] = field(default_factory=installation.versions)

    def run(self, subjects: list[Subject]) -> Report:
        storage = open_storage(self.request.storage)
        self.source = digest([[s.kind, s.key, s.sizes] for s in subjects])
        self.states = [State(subject) for subject in subjects]
        searches: list[tuple[State, Search]] = []
        for state in self.states:
            self._say()
            search = self._prepared(storage, state)
            try:
                search.begin()
            except Unmeasurable as error:
                self._done(state, search, _untuned(state.subject, search, str(error)))
            else:
                searches.append((state, search))
        searches.sort(key=lambda pair: _weight(*pair))
        for place, (state, search) in enumerate(searches):
            with search.study:
                self._tune(state, search, self._end(searches[place:]))
        return Report(tuple(s.tuned for s in self.states if s.tuned is not None), monotonic() - self.started)

    def _prepared(self, storage: Any, state: State) -> Search:
        subject = state.subject
        space = Space.of(subject.op, self.profile)
        study = Study(storage, self._identity(subject), space, seed=self.request.seed)

        def tell(progress: Progress) -> None:
            state.progress = progress
            self._say()

        job = exercises.job_of(subject.op, self.request.sizes, self.request.seed)
        return Search(space, job, study, self.session, lambda point: self.build(space, point), tell)

    def _identity(self, subject: Subject) -> Identity:
        name = self.request.study and f"{self.request.study}.{subject.names[0]}"
        about = {
            "op": subject.kind,
            "key": subject.key,
            "sizes": subject.sizes,
            "isa": msgspec.to_builtins(isa_of(self.profile)),
            "threads": self.session.threads,
            "device": msgspec.to_builtins(self.session.device),
            "version": __version__,
        }
        return Identity(name or None, about, self.source)

    def _end(self, waiting: list[tuple[State, Search]]) -> float:
        """When the search of the first must end, so that the others and its last measurement have their time."""
        if self.request.seconds is None:
            return float("inf")
        weights = [_weight(*pair) for pair in waiting]
        least = LEAST_SHARE * max(weights)
        shares = [max(weight, least) for weight in weights]
        share = max(0.0, self._left() or 0.0) * shares[0] / sum(shares)
        confirming = (FINALISTS + 2) * LAST + FINALISTS * BUILDING
        return monotonic() + share - min(share / 3, confirming)

    def _tune(self, state: State, search: Search, end: float) -> None:
        request = self.request
        state.phase = "searching"
        search.study.guess(first_guesses(search.space, request.known))
        stopped = search.run(end, request.trials)
        before = None
        if request.exhaustive:
            state.phase, before = "sweeping", search.study.trials()
            stopped = search.sweep()
        state.phase = "confirming"
        self._say()
        result = search.confirm(stopped, before)
        record_files.append(request.records, self._record(state.subject, result))
        self._done(state, search, _tuned(state.subject, search, result))

    def _done(self, state: State, search: Search, tuned: Tuned) -> None:
        state.phase, state.tuned = "done", tuned
        self._say()

    def _say(self) -> None:
        self.watch(self.states, self._left())

    def _left(self) -> float | None:
        seconds = self.request.seconds
        return None if seconds is None else seconds - (monotonic() - self.started)

    def _record(self, subject: Subject, result: Result) -> Record:
        best = result.best
        return Record(
            op=subject.kind,
            key=subject.key,
            sizes=subject.sizes,
            kernel=result.point.kernel,
            config=result.point.config,
            median_us=best.us,
            spread=best.spread,
            default_us=best.default_us,
            error_share=best.error_share,
            threads=self.session.threads,
            isa=isa_of(self.profile),
            device=self.session.device,
            versions=self.versions,
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        )


def _weight(state: State, search: Search) -> float:
    """Microseconds of a call that this operation takes."""
    return search.default_us * len(state.subject.names)


def _tuned(subject: Subject, search: Search, result: Result) -> Tuned:
    best = result.best
    return Tuned(
        names=subject.names,
        op=subject.kind,
        sizes=subject.sizes,
        kernel=result.point.kernel,
        config=result.point.config,
        default_us=best.default_us,
        best_us=best.default_us * best.score,
        speedup=1 / best.score,
        noise=result.noise,
        history=tuple(t.result.score if isinstance(t.result, Found) else None for t in result.trials),
        failures=result.failures,
        stopped=result.stopped,
        space=len(search.space.points),
        study=search.study.name,
        error_share=best.error_share,
        found_us=None if result.swept is None else best.default_us * result.swept.score,
    )


def _untuned(subject: Subject, search: Search, why: str) -> Tuned:
    """The default's, with nothing measured."""
    point, unknown = search.space.default, float("nan")
    return Tuned(
        subject.names, subject.kind, subject.sizes, point.kernel, point.config, unknown, unknown, 1.0, unknown,
        {}, why, len(search.space.points), search.study.name,
    )  # fmt: skip

"""Tuning all operations of a source: each has its share of the time, its search, and at the end its record.

    ops = pipeline.import_source(spec, dims=dims).ops
    report = tune(ops, profile, session, Request(sizes, records, storage, seconds=60))

An operation's share is in proportion to its default time. They go from the cheapest to the dearest, so that what one
does not need is left to those that matter more. A record is written as soon as its operation is confirmed, and what
was measured is in the storage at once: killed at any time and started again, it goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from time import monotonic
from typing import Any

from mhsa_compile.compiler.selection.op_key import elsewhere
from mhsa_compile.hardware import environment
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.interface.ops import Op
from mhsa_compile.records.record import isa_of
from mhsa_compile.tuning import op_jobs
from mhsa_compile.tuning.measure import sessions
from mhsa_compile.tuning.measure.job import Candidate, MeasureJob
from mhsa_compile.tuning.measure.sessions import Session
from mhsa_compile.tuning.search.search import FINALISTS, LAST, Progress, Search, Unmeasurable
from mhsa_compile.tuning.search.space import Point, Space
from mhsa_compile.tuning.search.study_storage import open_storage
from mhsa_compile.tuning.search.warm_start import first_guesses
from mhsa_compile.tuning.tasks import (
    MeasuredOn,
    Request,
    TaskResult,
    TuningReport,
    TuningTask,
    keep,
    not_measured,
    source_digest,
    study_of,
    tasks_of,
)

LEAST_SHARE = 0.1
"""The share of the dearest operation's time that each operation has at least: some trials for all."""
BUILDING = 0.25
"""Seconds that building a candidate takes, roughly."""

BuildPoint = Callable[[Space, Point], Candidate]


@dataclass
class TaskState:
    """An operation while it is tuned, for who watches. `phase` is "waiting", "searching", "sweeping", "confirming" or
    "done"."""

    task: TuningTask
    phase: str = "waiting"
    progress: Progress | None = None
    result: TaskResult | None = None


Watch = Callable[[list[TaskState], float | None], None]
"""Is told the operations and the seconds that are left."""


def tune(
    ops: Mapping[str, Op],
    profile: TargetProfile,
    session: Session,
    request: Request,
    *,
    watch: Watch = lambda states, left: None,
    build: BuildPoint | None = None,
) -> TuningReport:
    """Tunes all operations, and writes their records. Raises InputError, OutputError, RecordsError and
    InstallationError, and DeviceError for a device that is of another architecture, or stays away."""
    sessions.require(session.device, isa_of(profile))
    return _Tuning(profile, session, request, watch, build or built).run(tasks_of(ops, request.sizes))


def built(space: Space, point: Point) -> Candidate:
    """Code for a point. Raises BuildError."""
    return op_jobs.candidate_of(space.op, space.kernels[point.kernel], point.config, space.profile)


@dataclass
class _Tuning:
    profile: TargetProfile
    session: Session
    request: Request
    watch: Watch
    build: BuildPoint
    source: str = ""
    states: list[TaskState] = field(default_factory=list)
    started: float = field(default_factory=monotonic)
    versions: dict[str, str] = field(default_factory=environment.versions)

    def run(self, tasks: list[TuningTask]) -> TuningReport:
        storage = open_storage(self.request.storage)
        self.source = source_digest(tasks)
        self.states = [TaskState(task) for task in tasks]
        searches: list[tuple[TaskState, Search]] = []
        with ExitStack() as studies:
            for state in self.states:
                self._say()
                search = self._prepared(storage, state)
                studies.enter_context(search.study)
                try:
                    search.begin()
                except Unmeasurable as error:
                    self._done(state, not_measured(state.task, search.study, str(error)))
                else:
                    searches.append((state, search))
            searches.sort(key=lambda pair: _weight(*pair))
            for place, (state, search) in enumerate(searches):
                self._tune(state, search, self._end(searches[place:]))
        return TuningReport(tuple(s.result for s in self.states if s.result is not None), monotonic() - self.started)

    def _prepared(self, storage: Any, state: TaskState) -> Search:
        task = state.task
        threads, device = self.session.threads, self.session.device
        study = study_of(task, self.profile, storage, self.request, self.source, threads=threads, device=device)
        space = study.space

        def tell(progress: Progress) -> None:
            state.progress = progress
            self._say()

        def job(sizes: Mapping[str, int]) -> MeasureJob:
            return op_jobs.job_of(task.op, sizes, self.request.seed)

        here = self.request.sizes
        others = cache(lambda: [job(sizes) for sizes in elsewhere(task.op, here)])
        return Search(space, job(here), study, self.session, lambda point: self.build(space, point), tell, others)

    def _end(self, waiting: list[tuple[TaskState, Search]]) -> float:
        """When the search of the first must end, so that the others and its last measurement have their time."""
        if self.request.seconds is None:
            return float("inf")
        weights = [_weight(*pair) for pair in waiting]
        least = LEAST_SHARE * max(weights)
        shares = [max(weight, least) for weight in weights]
        share = max(0.0, self._left() or 0.0) * shares[0] / sum(shares)
        confirming = (FINALISTS + 2) * LAST + FINALISTS * BUILDING
        return monotonic() + share - min(share / 3, confirming)

    def _tune(self, state: TaskState, search: Search, end: float) -> None:
        request = self.request
        state.phase = "searching"
        search.study.guess(first_guesses(search.space, request.known))
        reason = search.run(end, request.trials)
        before = None
        if request.exhaustive:
            state.phase, before = "sweeping", search.study.trials()
            reason = search.sweep()
        state.phase = "confirming"
        self._say()
        result = search.confirm(reason, before)
        on = MeasuredOn(self.profile, self.session.threads, self.session.device, self.versions)
        self._done(state, keep(state.task, search.study, result, on, request))

    def _done(self, state: TaskState, result: TaskResult) -> None:
        state.phase, state.result = "done", result
        self._say()

    def _say(self) -> None:
        self.watch(self.states, self._left())

    def _left(self) -> float | None:
        seconds = self.request.seconds
        return None if seconds is None else seconds - (monotonic() - self.started)


def _weight(state: TaskState, search: Search) -> float:
    """Microseconds of a call that this operation takes."""
    return search.default_us * len(state.task.names)

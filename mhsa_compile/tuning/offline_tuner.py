"""Tuning through a bundle, for a device without a network: what goes there, and what its results mean.

Nothing is known of the device before its results are here, and nothing can be asked of it again. So a bundle holds, for
each operation, the default twice (which shows the noise), the best of earlier bundles, first guesses, and the sampler's
draws; a second bundle goes on from what the first one found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from time import monotonic

import msgspec

from mhsa_compile.compiler.selection.op_key import elsewhere, measured_at
from mhsa_compile.errors import BuildError, BundleError
from mhsa_compile.files.foreign_errors import reading
from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.interface.ops import Op
from mhsa_compile.records.record import isa_of
from mhsa_compile.tuning import op_jobs
from mhsa_compile.tuning.measure import work_bundle, work_results
from mhsa_compile.tuning.measure.job import Candidate, Failure, Outcome, Timing
from mhsa_compile.tuning.measure.work_bundle import BundleTask, WorkOrder
from mhsa_compile.tuning.measure.work_results import Measurement, Results
from mhsa_compile.tuning.search.sampler import TrialResult, plain, point_of, results_of
from mhsa_compile.tuning.search.search import FINALISTS, SearchResult, choose, noise_of
from mhsa_compile.tuning.search.space import Point, Space
from mhsa_compile.tuning.search.study import Study, digest
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
from mhsa_compile.tuning.tuner import built

CANDIDATES = 64
"""The number of candidates of each operation, unless `trials` says otherwise."""
SECONDS = 0.2
"""Seconds of timing for each candidate: longer than in a search, which measures its best again."""


def pack(
    ops: Mapping[str, Op],
    profile: TargetProfile,
    threads: int,
    target: str,
    request: Request,
    path: Path,
    tell: Callable[[str], None] = lambda what: None,
) -> int:
    """Writes a bundle, and returns how many candidates it holds. `target` is a name for people; `tell` is told what is
    being built. Raises OutputError and what `tune` raises."""
    tasks = tasks_of(ops, request.sizes)
    source = source_digest(tasks)
    storage = open_storage(request.storage)
    order = WorkOrder(
        study=_word(source, request), target=target, isa=isa_of(profile), threads=threads, seconds=SECONDS
    )
    count = 0
    with work_bundle.create(path, order) as add:
        for task in tasks:
            tell(f"build {task.kind} {task.sizes}")
            with study_of(task, profile, storage, request, source, threads=threads, device=None) as study:
                space = study.space
                candidates = _candidates(space, _points(study, request))
            labels = tuple(_label(point) for point in candidates)
            everyone = built(space, space.default), *candidates.values()
            for place, sizes in _places(task, request):
                job = op_jobs.job_of(task.op, sizes, request.seed)
                add(BundleTask(place, job, everyone, (labels[0], *labels)))
                count += len(candidates)
    return count


def unpack(ops: Mapping[str, Op], profile: TargetProfile, request: Request, path: Path) -> TuningReport:
    """What the results of a bundle say: told to the studies, and the best written as records.

    Raises BundleError for results of another source, target or study, and what `tune` raises.
    """
    began, results = monotonic(), work_results.read(path)
    tasks = tasks_of(ops, request.sizes)
    source = source_digest(tasks)
    _check(results, path, _word(source, request), profile)
    storage = open_storage(request.storage)
    report = []
    for task in tasks:
        threads = results.order.threads
        with study_of(task, profile, storage, request, source, threads=threads, device=None) as study:
            own = [_of_task(results, place) for place, _ in _places(task, request)]
            report.append(_unpacked(task, study, own, profile, results, request))
    return TuningReport(tuple(report), monotonic() - began)


def _word(source: str, request: Request) -> str:
    """The word by which the results of a bundle are known again."""
    return f"{request.study or 'mhsa'}:{source[:20]}"


def _places(task: TuningTask, request: Request) -> list[tuple[str, Mapping[str, int]]]:
    """(a word for the task, sizes of the symbols) of an operation: where it is to be fast, and if its lengths are
    symbolic elsewhere, too."""

    def word(sizes: Mapping[str, int]) -> str:
        own = " ".join(f"{name}={size}" for name, size in measured_at(task.op, sizes).items())
        return f"{task.kind} {own} ({digest(task.key)[:8]})"

    return [(word(sizes), sizes) for sizes in (request.sizes, *elsewhere(task.op, request.sizes))]


def _of_task(results: Results, place: str) -> dict[Point, Measurement]:
    with reading(BundleError, "results", "the labels of its bundle", work_bundle.COPY_AGAIN):
        return {point_of(msgspec.json.decode(one.label)): one for one in results.measured if one.task == place}


def _label(point: Point) -> str:
    return msgspec.json.encode(plain(point)).decode()


def _points(study: Study, request: Request) -> list[Point]:
    """The points to measure: the default, the best that the study knows, first guesses, and the sampler's proposals."""
    space, best = study.space, [point for _, point in results_of(study.trials())][:FINALISTS]
    points = {trial.point for trial in study.trials()}
    guesses = [point for point in first_guesses(space, request.known) if point not in points]
    first = list(dict.fromkeys([space.default, *best, *guesses]))
    more = max(0, (request.trials or CANDIDATES) - len(first))
    return list(dict.fromkeys([*first, *study.proposals(more)]))


def _candidates(space: Space, points: list[Point]) -> dict[Point, Candidate]:
    """The candidates of the points that can be built. Raises BuildError where the default is none of these."""
    candidates = {}
    for point in points:
        try:
            candidates[point] = built(space, point)
        except BuildError:
            if point == space.default:
                raise
    return candidates


def _check(results: Results, path: Path, word: str, profile: TargetProfile) -> None:
    """Raises BundleError for results of another source, study or target, and for none."""
    what = f"results {str(path)!r}"
    if results.order.study != word:
        hint = "Give the same source, sizes and --study as for the bundle."
        raise BundleError(what, f"those of this source, {word}", f"those of {results.order.study}", hint)
    if results.order.isa != isa_of(profile):
        hint = "Give the same --target as for the bundle."
        raise BundleError(what, "those of this target", f"those of {results.order.target}, of another kind", hint)
    if not results.measured:
        raise BundleError(what, "some that were measured", "none", "Let `mhsa measure` run for longer.")


def _unpacked(
    task: TuningTask,
    study: Study,
    own: list[dict[Point, Measurement]],
    profile: TargetProfile,
    results: Results,
    request: Request,
) -> TaskResult:
    """Tells the results of one operation to its study, and writes its record. `own`: what was measured at the
    operation's sizes, and elsewhere."""
    space, (pairs, *others) = study.space, own
    for point, pair in pairs.items():
        if isinstance(pair.incumbent, Timing):
            study.add(point, pair.outcome, pair.incumbent)
    default = pairs.get(space.default)
    if default is None or (both := _both(default)) is None:
        why = "it was not measured" if default is None else _why(default.outcome)
        return not_measured(task, study, f"the default config: {why}")
    lasting = {point: pair for point, pair in pairs.items() if all(_lasts(point, one) for one in others)}
    result = _best(space, *both, lasting, study)
    on = MeasuredOn(profile, results.order.threads, results.device)
    return keep(task, study, result, on, request)


def _both(pair: Measurement) -> tuple[Timing, Timing] | None:
    """(the incumbent, the candidate), if both ran."""
    incumbent, outcome = pair.incumbent, pair.outcome
    return (incumbent, outcome) if isinstance(incumbent, Timing) and isinstance(outcome, Timing) else None


def _lasts(point: Point, elsewhere: Mapping[Point, Measurement]) -> bool:
    """Whether a point is right, and no slower than the default, at lengths where that was to be measured."""
    default = next(iter(elsewhere.values()), None)  # beside itself: it is the first of its task
    if default is None or point not in elsewhere:
        return False
    its = elsewhere[point]
    own, noise = _both(its), _both(default)
    return own is not None and noise is not None and TrialResult.of(own[1], own[0]).score <= 1 + noise_of(*noise)


def _why(outcome: Outcome) -> str:
    return outcome.reason if isinstance(outcome, Failure) else "the one beside it failed"


def _best(
    space: Space, incumbent: Timing, again: Timing, pairs: Mapping[Point, Measurement], study: Study
) -> SearchResult:
    """The result of the best candidate: each was measured beside a default of its own, so each is judged by that."""
    noise = noise_of(incumbent, again)
    point, best = choose(space.default, incumbent, {}, noise)
    result = best[point]
    for candidate, pair in pairs.items():
        both = _both(pair)
        if both is not None:
            faster, its = choose(space.default, both[0], {candidate: both[1]}, noise)
            if its[faster].score < result.score:
                point, result = faster, its[faster]
    return SearchResult(point, result, noise, tuple(study.trials()), "results")

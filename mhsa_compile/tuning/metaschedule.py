"""Tuning what no kernel claims, with TVM's MetaSchedule: it proposes schedules, a session measures them.

    for task in fallback_jobs.fallback_tasks(imported.module, profile):
        result = tune_function(task, profile, session, seconds=10)

Of MetaSchedule only the search space and the sampling are used. Building, measuring and judging are those of all tuning
here, so a candidate may run on any device, and none is timed before it was right; and its database, which ignores the
target and is created empty where it is missing, has no part. The incumbent is the schedule that `cpu_schedule` makes
by its rules.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any

import msgspec
import tvm

from mhsa_compile.compiler.fallback import cpu_schedule, traces
from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.records import record_files
from mhsa_compile.records.record import Record
from mhsa_compile.tuning.fallback_jobs import FallbackTask, candidate_of, job_of
from mhsa_compile.tuning.measure.job import BUILD, Candidate, MeasureJob, Timing
from mhsa_compile.tuning.measure.sessions import Session
from mhsa_compile.tuning.search.sampler import TrialResult
from mhsa_compile.tuning.search.search import BATCH, LAST, SECONDS, noise_of
from mhsa_compile.tuning.tasks import MeasuredOn, make_record

SPACE = 1 << 20
"""Samples that MetaSchedule may draw: time or trials end a search before."""
REFUSED = 3
"""Batches in a row without a candidate that can be built, after which a search ends."""


LEAST_SECONDS = 5.0
"""The fewest seconds for one function: enough for a batch, and the confirmation."""


@dataclass
class ScheduleResult:
    """What the search came to. `trials` are done, failures among them; `record` is None where nothing was faster than
    the default beyond the noise, and then `best_us` is the default's."""

    task: FallbackTask
    default_us: float
    best_us: float
    noise: float
    record: Record | None = None
    trials: int = 0
    failures: Counter[str] = field(default_factory=Counter)


def tune_functions(
    tasks: list[FallbackTask],
    profile: CpuProfile,
    session: Session,
    seconds: float,
    records: Path,
    *,
    trials: int | None = None,
    seed: int = 0,
    tell: Callable[[str], None] = lambda name: None,
) -> list[ScheduleResult]:
    """Tunes the functions that can be tuned, in equal shares of the time but at least LEAST_SECONDS each, and appends
    the records.

    Raises DeviceError, RecordsError, and RuntimeError where a function's default cannot be measured.
    """
    tunable = [task for task in tasks if not task.reason]
    results = []
    for task in tunable:
        tell(task.name)
        result = tune_function(task, profile, session, max(LEAST_SECONDS, seconds / len(tunable)), trials, seed)
        if result.record is not None:
            record_files.append(records, result.record)
        results.append(result)
    return results


def tune_function(
    task: FallbackTask,
    profile: CpuProfile,
    session: Session,
    seconds: float,
    trials: int | None = None,
    seed: int = 0,
) -> ScheduleResult:
    """Tunes a task that has no `reason`. Raises DeviceError for a device of another architecture, BuildError and
    RuntimeError where not even the default can be measured."""
    end = monotonic() + seconds - 4 * LAST
    job = job_of(task, seed)
    default = candidate_of(cpu_schedule.schedule_function(task.function, profile.vector_lanes("float32")), profile)
    result = ScheduleResult(task, float("nan"), float("nan"), 0.0)
    space = _Space(task, profile, session.threads, seed)
    best: tuple[float, str, Candidate] | None = None
    empty = 0
    while empty < REFUSED and monotonic() < end and (trials is None or result.trials < trials):
        texts = space.draw(BATCH if trials is None else min(BATCH, trials - result.trials))
        candidates = _candidates(texts, task, profile, result)
        empty = 0 if candidates else empty + 1
        if not candidates:
            continue
        first, *others = session.measure(job, [default, *(candidate for _, candidate in candidates)], SECONDS)
        if not isinstance(first, Timing):
            raise RuntimeError(f"the default schedule of {task.name} {first.reason} {first.detail}".strip())
        for (trace, candidate), outcome in zip(candidates, others, strict=True):
            if not isinstance(outcome, Timing):
                result.failures[outcome.reason] += 1
            elif best is None or TrialResult.of(outcome, first).score < best[0]:
                best = TrialResult.of(outcome, first).score, trace, candidate
    return _confirm(result, job, default, best, profile, session)


def _candidates(
    texts: list[str], task: FallbackTask, profile: CpuProfile, result: ScheduleResult
) -> list[tuple[str, Candidate]]:
    """(trace, candidate) of those drawn that can be built as `cpu_schedule` would: from their trace."""
    candidates = []
    for trace in texts:
        result.trials += 1
        function = traces.apply(task.function, trace)
        if isinstance(function, str):  # why the trace does not apply
            result.failures[BUILD] += 1
            continue
        try:
            candidates.append((trace, candidate_of(function, profile)))
        except Exception:  # whatever TVM's passes and LLVM trip over
            result.failures[BUILD] += 1
    return candidates


def _confirm(
    result: ScheduleResult,
    job: MeasureJob,
    default: Candidate,
    best: tuple[float, str, Candidate] | None,
    profile: CpuProfile,
    session: Session,
) -> ScheduleResult:
    """Measures the best again, longer, with the default on both sides of it."""
    company = [default, *([best[2]] if best is not None else []), default]
    outcomes = session.measure(job, company, LAST)
    first, last = outcomes[0], outcomes[-1]
    if not (isinstance(first, Timing) and isinstance(last, Timing)):
        raise RuntimeError(f"the default schedule of {result.task.name} could not be measured")
    result.noise, result.default_us = noise_of(first, last), TrialResult.of(first, first).us
    result.best_us = result.default_us
    if best is None or not isinstance(outcomes[1], Timing):
        return result
    gain = TrialResult.of(outcomes[1], first)
    if gain.score < 1 - result.noise:
        result.best_us = gain.default_us * gain.score
        on, key = MeasuredOn(profile, session.threads, session.device), result.task.key
        result.record = make_record(
            gain, on, op=traces.KIND, key=key, sizes={}, kernel=traces.KIND, config={}, trace=best[1]
        )
    return result


# ---- MetaSchedule


class _Space:
    """The schedules that MetaSchedule's rules for LLVM can make, drawn at random, without end."""

    def __init__(self, task: FallbackTask, profile: CpuProfile, threads: int, seed: int) -> None:
        from tvm.s_tir import meta_schedule

        module = tvm.IRModule({"main": traces.canonical(task.function).with_attr("global_symbol", "main")})
        rules = meta_schedule.schedule_rule.ScheduleRule.create("llvm")
        repairs = meta_schedule.postproc.Postproc.create("llvm")
        with _without_intrinsics():
            self._context = meta_schedule.TuneContext(
                mod=module,
                target=tvm.target.Target({**profile.tvm_config(), "num-cores": threads}),
                space_generator=meta_schedule.space_generator.PostOrderApply(
                    sch_rules=rules, postprocs=repairs, mutator_probs={}
                ),
                search_strategy="replay-trace",
                task_name=task.name,
                num_threads=1,
                rand_state=seed + 1,
            )
        self._result = meta_schedule.runner.RunnerResult
        self._context.pre_tuning(SPACE, BATCH, self._context.generate_design_space())

    def draw(self, count: int) -> list[str]:
        """The traces of so many schedules, fewer where MetaSchedule drops some of its own."""
        candidates = list(self._context.generate_measure_candidates() or ())
        # The strategy waits for times before it draws on; sampling at random has no use for them.
        self._context.notify_runner_results(candidates, [self._result([1.0], None) for _ in candidates])
        return [_as_text(candidate.sch.trace) for candidate in candidates[:count]]


@contextmanager
def _without_intrinsics() -> Iterator[None]:
    """Inside, TVM does not import the intrinsics of all GPUs and CPUs for a context, which takes 20 s; the rules in use
    know none of them."""
    name = "tvm.s_tir.tensor_intrin"
    before = sys.modules.get(name)
    sys.modules.setdefault(name, ModuleType(name))
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]


def _as_text(trace: Any) -> str:
    return msgspec.json.encode(_plain(trace.as_json())).decode()


def _plain(value: Any) -> Any:
    """TVM's numbers as Python's."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | float | None):
        return value
    return value.value if hasattr(value, "value") else [_plain(item) for item in value]

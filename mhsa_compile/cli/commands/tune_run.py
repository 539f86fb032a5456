"""One case of `mhsa tune`, from its source to records, and what there is to say about it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhsa_compile.cli.commands import tune_view
from mhsa_compile.cli.common import output, sources
from mhsa_compile.cli.common.cases import Case
from mhsa_compile.files import places

if TYPE_CHECKING:
    from mhsa_compile.hardware.profile import TargetProfile
    from mhsa_compile.kernels.interface.ops import Op
    from mhsa_compile.runtime.artifact.artifact import Artifact
    from mhsa_compile.tuning.fallback_jobs import FallbackTask
    from mhsa_compile.tuning.measure.rpc_server import Address
    from mhsa_compile.tuning.measure.sessions import Session
    from mhsa_compile.tuning.metaschedule import ScheduleResult
    from mhsa_compile.tuning.speedup import Gain
    from mhsa_compile.tuning.tasks import Request, TaskResult, TuningReport

PEER_SECONDS, GAIN_SECONDS = 0.5, 1.0
REST_SHARE = 0.25
"""The share of the time that goes to what no kernel claims, where there is any of it."""


@dataclass(frozen=True)
class TunedSource:
    """What came of a case.

    gain, peers  where this machine measures; a peer's time is by that of the default artifact
    left         to TVM, what no kernel claims, and `rest` those of them that were tuned
    """

    report: TuningReport
    gain: Gain | None = None
    peers: dict[str, float] = field(default_factory=dict)
    left: list[FallbackTask] = field(default_factory=list)
    rest: list[ScheduleResult] = field(default_factory=list)


@dataclass(frozen=True)
class Settings:
    """What all cases of a command have in common; see `tuning.tasks.Request`."""

    profile: TargetProfile
    records: Path
    storage: str
    study: str | None
    threads: int | None
    seconds: float
    trials: int | None
    seed: int
    exhaustive: bool

    @property
    def on_gpu(self) -> bool:
        return self.profile.family == "cuda"

    def session(self, tracker: tuple[Address, str] | None) -> AbstractContextManager[Session]:
        from mhsa_compile.tuning.measure import sessions

        if tracker is None:
            return sessions.local(1 if self.on_gpu else self.threads)
        (host, port), key = tracker
        return sessions.tracker(host, port, key)

    def request(self, case: Case) -> Request:
        from mhsa_compile.tuning.tasks import Request

        own = [self.records] if places.is_file(self.records) else []
        return Request(
            sizes=case.sizes,
            records=self.records,
            storage=self.storage,
            known=tuple(sources.read_records(dict.fromkeys((*own, *self.profile.records())))),
            study=self.study,
            seconds=self.seconds,
            trials=self.trials,
            seed=self.seed,
            exhaustive=self.exhaustive,
        )


def operations(case: Case) -> dict[str, Op]:
    from mhsa_compile.compiler import pipeline

    return pipeline.operations(case.source, dims=case.dims, weights=case.weights)


def search(case: Case, settings: Settings, session: Session, peers: dict[str, float]) -> TunedSource:
    """Records from a session; `peers` are shown beside what it finds."""
    from mhsa_compile.compiler import lower, pipeline
    from mhsa_compile.hardware.profile import CpuProfile
    from mhsa_compile.tuning import fallback_jobs, metaschedule
    from mhsa_compile.tuning.tuner import tune

    profile, request = settings.profile, settings.request(case)
    imported = pipeline.imported(case.source, dims=case.dims, weights=case.weights)
    if not isinstance(profile, CpuProfile):  # for GPUs what no kernel claims has its schedules by rules
        with tune_view.live(case.name, settings.seconds, peers) as watch:
            return TunedSource(tune(imported.ops, profile, session, request, watch=watch), None, peers)
    left = fallback_jobs.fallback_tasks(lower.prepared(imported, profile).module, profile)
    for_rest = REST_SHARE * settings.seconds if any(not task.reason for task in left) else 0.0
    request = replace(request, seconds=settings.seconds - for_rest)
    with tune_view.live(case.name, settings.seconds - for_rest, peers) as watch:
        report = tune(imported.ops, profile, session, request, watch=watch)
    with output.stages() as stage:
        rest = metaschedule.tune_functions(
            left,
            profile,
            session,
            for_rest,
            settings.records,
            trials=settings.trials,
            seed=settings.seed,
            tell=lambda name: stage(f"tune {name} with MetaSchedule"),
        )
    return TunedSource(report, None, peers, left, rest)


def search_here(case: Case, settings: Settings, session: Session, peers: tuple[str, ...]) -> TunedSource:
    """Searches on this machine, where the whole artifact can be timed, too: with its peers before the search, and
    against the default after it. Artifacts for a GPU are timed by `make bench-gpu`."""
    if settings.on_gpu:
        return search(case, settings, session, {})
    default, ratios = _default(case, settings.profile, session.threads, peers)
    outcome = search(case, settings, session, ratios)
    return replace(outcome, gain=_gain(case, settings, default, session.threads))


def write_bundle(case: Case, settings: Settings, path: Path) -> int:
    """Writes a bundle of what is to be measured elsewhere; returns how many candidates it holds."""
    from mhsa_compile.hardware.profile import CudaProfile
    from mhsa_compile.tuning import offline_tuner

    profile = settings.profile
    threads = 1 if isinstance(profile, CudaProfile) else settings.threads or profile.hardware.cores
    with output.stages() as stage:
        stage(f"import {case.name}")
        return offline_tuner.pack(operations(case), profile, threads, profile.name, settings.request(case), path, stage)


def read_results(case: Case, settings: Settings, path: Path) -> TunedSource:
    from mhsa_compile.tuning import offline_tuner
    from mhsa_compile.tuning.measure import work_results

    tune_view.show_device(work_results.read(path).device, settings.profile)
    return TunedSource(offline_tuner.unpack(operations(case), settings.profile, settings.request(case), path))


def _default(
    case: Case, profile: TargetProfile, threads: int, peers: tuple[str, ...]
) -> tuple[Artifact, dict[str, float]]:
    """The artifact without records, and how its peers compare."""
    from mhsa_bench.bench import bench
    from mhsa_compile.bench.accuracy import returns_y_alone
    from mhsa_compile.compiler.pipeline import compile

    with output.stages() as stage:
        stage(f"compile {case.name}")
        artifact = compile(case.source, profile, dims=case.dims, weights=case.weights, records=(), cache=False)
        if not peers or not returns_y_alone(artifact):  # which is all that peers return
            return artifact, {}
        stage(f"time {', '.join(peers)}")
        dims = _open(artifact, case.sizes)
        report = bench(artifact, against=peers, dims=dims, threads=threads, seconds=PEER_SECONDS)
    return artifact, {row.name: row.ratio for row in report.rows[1:] if row.ratio is not None}


def _gain(case: Case, settings: Settings, default: Artifact, threads: int) -> Gain:
    from mhsa_compile.compiler.pipeline import compile
    from mhsa_compile.tuning.speedup import gain

    with output.stages() as stage:
        stage("compile with the records")
        records = sources.read_records([settings.records])
        dims, profile = case.dims, settings.profile
        tuned = compile(case.source, profile, dims=dims, weights=case.weights, records=records, cache=False)
        stage("time it against the default")
        return gain(default, tuned, dims=_open(default, case.sizes), threads=threads, seconds=GAIN_SECONDS)


def _open(artifact: Artifact, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of those dims that the artifact leaves open."""
    found = {dim for info in artifact.manifest.inputs for dim in info.dims}
    return {symbol: size for symbol, size in sizes.items() if symbol in found}


def as_json(outcomes: dict[str, TunedSource], records: Path) -> dict[str, Any]:
    """The sums, and each source by its name."""
    each = {name: _summary(outcome) for name, outcome in outcomes.items()}
    total = {key: sum(one[key] for one in each.values()) for key in ("trials", "failures", "default_us", "best_us")}
    return {
        **total,
        "speedup": total["default_us"] / total["best_us"] if total["best_us"] else 1.0,
        "records": records,
        "sources": {
            n: each[n] | {"gain": o.gain, "peers": o.peers, "ops": [_op(op) for op in o.report.ops], "rest": _rest(o)}
            for n, o in outcomes.items()
        },
    }


def _op(op: TaskResult) -> dict[str, Any]:
    return {"trials": op.trials, **asdict(op)}


def _rest(outcome: TunedSource) -> list[dict[str, Any]]:
    """What no kernel claims: what MetaSchedule came to, or why it was not asked."""
    refused = [{"name": task.name, "reason": task.reason} for task in outcome.left if task.reason]
    names = ("default_us", "best_us", "noise", "trials", "failures")
    return [{"name": t.task.name, **{name: getattr(t, name) for name in names}} for t in outcome.rest] + refused


def _summary(outcome: TunedSource) -> dict[str, Any]:
    """Times of the whole artifact where they were measured, else the sums over its operations."""
    report, whole = outcome.report, outcome.gain or outcome.report
    speedup = whole.default_us / whole.best_us if whole.best_us else 1.0
    return {
        "trials": report.trials,
        "failures": report.failures,
        "default_us": whole.default_us,
        "best_us": whole.best_us,
        "speedup": speedup if outcome.gain is None else outcome.gain.speedup,
        "seconds": report.seconds,
    }

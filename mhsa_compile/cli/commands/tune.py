"""`mhsa tune`: search, measure, and write records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mhsa_bench.plots import figure, tuning_plots
from mhsa_compile.cli.commands import tune_view
from mhsa_compile.cli.common import options, output, sources
from mhsa_compile.cli.common.cases import BUNDLE, LOCAL, Case, CaseOptions, split
from mhsa_compile.errors import InputError, RecordsError
from mhsa_compile.files import places
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.spec.float32_products import float32_request

if TYPE_CHECKING:
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

    options: TuneOptions
    profile: TargetProfile
    records: Path
    storage: str

    @classmethod
    def of(cls, options: TuneOptions, profile: TargetProfile) -> Settings:
        records = options.records or profile.own_records()
        return cls(options, profile, records, options.storage or _database(records))

    @property
    def on_gpu(self) -> bool:
        return self.profile.family == "cuda"

    def session(self, tracker: tuple[Address, str] | None) -> AbstractContextManager[Session]:
        from mhsa_compile.tuning.measure import sessions

        if tracker is None:
            return sessions.local(1 if self.on_gpu else self.options.threads)
        (host, port), key = tracker
        return sessions.tracker(host, port, key)

    def request(self, case: Case, seconds: float | None = None) -> Request:
        from mhsa_compile.tuning.tasks import Request

        options, own = self.options, [self.records] if places.is_file(self.records) else []
        return Request(
            sizes=case.sizes,
            records=self.records,
            storage=self.storage,
            known=tuple(sources.read_records(dict.fromkeys((*own, *self.profile.records())))),
            study=options.study,
            seconds=options.seconds if seconds is None else seconds,
            trials=options.trials,
            seed=options.seed,
            exhaustive=options.exhaustive,
        )


@dataclass(frozen=True, kw_only=True)
class TuneOptions:
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Instead of a source: tiny, base128, ..., or a group such as blocks. Repeat it for more."),
    ] = None
    target: Annotated[str, typer.Option(help="A name from `mhsa targets`, or a .toml file.")] = "native"
    on: Annotated[
        Literal["local", "tracker", "bundle"],
        typer.Option(help="What measures: this machine, a device of TVM's tracker, or one without a network."),
    ] = "local"
    out: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="WORK.zip", help="With --on bundle: for `mhsa measure`.")
    ] = None
    results: Annotated[
        Path | None, typer.Option(metavar="RESULTS.json", help="What `mhsa measure` found of a bundle of this source.")
    ] = None
    seconds: Annotated[float, typer.Option(min=1, help="For each source, all its operations together.")] = 60.0
    trials: Annotated[
        int | None, typer.Option(min=1, help="At most so many of each operation, earlier runs' among them.")
    ] = None
    dims: options.StatedDims
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="The sizes are those to measure at; dims stay symbolic.")
    ] = False
    around: Annotated[bool, typer.Option("--around", help="Also tune at half the lengths, and at twice them.")] = False
    dtype: Annotated[str | None, typer.Option(help="Of the workloads: float32, bfloat16 or float16.")] = None
    weights: options.WeightWord = None
    float32_products: options.Float32ProductsWord = "auto"
    threads: options.Threads = None
    records: Annotated[
        Path | None, typer.Option("--records", metavar="FILE", help="Where records go, instead of your own file.")
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Of the studies' database; SQLite beside the records if not given."),
    ] = None
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the studies, instead of one that follows from what is tuned.")
    ] = None
    against: Annotated[str, typer.Option(help="Peers to show, separated by commas, or all; an empty text is none.")] = (
        "torch"
    )
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="After the search measure all that is left, however long it takes.")
    ] = False
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the search: .svg, .png or .pdf.")] = None
    seed: options.Seed = 0
    json: options.Json = False

    def cases(self, source: Path | None) -> CaseOptions:
        return CaseOptions(
            source=source,
            workloads=self.workload or [],
            dtype=self.dtype,
            dims=self.dims.sizes(),
            symbolic=self.symbolic,
            around=self.around,
            weights=self.weights,
            float32_products=float32_request(self.float32_products),
            seed=self.seed,
        )


def tune(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE] [HOST:PORT/KEY]", help="An .onnx file or a spec .toml; behind it the device of a tracker."
        ),
    ] = None,
    *,
    request: TuneOptions,
) -> None:
    """Find the fastest config of each operation on a device, and write it down: `mhsa compile` reads that.

    Dims that are not given stay symbolic, and are measured at B = 1, L = 128, S = L, C = 1024. What was measured is
    kept in the studies' database: the same command goes on where it ended, also after a kill. Exit code 1 where the
    tuned artifact is over its error budget.
    """
    source, tracker = split(arguments or [], request.on)
    _check(request)
    cases = request.cases(source)
    cases.check()
    peers = options.peers(request.against)
    profile = load_profile(request.target)
    sources.require_compiler()
    settings = Settings.of(request, profile)
    _read(settings.storage, request.results)
    if request.on == BUNDLE and request.out is not None and request.results is None:
        return _bundle(_only(cases), settings, request.out)
    outcomes = {}
    for name, outcome in _outcomes(cases, settings, tracker, peers):
        outcomes[name] = outcome
        if not request.json:
            tune_view.show(name, outcome.report, outcome.gain, outcome.peers, settings.records)
            tune_view.show_rest(outcome.left, outcome.rest)
    if request.json:
        output.print_json(as_json(outcomes, settings.records))
    if request.plot is not None:
        tuning_plots.searches({name: outcome.report for name, outcome in outcomes.items()}, request.plot)
    if any(outcome.gain is not None and not outcome.gain.error_share <= 1 for outcome in outcomes.values()):
        raise typer.Exit(1)


def _outcomes(
    cases: CaseOptions, settings: Settings, tracker: tuple[Address, str] | None, peers: tuple[str, ...]
) -> Iterator[tuple[str, TunedSource]]:
    if settings.options.results is not None:
        case = _only(cases)
        yield case.name, _read_results(case, settings, settings.options.results)
        return
    with settings.session(tracker) as session:
        tune_view.show_device(session.device, settings.profile)
        for case in cases.cases():
            if settings.options.on == LOCAL and not settings.on_gpu:
                yield case.name, _search_here(case, settings, session, peers)
            else:
                yield case.name, _search(case, settings, session, {})


def _check(request: TuneOptions) -> None:
    """Raises InputError and OutputError for options that do not go together, before anything is done."""
    if request.on == BUNDLE and (request.out is None) == (request.results is None):
        got = "both" if request.out else "neither"
        raise InputError("--on bundle", "-o WORK.zip, or later --results RESULTS.json", got)
    if request.on != BUNDLE and request.out is not None:
        raise InputError("-o", "it with --on bundle", f"--on {request.on}", "Records go to --records.")
    if request.plot is not None:
        figure.check_path(request.plot)


def _read(storage: str, results: Path | None) -> None:
    """What is given is looked at before the seconds that importing PyTorch and a source take. Raises InputError,
    OutputError, BundleError and InstallationError."""
    from mhsa_compile.tuning.search.study_storage import open_storage

    if results is not None:
        from mhsa_compile.tuning.measure.work_results import read

        read(results)
    open_storage(storage)


def _database(records: Path) -> str:
    place = places.resolve(records, RecordsError, "--records")
    places.make_folder(place.parent, RecordsError, "--records")
    return f"sqlite:///{place.with_suffix('.studies.db')}"


def _only(cases: CaseOptions) -> Case:
    first, *others = cases.cases()
    if others:
        raise InputError("--on bundle", "one source", f"{1 + len(others)} workloads", "Make a bundle of each.")
    return first


def _bundle(case: Case, settings: Settings, out: Path) -> None:
    """Writes a bundle of what is to be measured elsewhere."""
    from mhsa_compile.hardware.profile import CudaProfile
    from mhsa_compile.tuning import offline_tuner

    profile = settings.profile
    threads = 1 if isinstance(profile, CudaProfile) else settings.options.threads or profile.hardware.cores
    with output.stages() as stage:
        stage(f"import {case.name}")
        ops = _operations(case, profile)
        count = offline_tuner.pack(ops, profile, threads, profile.name, settings.request(case), out, stage)
    if settings.options.json:
        output.print_json({"bundle": out, "candidates": count})
        return
    output.line(f"{out}: {count} candidates. On the device: mhsa measure {out.name} -o results.json")
    output.line("Then here the same command with --results results.json instead of --on bundle and -o")


def _read_results(case: Case, settings: Settings, path: Path) -> TunedSource:
    from mhsa_compile.tuning import offline_tuner
    from mhsa_compile.tuning.measure import work_results

    tune_view.show_device(work_results.read(path).device, settings.profile)
    return TunedSource(
        offline_tuner.unpack(_operations(case, settings.profile), settings.profile, settings.request(case), path)
    )


def _operations(case: Case, profile: TargetProfile) -> dict[str, Op]:
    """The operations of a case, as they are computed on a target."""
    from mhsa_compile.compiler import pipeline
    from mhsa_compile.compiler.selection.float32_products import resolved_ops

    ops = pipeline.import_source(case.source, dims=case.dims, weights=case.weights).ops
    return resolved_ops(ops, case.float32_products, profile)


def _search(case: Case, settings: Settings, session: Session, peers: dict[str, float]) -> TunedSource:
    """Records from a session; `peers` are shown beside what it finds."""
    from mhsa_compile.compiler import lower, pipeline
    from mhsa_compile.compiler.selection.float32_products import resolved_ops
    from mhsa_compile.hardware.profile import CpuProfile
    from mhsa_compile.tuning import fallback_jobs, metaschedule
    from mhsa_compile.tuning.tuner import tune

    profile, options = settings.profile, settings.options
    imported = pipeline.import_source(case.source, dims=case.dims, weights=case.weights)
    tasks: list[FallbackTask] = []
    if isinstance(profile, CpuProfile):  # for GPUs what no kernel claims has its schedules by rules
        tasks = fallback_jobs.fallback_tasks(lower.prepare(imported, profile).module, profile)
    for_rest = REST_SHARE * options.seconds if any(not task.reason for task in tasks) else 0.0
    request = settings.request(case, options.seconds - for_rest)
    with tune_view.live(case.name, options.seconds - for_rest, peers) as watch:
        report = tune(
            resolved_ops(imported.ops, case.float32_products, profile), profile, session, request, watch=watch
        )
    if not isinstance(profile, CpuProfile):
        return TunedSource(report, None, peers)
    with output.stages() as stage:
        rest = metaschedule.tune_functions(
            tasks,
            profile,
            session,
            for_rest,
            settings.records,
            trials=options.trials,
            seed=options.seed,
            tell=lambda name: stage(f"tune {name} with MetaSchedule"),
        )
    return TunedSource(report, None, peers, tasks, rest)


def _search_here(case: Case, settings: Settings, session: Session, peers: tuple[str, ...]) -> TunedSource:
    """Searches on this machine, where the whole artifact can be timed, too: with its peers before the search, and
    against the default after it. Artifacts for a GPU are timed by `make bench-gpu`."""
    default, ratios = _default(case, settings.profile, session.threads, peers)
    outcome = _search(case, settings, session, ratios)
    return replace(outcome, gain=_gain(case, settings, default, session.threads))


def _default(
    case: Case, profile: TargetProfile, threads: int, peers: tuple[str, ...]
) -> tuple[Artifact, dict[str, float]]:
    """The artifact without records, and how its peers compare."""
    from mhsa_bench.bench import bench
    from mhsa_compile.bench.accuracy import returns_y_alone
    from mhsa_compile.compiler.pipeline import compile

    with output.stages() as stage:
        stage(f"compile {case.name}")
        artifact = compile(case.source, profile, **case.options(case.dims), records=(), cache=False)
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
        tuned = compile(case.source, profile, **case.options(dims), records=records, cache=False)
        stage("time it against the default")
        return gain(default, tuned, dims=_open(default, case.sizes), threads=threads, seconds=GAIN_SECONDS)


def _open(artifact: Artifact, sizes: dict[str, int]) -> dict[str, int]:
    """The sizes of those dims that the artifact leaves open."""
    symbols = {dim for info in artifact.manifest.inputs for dim in info.dims}
    return {symbol: size for symbol, size in sizes.items() if symbol in symbols}


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
    refusals = [{"name": task.name, "reason": task.reason} for task in outcome.left if task.reason]
    names = ("default_us", "best_us", "noise", "trials", "failures")
    return [{"name": t.task.name, **{name: getattr(t, name) for name in names}} for t in outcome.rest] + refusals


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

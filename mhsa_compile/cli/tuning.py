"""`mhsa tune`: search, measure, and write records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mhsa_compile import drawing, tuning_plots
from mhsa_compile.cli import options, output, sources, tuning_view
from mhsa_compile.errors import DeviceError, InputError

if TYPE_CHECKING:
    from mhsa_compile.artifact import Artifact
    from mhsa_compile.gain import Gain
    from mhsa_compile.leftovers import Task
    from mhsa_compile.meta import Tuned as TunedRest
    from mhsa_compile.profile import TargetProfile
    from mhsa_compile.sessions import Session
    from mhsa_compile.tune import Report

_DEFAULT_DIMS = {"B": 1, "L": 128}  # S is L unless given
_LOCAL, _TRACKER, _BUNDLE = "local", "tracker", "bundle"
REST_SHARE = 0.25
"""Of the time, for what no kernel claims, where there is any of it."""
_PEER_SECONDS, _GAIN_SECONDS = 0.5, 1.0


def tune(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE] [HOST:PORT/KEY]", help="An .onnx file or a spec .toml; behind it the device of a tracker."
        ),
    ] = None,
    *,
    workload: Annotated[
        list[str] | None,
        typer.Option(help="Instead of a source: tiny, base128, ..., or a group such as blocks. Repeat it for more."),
    ] = None,
    target: Annotated[str, typer.Option(help="A name from `mhsa targets`, or a .toml file.")] = "native",
    on: Annotated[
        Literal["local", "tracker", "bundle"],
        typer.Option(help="What measures: this machine, a device of TVM's tracker, or one without a network."),
    ] = "local",
    seconds: Annotated[float, typer.Option(min=1, help="For each source, all its operations together.")] = 60.0,
    trials: Annotated[
        int | None, typer.Option(min=1, help="At most so many of each operation, earlier runs' among them.")
    ] = None,
    batch: options.Batch = None,
    length: options.Length = None,
    kv_length: options.KvLength = None,
    capacity: options.Capacity = None,
    symbolic: Annotated[
        bool, typer.Option("--symbolic", help="The sizes are those to measure at; dims stay symbolic.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="Of the workloads: float32, bfloat16 or float16.")] = None,
    weights: Annotated[Literal["int8"] | None, typer.Option("--weights", help="As of `mhsa compile`.")] = None,
    threads: options.Threads = None,
    records: Annotated[
        Path | None, typer.Option("--records", metavar="FILE", help="Where records go, instead of your own file.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Of the studies' database; SQLite beside the records if not given."),
    ] = None,
    study: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the studies, instead of one that follows from what is tuned.")
    ] = None,
    against: Annotated[str, typer.Option(help="Peers to show, separated by commas; an empty text is none.")] = "torch",
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="After the search measure all that is left, however long it takes.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the search: .svg, .png or .pdf.")] = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Find the fastest config of each operation on a device, and write it down: `mhsa compile` reads that.

    Dims that are not given stay symbolic, and are measured at B = 1, L = 128, S = L. What was measured is kept in the
    studies' database: the same command goes on where it ended, also after a kill. Exit code 1 where the tuned artifact
    is over its error budget.
    """
    source, device = _arguments(arguments or [], on)
    if plot is not None:
        drawing.check_path(plot)
    peers = _peers(against) if on == _LOCAL else ()
    sources.require_compiler()
    profile = _profile(target)
    stated = options.stated_dims(batch, length, kv_length, capacity)
    given = _Given(source, workload or [], dtype, stated, symbolic, weights, seed)
    given.check()
    file = records or profile.own_records()
    command = _Command(
        profile, file, storage or _database(file), study, threads, seconds, trials, seed, exhaustive, peers, json
    )
    outcomes: dict[str, _Outcome] = {}
    with command.session(on, device) as session:
        for case in given.cases():
            outcomes[case.name] = command.tuned(case, session, local=on == _LOCAL)
    if json:
        output.print_json(_as_json(outcomes, file))
    if plot is not None:
        tuning_plots.searches({name: outcome.report for name, outcome in outcomes.items()}, plot)
    if any(o.gain is not None and o.gain.error_share > 1 for o in outcomes.values()):
        raise typer.Exit(1)


def _arguments(arguments: list[str], on: str) -> tuple[Path | None, str | None]:
    """(the source, the device). Raises InputError."""
    most = 2 if on == _TRACKER else 1
    if len(arguments) > most:
        raise InputError(
            "arguments", "one source" if most == 1 else "a source and HOST:PORT/KEY", repr(arguments[most])
        )
    if on != _TRACKER:
        return (Path(arguments[0]) if arguments else None), None
    if not arguments or ":" not in arguments[-1]:
        hint = "Such as: mhsa tune spec.toml --on tracker 127.0.0.1:9190/pi"
        raise InputError(
            "--on tracker", "HOST:PORT/KEY behind it", repr(arguments[-1]) if arguments else "nothing", hint
        )
    return (Path(arguments[0]) if len(arguments) == 2 else None), arguments[-1]


def _peers(against: str) -> tuple[str, ...]:
    from mhsa_compile import peers

    return tuple(peer.name for peer in peers.find(list(filter(None, map(str.strip, against.split(","))))))


def _profile(target: str) -> TargetProfile:
    from mhsa_compile.profile import load_profile

    return load_profile(target)


def _database(records: Path) -> str:
    records.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{records.resolve().with_suffix('.studies.db')}"


@dataclass(frozen=True)
class _Case:
    """One thing to tune: what `compile` takes, at `dims`, and the sizes of what stays symbolic."""

    name: str
    source: Any
    dims: dict[str, int]
    sizes: dict[str, int]
    weights: str | None


@dataclass(frozen=True)
class _Given:
    source: Path | None
    workloads: list[str]
    dtype: str | None
    stated: dict[str, int]
    symbolic: bool
    weights: str | None
    seed: int

    def check(self) -> None:
        """Raises InputError and ModelError for arguments that do not go together."""
        if self.workloads and (self.source is not None or self.stated):
            hint = "A workload brings its own spec and dims."
            raise InputError("--workload", "it alone", "a source or dims beside it", hint)
        if self.dtype is not None and not self.workloads:
            raise InputError("--dtype", "it with --workload", f"{self.dtype!r} alone", "A source states its own dtype.")
        if not self.workloads:
            sources.resolve(self.source, {})

    def cases(self) -> Iterator[_Case]:
        import torch

        from mhsa_compile.model import MultiHeadAttention, ScaledDotProductAttention
        from mhsa_compile.workloads import choose

        torch.manual_seed(self.seed)
        if not self.workloads:
            sizes = _DEFAULT_DIMS | self.stated
            sizes.setdefault("S", sizes["L"])
            dims = {} if self.symbolic else self.stated
            yield _Case(str(self.source), sources.resolve(self.source, {}), dims, sizes, self.weights)
            return
        for workload in choose(self.workloads):
            chosen = workload.at(self.dtype or workload.spec.dtype)
            module = MultiHeadAttention if chosen.kind == "block" else ScaledDotProductAttention
            dims = {} if self.symbolic else chosen.dims
            yield _Case(chosen.name, module(chosen.spec).eval(), dims, chosen.dims, self.weights)


@dataclass(frozen=True)
class _Outcome:
    report: Report
    gain: Gain | None
    peers: dict[str, float]  # name -> its time by that of the default artifact
    left: list[Task]  # to TVM, what no kernel claims
    rest: list[TunedRest]  # those of them that were tuned


@dataclass(frozen=True)
class _Command:
    profile: TargetProfile
    records: Path
    storage: str
    study: str | None
    threads: int | None
    seconds: float
    trials: int | None
    seed: int
    exhaustive: bool
    peers: tuple[str, ...]
    json: bool

    def session(self, on: str, device: str | None) -> AbstractContextManager[Session]:
        from mhsa_compile import sessions

        if device is None:
            return sessions.local(self.threads)
        host, port, key = _tracker(device)
        return sessions.tracker(host, port, key)

    def tuned(self, case: _Case, session: Session, local: bool) -> _Outcome:
        from mhsa_compile import leftovers, meta, pipeline
        from mhsa_compile.tune import Request, tune

        default, peers = self._default(case, session.threads) if local else (None, {})
        imported = pipeline.imported(case.source, dims=case.dims, weights=case.weights)
        rest = leftovers.tasks(imported.module, self.profile)
        for_rest = REST_SHARE * self.seconds if any(not task.reason for task in rest) else 0.0
        request = Request(
            sizes=case.sizes,
            records=self.records,
            storage=self.storage,
            known=tuple(
                sources.read_records({*self.profile.records(), *([self.records] if self.records.is_file() else [])})
            ),
            study=self.study,
            seconds=self.seconds - for_rest,
            trials=self.trials,
            seed=self.seed,
            exhaustive=self.exhaustive,
        )
        with tuning_view.live(case.name, self.seconds, peers) as watch:
            report = tune(imported.ops, self.profile, session, request, watch=watch)
        with output.stages() as stage:
            tuned = meta.tune_all(
                rest, self.profile, session, for_rest, self.records,
                trials=self.trials, seed=self.seed, tell=lambda name: stage(f"tune {name} with MetaSchedule"),
            )  # fmt: skip
        gained = None if default is None else self._gain(case, default, session.threads)
        if not self.json:
            tuning_view.show(case.name, report, gained, peers, self.records)
            tuning_view.show_rest(rest, tuned)
        return _Outcome(report, gained, peers, rest, tuned)

    def _default(self, case: _Case, threads: int) -> tuple[Artifact, dict[str, float]]:
        """The artifact without records, and how its peers compare."""
        from mhsa_compile.bench import bench
        from mhsa_compile.pipeline import compile

        with output.stages() as stage:
            stage(f"compile {case.name}")
            artifact = compile(case.source, self.profile, dims=case.dims, weights=case.weights, records=())
            if not self.peers:
                return artifact, {}
            stage("time " + ", ".join(self.peers))
            report = bench(
                artifact, against=self.peers, dims=_open(artifact, case.sizes), threads=threads, seconds=_PEER_SECONDS
            )
        return artifact, {row.name: row.ratio for row in report.rows[1:] if row.ratio is not None}

    def _gain(self, case: _Case, default: Artifact, threads: int) -> Gain:
        from mhsa_compile.gain import gain
        from mhsa_compile.pipeline import compile

        with output.stages() as stage:
            stage("compile with the records")
            records = sources.read_records([self.records])
            tuned = compile(case.source, self.profile, dims=case.dims, weights=case.weights, records=records)
            stage("time it against the default")
            return gain(default, tuned, dims=_open(default, case.sizes), threads=threads, seconds=_GAIN_SECONDS)


def _open(artifact: Artifact, sizes: dict[str, int]) -> dict[str, int]:
    """Of sizes, those of dims that the artifact leaves open."""
    found = {dim for info in artifact.manifest.inputs for dim in info.dims}
    return {symbol: size for symbol, size in sizes.items() if symbol in found}


def _tracker(device: str) -> tuple[str, int, str]:
    place, _, key = device.partition("/")
    host, _, port = place.rpartition(":")
    if not (host and port.isdecimal() and key):
        raise DeviceError("--on tracker", "HOST:PORT/KEY, such as 127.0.0.1:9190/pi", repr(device))
    return host, int(port), key


def _as_json(outcomes: dict[str, _Outcome], records: Path) -> dict[str, Any]:
    each = {name: _summary(outcome) for name, outcome in outcomes.items()}
    total = {key: sum(one[key] for one in each.values()) for key in ("trials", "failures", "default_us", "best_us")}
    return {
        **total,
        "speedup": total["default_us"] / total["best_us"],
        "records": records,
        "sources": {
            n: each[n] | {"gain": o.gain, "peers": o.peers, "ops": o.report.ops, "rest": _rest(o)}
            for n, o in outcomes.items()
        },
    }


def _rest(outcome: _Outcome) -> list[dict[str, Any]]:
    """What no kernel claims: what MetaSchedule came to, or why it was not asked."""
    refused = [{"name": task.name, "reason": task.reason} for task in outcome.left if task.reason]
    names = ("default_us", "best_us", "noise", "trials", "failures")
    return [{"name": t.task.name, **{name: getattr(t, name) for name in names}} for t in outcome.rest] + refused


def _summary(outcome: _Outcome) -> dict[str, Any]:
    """Times of the whole artifact where they were measured, else the sums over its operations."""
    report, whole = outcome.report, outcome.gain or outcome.report
    return {
        "trials": report.trials,
        "failures": report.failures,
        "default_us": whole.default_us,
        "best_us": whole.best_us,
        "speedup": whole.default_us / whole.best_us if outcome.gain is None else outcome.gain.speedup,
        "seconds": report.seconds,
    }

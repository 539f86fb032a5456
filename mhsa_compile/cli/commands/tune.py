"""`mhsa tune`: search, measure, and write records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mhsa_bench.plots import figure, tuning_plots
from mhsa_compile.cli.commands import tune_run, tune_view
from mhsa_compile.cli.commands.tune_run import Settings, TunedSource
from mhsa_compile.cli.common import options, output, sources
from mhsa_compile.cli.common.cases import (
    BUNDLE,
    LOCAL,
    Case,
    CaseOptions,
    split,
)
from mhsa_compile.errors import InputError, RecordsError
from mhsa_compile.files import places
from mhsa_compile.hardware.profile import TargetProfile, load_profile

if TYPE_CHECKING:
    from mhsa_compile.tuning.measure.rpc_server import Address


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
    weights: Annotated[Literal["int8"] | None, typer.Option("--weights", help="As of `mhsa compile`.")] = None
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
            stated=self.dims.stated(),
            symbolic=self.symbolic,
            around=self.around,
            weights=self.weights,
            seed=self.seed,
        )

    def settings(self, profile: TargetProfile) -> Settings:
        records = self.records or profile.own_records()
        return Settings(
            profile=profile,
            records=records,
            storage=self.storage or _database(records),
            study=self.study,
            threads=self.threads,
            seconds=self.seconds,
            trials=self.trials,
            seed=self.seed,
            exhaustive=self.exhaustive,
        )


def tune(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE] [HOST:PORT/KEY]", help="An .onnx file or a spec .toml; behind it the device of a tracker."
        ),
    ] = None,
    *,
    given: TuneOptions,
) -> None:
    """Find the fastest config of each operation on a device, and write it down: `mhsa compile` reads that.

    Dims that are not given stay symbolic, and are measured at B = 1, L = 128, S = L, C = 1024. What was measured is
    kept in the studies' database: the same command goes on where it ended, also after a kill. Exit code 1 where the
    tuned artifact is over its error budget.
    """
    source, tracker = split(arguments or [], given.on)
    _check(given)
    cases = given.cases(source)
    cases.check()
    peers = options.peers(given.against)
    profile = load_profile(given.target)
    sources.require_compiler()
    settings = given.settings(profile)
    _read(settings.storage, given.results)
    if given.on == BUNDLE and given.out is not None and given.results is None:
        return _bundle(cases, settings, given.out, given.json)
    outcomes = {}
    for name, outcome in _outcomes(cases, settings, given, tracker, peers):
        outcomes[name] = outcome
        if not given.json:
            tune_view.show(name, outcome.report, outcome.gain, outcome.peers, settings.records)
            tune_view.show_rest(outcome.left, outcome.rest)
    _finish(outcomes, settings, given)


def _finish(outcomes: dict[str, TunedSource], settings: Settings, given: TuneOptions) -> None:
    """What is said of all outcomes together, and the exit code."""
    if given.json:
        output.print_json(tune_run.as_json(outcomes, settings.records))
    if given.plot is not None:
        tuning_plots.searches({name: outcome.report for name, outcome in outcomes.items()}, given.plot)
    if any(outcome.gain is not None and not outcome.gain.error_share <= 1 for outcome in outcomes.values()):
        raise typer.Exit(1)


def _outcomes(
    cases: CaseOptions,
    settings: Settings,
    given: TuneOptions,
    tracker: tuple[Address, str] | None,
    peers: tuple[str, ...],
) -> Iterator[tuple[str, TunedSource]]:
    if given.results is not None:
        case = _only(cases)
        yield case.name, tune_run.read_results(case, settings, given.results)
        return
    with settings.session(tracker) as session:
        tune_view.show_device(session.device, settings.profile)
        for case in cases.cases():
            if given.on == LOCAL:
                yield case.name, tune_run.search_here(case, settings, session, peers)
            else:
                yield case.name, tune_run.search(case, settings, session, {})


def _check(given: TuneOptions) -> None:
    """Raises InputError and OutputError for options that do not go together, before anything is done."""
    if given.on == BUNDLE and (given.out is None) == (given.results is None):
        got = "both" if given.out else "neither"
        raise InputError("--on bundle", "-o WORK.zip, or later --results RESULTS.json", got)
    if given.on != BUNDLE and given.out is not None:
        raise InputError("-o", "it with --on bundle", f"--on {given.on}", "Records go to --records.")
    if given.plot is not None:
        figure.check_path(given.plot)


def _read(storage: str, results: Path | None) -> None:
    """What is given is looked at before the seconds that importing PyTorch and a source take. Raises InputError,
    OutputError, BundleError and InstallationError."""
    from mhsa_compile.tuning.search.study_storage import open_storage

    if results is not None:
        from mhsa_compile.tuning.measure.work_results import read

        read(results)
    open_storage(storage)


def _database(records: Path) -> str:
    place = places.resolved(records, RecordsError, "--records")
    places.made(place.parent, RecordsError, "--records")
    return f"sqlite:///{place.with_suffix('.studies.db')}"


def _only(cases: CaseOptions) -> Case:
    first, *others = cases.cases()
    if others:
        raise InputError("--on bundle", "one source", f"{1 + len(others)} workloads", "Make a bundle of each.")
    return first


def _bundle(cases: CaseOptions, settings: Settings, out: Path, json: bool) -> None:
    count = tune_run.write_bundle(_only(cases), settings, out)
    if json:
        output.print_json({"bundle": out, "candidates": count})
        return
    output.line(f"{out}: {count} candidates. On the device: mhsa measure {out.name} -o results.json")
    output.line("Then here the same command with --results results.json instead of --on bundle and -o")

"""`mhsa bench`: this project and others on the same inputs, interleaved in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mhsa_compile.cli import options, output, sources
from mhsa_compile.errors import InputError

if TYPE_CHECKING:
    from mhsa_compile.artifact import Artifact
    from mhsa_compile.bench import Report, Row

_DEFAULT_WORKLOAD = "base128"
_DEFAULT_DIMS = {"B": 1, "L": 128}  # S is L unless given


def bench(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="DIR_OR_SOURCE", help="An artifact, an .onnx file or a spec .toml."),
    ] = None,
    *,
    workload: Annotated[
        list[str] | None, typer.Option(help="Instead of a source: tiny, base128, ...; repeat it for more, or say all.")
    ] = None,
    against: Annotated[
        str, typer.Option(help="Peers, separated by commas; an empty text is none.")
    ] = "torch,onnxruntime",
    batch: options.Batch = None,
    length: options.Length = None,
    kv_length: options.KvLength = None,
    threads: options.Threads = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time for each candidate.")] = 2.0,
    json: options.Json = False,
) -> None:
    """Time a compiled attention against other runtimes: medians, ratios, and the share of this machine's FMA peak.

    Without a source: the workload base128. Without --batch, --length and --kv-length: what the artifact fixes, else
    B = 1, L = 128, S = L. What is not compiled yet is compiled for these sizes.
    """
    peers = _peers(against)
    stated = options.stated_dims(batch, length, kv_length)
    if workload and (source is not None or stated):
        raise InputError(
            "--workload", "it alone", "a source or dims beside it", "A workload brings its own spec and dims."
        )
    sources.require_compiler()
    from mhsa_compile.bench import bench as measure

    reports: dict[str, Report] = {}
    for name, artifact, dims in _candidates(source, workload, stated):
        with output.stages() as stage:
            stage(f"time {name}")
            reports[name] = measure(artifact, against=peers, dims=dims, threads=threads, seconds=seconds)
        if not json:
            _show(name, reports[name])
    if json:
        output.print_json(reports)


def _peers(against: str) -> tuple[str, ...]:
    """Names, checked before anything is compiled."""
    from mhsa_compile import peers

    names = filter(None, map(str.strip, against.split(",")))
    return tuple(peer.name for peer in peers.find(names))


def _candidates(
    source: Path | None, names: list[str] | None, stated: dict[str, int]
) -> Iterator[tuple[str, Artifact, dict[str, int]]]:
    """(name, artifact, dims), compiled one at a time."""
    if source is None:
        yield from _workloads(names or [_DEFAULT_WORKLOAD])
    elif source.is_dir():
        from mhsa_compile.artifact import Artifact

        artifact = Artifact.open(source)
        open_dims = {dim for info in artifact.manifest.inputs for dim in info.dims}
        defaults = {symbol: size for symbol, size in _with_defaults(stated).items() if symbol in open_dims}
        yield str(source), artifact, defaults | stated
    else:
        dims = _with_defaults(stated)
        yield str(source), sources.compile_with_progress(source, {}, "native", dims=dims, seed=0), dims


def _with_defaults(stated: dict[str, int]) -> dict[str, int]:
    dims = {**_DEFAULT_DIMS, **stated}
    dims.setdefault("S", dims["L"])
    return dims


def _workloads(names: list[str]) -> Iterator[tuple[str, Artifact, dict[str, int]]]:
    from mhsa_compile.pipeline import compile
    from mhsa_compile.workloads import WORKLOADS

    known = {workload.name: workload for workload in WORKLOADS}
    if unknown := set(names) - known.keys() - {"all"}:
        raise InputError("--workload", f"all or one of {', '.join(known)}", repr(min(unknown)))
    for name in known if "all" in names else names:
        workload = known[name]
        with output.stages() as stage:
            stage(f"compile {name}")
            artifact = compile(workload.spec, dims=workload.dims)
        yield name, artifact, workload.dims


def _show(name: str, report: Report) -> None:
    title = f"{name}, {output.assignments(report.dims)}: {report.threads} threads, "
    title += f"FMA peak {report.peak_gflops:.0f} GFLOP/s"
    if report.disturbed:
        title += f" ±{report.peak_spread / 2:.0%}: something else was running, measure again"
    columns = ("runtime", "median µs>", "spread>", "ratio>", "GFLOP/s>", "of peak>", "difference>")
    output.print_table(title, columns, map(_cells, report.rows))
    for row in report.rows:
        if row.missing:
            typer.echo(f"{row.name} is missing: {row.missing}")


def _cells(row: Row) -> tuple[str, ...]:
    def cell(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    return (
        row.name,
        cell(row.median_us, ",.0f"),
        cell(row.spread, ".1%"),
        cell(row.ratio, ".2f"),
        cell(row.gflops, ",.0f"),
        cell(row.share_of_peak, ".0%"),
        cell(row.max_difference, ".1e"),
    )

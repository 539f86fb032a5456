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
    from mhsa_compile.bench import Report

_PEERS = ("torch", "onnxruntime")
_DEFAULT_DIMS = {"B": 1, "L": 128}  # S is L unless given


def bench(
    source: Annotated[
        Path | None,
        typer.Argument(metavar="DIR_OR_SOURCE", help="An artifact, an .onnx file or a spec .toml; else all workloads."),
    ] = None,
    *,
    workload: Annotated[
        list[str] | None, typer.Option(help="A workload of the design's table, such as base128; repeat it for more.")
    ] = None,
    against: Annotated[str, typer.Option(help="Peers, separated by commas; an empty text is none.")] = ",".join(_PEERS),
    batch: options.Batch = None,
    length: options.Length = None,
    kv_length: options.KvLength = None,
    threads: options.Threads = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time for each candidate.")] = 2.0,
    json: options.Json = False,
) -> None:
    """Time a compiled attention against other runtimes: medians, ratios, and the share of this machine's FMA peak.

    Without --batch, --length and --kv-length: B = 1, L = 128, S = L. What is not compiled yet is compiled for them.
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
            _show(name, dims, reports[name])
    if json:
        output.print_json(reports)


def _peers(against: str) -> tuple[str, ...]:
    from mhsa_compile import installation

    peers = tuple(filter(None, map(str.strip, against.split(","))))
    if unknown := set(peers) - set(_PEERS):
        raise InputError("--against", f"some of {','.join(_PEERS)}", repr(",".join(sorted(unknown))))
    installation.require(*peers, extra="bench")
    return peers


def _candidates(
    source: Path | None, names: list[str] | None, stated: dict[str, int]
) -> Iterator[tuple[str, Artifact, dict[str, int]]]:
    """(name, artifact, dims), compiled one at a time."""
    if source is None:
        yield from _workloads(names)
        return
    dims = {**_DEFAULT_DIMS, **stated}
    dims.setdefault("S", dims["L"])
    if source.is_dir():
        from mhsa_compile.artifact import Artifact

        yield str(source), Artifact.open(source), dims
    else:
        yield str(source), sources.compile_with_progress(source, {}, "native", dims=dims, seed=0), dims


def _workloads(names: list[str] | None) -> Iterator[tuple[str, Artifact, dict[str, int]]]:
    from mhsa_compile.bench import WORKLOADS
    from mhsa_compile.pipeline import compile

    known = {workload.name: workload for workload in WORKLOADS}
    if unknown := set(names or ()) - known.keys():
        raise InputError("--workload", f"one of {', '.join(known)}", repr(min(unknown)))
    for name in names or known:
        workload = known[name]
        dims = {"B": workload.B, "L": workload.L, "S": workload.S}
        with output.stages() as stage:
            stage(f"compile {name}")
            artifact = compile(workload.spec, "native", dims=dims)
        yield name, artifact, dims


def _show(name: str, dims: dict[str, int], report: Report) -> None:
    rows = (
        (row.name, f"{row.median_us:,.0f}", f"{row.spread:.1%}", f"{row.ratio:.2f}", f"{row.share_of_peak:.0%}")
        for row in report.rows
    )
    title = f"{name}, {output.assignments(dims)}: FMA peak {report.peak_gflops:.0f} GFLOP/s"
    output.print_table(title, ("runtime", "median µs>", "spread>", "ratio>", "of peak>"), rows)

"""`mhsa profile`: what a call spends its time on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhsa_compile.cli.common import options, output
from mhsa_compile.errors import InstallationError
from mhsa_compile.runtime.misfits import shape_text

if TYPE_CHECKING:
    from mhsa_compile.runtime.artifact.manifest import Manifest
    from mhsa_compile.runtime.profile.call_profile import CallProfile, OpProfile

_SHOWN = 14
"""Rows of operations, so that all fits on a screen; the others are one row more."""


def profile(
    artifact: options.ArtifactFolder,
    *,
    inputs: options.InputArrays = None,
    dims: options.StatedDims,
    threads: options.Threads = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long the call is made again and again.")] = 1.0,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write one call for chrome://tracing or ui.perfetto.dev.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="All operations, with their configs.")] = False,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Show what each operation of a call takes (by default B = 1, L = S = 128), and how near it is to the limit."""
    from mhsa_compile.cli.common import arrays
    from mhsa_compile.files.atomic_write import check_file
    from mhsa_compile.runtime.compiled_attention import load

    if trace is not None:
        check_file(trace, "--trace")  # before the work, not after it
    arrays_by_name, sizes = arrays.read(inputs or ()), dims.sizes()
    attention = load(artifact, threads=threads)
    dims.check_symbols(attention.inputs)
    arguments = arrays.complete(arrays_by_name, attention.inputs, sizes, seed)
    report = attention.profile(**arguments, seconds=seconds)
    if trace is not None:
        report.save_trace(trace)
    report, missing = _against_limits(report if json or verbose else report.alike_together(), attention.manifest)
    if json:
        sums = {"ops_us": report.ops_us, "between_us": report.between_us, "around_us": report.around_us}
        rows = [asdict(op) | {"gflops": op.gflops, "gbs": op.gbs} for op in report.by_time()]
        summary = asdict(report) | sums | {"ops": rows, "trace": trace, "no_limit": missing}
        summary.pop("events")
        output.print_json(summary)
        return
    shapes = " ".join(f"{name} {shape_text(array.shape)}" for name, array in arguments.items())
    _show(f"{artifact}: {shapes}, {report.threads} threads", report, verbose)
    if missing:
        output.line(f"Shares of the limit are measured by what compiles: {missing}")


def _against_limits(report: CallProfile, manifest: Manifest) -> tuple[CallProfile, str | None]:
    """(with shares of the limit, or why there are none)."""
    from mhsa_compile.cli.common.sources import require_compiler

    try:
        require_compiler()
    except InstallationError as error:
        return report, str(error)
    from mhsa_bench.limits import measured_limits

    limits = measured_limits(manifest, report.threads)
    return report.against(limits.gflops, limits.bandwidth_gbs, limits.cache_bytes), None


def _show(title: str, report: CallProfile, verbose: bool) -> None:
    rows = report.by_time()
    head = rows if verbose or len(rows) <= _SHOWN + 1 else rows[:_SHOWN]
    columns = ("operation", "kind", "kernel", "us>", "share>", "GFLOP/s>", "GB/s>", "of the limit>", "CPUs>")
    cells = [_cells(op, report.call_us) for op in head]
    if rest := rows[len(head) :]:
        us = sum(op.us for op in rest)
        cells.append((f"{len(rest)} others", "", "", f"{us:,.1f}", _share(us, report.call_us), "", "", "", ""))
    for words, us in (
        ("memory, shapes, TVM's VM", report.between_us),
        ("checks of arguments, Python", report.around_us),
    ):
        cells.append((words, "", "", f"{us:,.1f}", _share(us, report.call_us), "", "", "", ""))
    output.print_table(title, columns, cells)
    if verbose:
        output.print_table("", ("operation", "runs>", "MFLOP>", "KiB>", "config"), map(_details, head))
    output.line(
        f"A call takes {report.call_us:,.1f} us (median of {report.rounds}), the compiled function in it "
        f"{report.function_us:,.1f}, its operations {report.ops_us:,.1f}"
    )
    if report.disturbed:
        output.line(f"Something else was running (times spread by {report.spread:.0%}): the parts need not add up")


def _cells(op: OpProfile, call_us: float) -> Sequence[Any]:
    name = op.name if op.runs == 1 else f"{op.name}, {op.runs} times"
    limit = "" if op.share_of_limit is None else f"{op.share_of_limit:.0%}"
    return (name, op.kind, op.kernel, f"{op.us:,.1f}", _share(op.us, call_us), _number(op.gflops), _number(op.gbs),
            limit, f"{op.cpus:.1f}")  # fmt: skip


def _details(op: OpProfile) -> Sequence[Any]:
    flops = "" if op.flops is None else f"{op.flops / 1e6:,.2f}"
    return op.name, op.runs, flops, "" if op.bytes is None else f"{op.bytes / 1024:,.0f}", output.assignments(op.config)


def _share(us: float, call_us: float) -> str:
    return f"{us / call_us:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"

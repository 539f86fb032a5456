"""Every workload of mhsa_compile/bench/workloads.py against every peer: a table, all the figures as JSON, and pictures.

    python benchmarks/run.py [--workload NAME|GROUP ...] [--dtype float32 bfloat16] [--threads 1 2] [--json FILE]
    python benchmarks/run.py --read FILE --pictures DIR        # draw again what was measured

It needs `pip install 'mhsa-compile[compile,bench]'`. How it is timed: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import figures as published
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mhsa_bench.bench import bench
from mhsa_bench.peers.registry import PEERS
from mhsa_bench.plots import bench_plots
from mhsa_bench.report import BenchReport, BenchRow
from mhsa_compile.bench.workloads import Workload, choose, compile_workload
from mhsa_compile.hardware import host
from mhsa_compile.spec.checks import DTYPES

PACKAGES = ("onnxruntime", "openvino", "iree-base-compiler", "numpy")


@dataclass
class Figures(published.Figures):
    """Reports by threads, then by workload."""

    seconds: float
    symbolic: bool
    reports: dict[int, dict[str, BenchReport]] = field(default_factory=dict)
    crashed: list[str] = field(default_factory=list)


def main() -> int:
    options = parse()
    console = Console(stderr=True)
    figures = published.read(options.read, Figures) if options.read else measured(options, console)
    for threads, reports in figures.reports.items():
        Console(width=None if sys.stdout.isatty() else 160).print(table(reports, threads))
        if options.pictures:
            draw(reports, threads, options.pictures)
    for name in figures.crashed:
        console.print(f"{name}: its process died", style="red")
    every = [report for reports in figures.reports.values() for report in reports.values()]
    return 0 if every and not figures.crashed and all(report.ok for report in every) else 1


def parse() -> argparse.Namespace:
    peers = [peer.name for peer in PEERS]
    parser = published.command_line(__doc__)
    parser.add_argument(
        "--workload", nargs="+", default=["all"], metavar="NAME", help="names or groups; by default all"
    )
    parser.add_argument("--against", nargs="*", choices=peers, default=peers, metavar="PEER", help=", ".join(peers))
    parser.add_argument(
        "--dtype", nargs="+", choices=DTYPES, default=["float32"], metavar="DTYPE", help=", ".join(DTYPES)
    )
    parser.add_argument("--symbolic", action="store_true", help="leave batch and lengths symbolic; else they are fixed")
    parser.add_argument("--threads", nargs="+", type=int, help="by default 1, and the CPUs this process may use")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each candidate of each workload (default: 2)")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="draw into this folder")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take the figures from this JSON, measure nothing")
    return parser.parse_args()


def measured(options: argparse.Namespace, console: Console) -> Figures:
    """Measures each workload in a process of its own: a peer that crashes takes no other along. The JSON grows."""
    figures = Figures.here(PACKAGES, options.seconds, options.symbolic)
    jobs = [
        (workload.at(dtype), threads)
        for threads in options.threads or sorted({1, host.allowed_cpus()})
        for dtype in options.dtype
        for workload in choose(options.workload)
        if dtype == "float32" or workload.kind == "block" or workload.group in ("cores", "decode")
    ]
    for workload, threads in track(jobs, "compile and time", console=console, disable=not console.is_terminal):
        if not console.is_terminal:
            console.print(f"{workload.name}, {threads} threads")
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                report = pool.submit(measure, workload, threads, options).result()
                figures.reports.setdefault(threads, {})[workload.name] = report
            except BrokenProcessPool:
                figures.crashed.append(f"{workload.name}, {threads} threads")
        published.write(figures, options.json)
    return figures


def measure(workload: Workload, threads: int, options: argparse.Namespace) -> BenchReport:
    artifact = compile_workload(workload, symbolic=options.symbolic and not workload.spec.needs_lengths)
    return bench(artifact, against=options.against, dims=workload.dims, threads=threads, seconds=options.seconds)


def table(reports: dict[str, BenchReport], threads: int) -> Table:
    """Ours, its share of the limit, its error, then each peer's time as a multiple of ours."""
    peers = list(dict.fromkeys(row.name for report in reports.values() for row in report.rows[1:]))
    result = Table(
        title=f"{threads} threads; a peer's column is its time / ours", title_justify="left", box=box.SIMPLE_HEAD
    )
    result.add_column("workload")
    for column in ("ms", "spread", "of limit", "bound by", "error / budget", *peers):
        result.add_column(column, justify="right")
    for name, report in reports.items():
        ours, limit = report.ours, report.floor.limit if report.floor else "-"
        shown = (f"{(ours.median_us or 0) / 1e3:.3f}", f"{ours.spread:.1%}", f"{ours.share_of_limit:.0%}", limit)
        ratios = {row.name: row for row in report.rows}
        cells = (ratio(ratios.get(peer), report) for peer in peers)
        style = "red" if report.disturbed or not report.ok else ""
        result.add_row(name, *shown, f"{ours.error_share:.2f}", *cells, style=style)
    best = [report.best_peer.ratio for report in reports.values() if report.best_peer and report.best_peer.ratio]
    if best:
        mean = prod(best) ** (1 / len(best))
        result.caption = (
            f"Fastest peer of each row / ours: {min(best):.2f} to {max(best):.2f}, geometric mean {mean:.2f}."
        )
    return result


def ratio(row: BenchRow | None, report: BenchReport) -> str:
    if row is None or row.ratio is None:
        return "missing"
    return f"[bold]{row.ratio:.2f}[/bold]" if row is report.best_peer else f"{row.ratio:.2f}"


def draw(reports: dict[str, BenchReport], threads: int, folder: Path) -> None:
    """Draws shares-DTYPE-Nt.svg for each dtype, growth-Nt.svg for float32, and roofline-Nt.svg for all."""
    folder.mkdir(parents=True, exist_ok=True)
    for dtype in dict.fromkeys(report.dtype for report in reports.values()):
        own = {name: report for name, report in reports.items() if report.dtype == dtype}
        bench_plots.shares(own, folder / f"shares-{dtype}-{threads}t.svg")
    exact = {name: report for name, report in reports.items() if report.dtype == "float32"}
    if any(name in exact for name in (*bench_plots.DENSE, *bench_plots.WINDOW)):
        bench_plots.growth(exact, folder / f"growth-{threads}t.svg")
    bench_plots.roofline(reports, folder / f"roofline-{threads}t.svg")


if __name__ == "__main__":
    sys.exit(main())

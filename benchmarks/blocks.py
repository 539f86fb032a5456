"""Every workload of mhsa_compile/workloads.py against its peers: a line each, and all the figures as JSON.

    python benchmarks/blocks.py [--workload NAME ...] [--symbolic] [--json FILE]

It needs `pip install 'mhsa-compile[compile,bench]'`. How it is timed: docs/performance.md.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mhsa_compile as mhsa
from mhsa_compile import host
from mhsa_compile.bench import Report, bench
from mhsa_compile.installation import installed_version
from mhsa_compile.peers import PEERS
from mhsa_compile.workloads import WORKLOADS, Workload

PACKAGES = ("apache-tvm", "torch", "onnxruntime", "numpy")


def main() -> int:
    options = parse()
    chosen = [workload for workload in WORKLOADS if workload.name in options.workload]
    console = Console(stderr=True)
    reports = {
        workload.name: measure(workload, options)
        for workload in track(chosen, "compile and time", console=console, disable=not console.is_terminal)
    }
    Console(width=None if sys.stdout.isatty() else 140).print(table(reports, options.against))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(record(reports, options)), indent=2))
    return 0


def parse() -> argparse.Namespace:
    names = [workload.name for workload in WORKLOADS]
    peers = [peer.name for peer in PEERS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--workload", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--against", nargs="*", choices=peers, default=peers, metavar="PEER", help=", ".join(peers))
    parser.add_argument("--symbolic", action="store_true", help="leave batch and lengths symbolic; else they are fixed")
    parser.add_argument("--threads", type=int, help="by default the CPUs this process may use")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each candidate of each workload (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure, with machine and versions")
    return parser.parse_args()


def measure(workload: Workload, options: argparse.Namespace) -> Report:
    artifact = mhsa.compile(workload.spec, dims=None if options.symbolic else workload.dims)
    return bench(
        artifact, against=options.against, dims=workload.dims, threads=options.threads, seconds=options.seconds
    )


def table(reports: dict[str, Report], against: list[str]) -> Table:
    """Milliseconds of ours, then each peer's time as a multiple of ours: above 1, ours is faster."""
    result = Table(title="float32 blocks", title_justify="left")
    result.add_column("workload")
    for column in ("ms", "spread", "of peak", "peak GFLOP/s", *(f"{peer} / ours" for peer in against)):
        result.add_column(column, justify="right")
    for name, report in reports.items():
        ours, *others = report.rows
        ratios = ("missing" if row.ratio is None else f"{row.ratio:.2f}" for row in others)
        assert ours.median_us is not None  # None is for peers that are missing
        figures = (f"{ours.median_us / 1e3:.3f}", f"{ours.spread:.1%}", f"{ours.share_of_peak:.0%}")
        peak = f"{report.peak_gflops:.0f}" + (" disturbed" if report.disturbed else "")
        result.add_row(name, *figures, peak, *ratios)
    return result


def record(reports: dict[str, Report], options: argparse.Namespace) -> dict[str, Any]:
    """What a published figure must state beside its numbers, then the reports."""
    return {
        "date": date.today(),
        "cpu": host.cpu_model(),
        "cpus": host.allowed_cpus(),
        "versions": {"mhsa-compile": mhsa.__version__, **{name: installed_version(name) for name in PACKAGES}},
        "symbolic": options.symbolic,
        "seconds": options.seconds,
        "reports": reports,
    }


if __name__ == "__main__":
    sys.exit(main())

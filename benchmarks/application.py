"""How fast attention is inside a program: each candidate in a process of its own, unpinned, asleep while others run.

    python benchmarks/application.py [--workload blocks] [--situation alone torch ...] [--json FILE] [--picture FILE]
    python benchmarks/application.py --workload tiny --before build/old      # beside artifacts made earlier, by name

A situation is what the program does between two calls, or beside them; see SITUATIONS and CALLERS. Turns of 0.1 s go
round the candidates, back and forth; a figure is the median over the turns of the median call of a turn.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import figures as published
import msgspec
import numpy as np
from processes import WARM_UP, Times, Turn, answer_turns, in_turn, one_caller, rounds, started, timed_calls
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mhsa_compile as mhsa
from mhsa_bench.peers.peer import Problem
from mhsa_bench.peers.registry import find
from mhsa_bench.plots.figure import OURS, check_path, figure
from mhsa_compile.bench.workloads import Workload, choose, compile_workload
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.verification.random_inputs import random_inputs

SITUATIONS = {
    "alone": "one call after another",
    "idle": "20 ms of sleep before each call",
    "busy": "one call after another, while a process of low priority keeps one CPU busy",
    "openblas": "a product of 256 x 512 by 512 x 512 in NumPy before each call",
    "torch": "a torch.nn.Linear(512, 2048) on 64 rows before each call",
    "torch-idle": "the same Linear, then 20 ms of sleep, before each call",
}
CALLERS = (1, 2, 4, 8)
OWN, BEFORE = "mhsa_compile", "before"
"""Ourselves, and artifacts of an earlier version; `:own`, `:openmp` and `:1` behind them are other ways to load."""
PEERS = ("torch", "onnxruntime-fused", "openvino")
IDLE = 0.02
SETS = max(CALLERS)  # of inputs


@dataclass
class Row:
    """One workload in one situation: by candidate, a figure for each turn.

    seconds   the median call
    slowest   the 99th percentile of the calls
    rate      calls a second, of all callers together
    """

    workload: str
    situation: str
    callers: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    slowest: dict[str, list[float]] = field(default_factory=dict)
    rate: dict[str, list[float]] = field(default_factory=dict)

    def add(self, candidate: str, times: Times) -> None:
        self.seconds.setdefault(candidate, []).append(median(times.calls))
        self.slowest.setdefault(candidate, []).append(float(np.quantile(times.calls, 0.99)))
        self.rate.setdefault(candidate, []).append(times.rate)

    def of(self, candidate: str) -> float:
        """Seconds of a call."""
        return median(self.seconds[candidate])

    def best_peer(self) -> str | None:
        peers = [name for name in self.seconds if not name.startswith((OWN, BEFORE))]
        return min(peers, key=self.of, default=None)


@dataclass
class Figures(published.Figures):
    """A row for each workload and situation."""

    threads: int
    rows: list[Row] = field(default_factory=list)


# The process of one candidate


def serve(candidate: str, folder: Path, sizes: dict[str, int], threads: int) -> None:
    """Answers turns, a line each, until its input ends."""
    answer_turns(_opened(candidate, folder, sizes, threads), lambda turn, calls: _take(turn, calls, threads))


@contextmanager
def _opened(candidate: str, folder: Path, sizes: dict[str, int], threads: int) -> Iterator[Sequence[Callable[[], Any]]]:
    """A call for each of several sets of inputs."""
    name, _, way = candidate.partition(":")
    artifact = Artifact.open(folder)
    sets = [random_inputs(artifact.manifest, sizes, seed) for seed in range(SETS)]
    if name in (OWN, BEFORE):
        pool = {"pool": way} if way in ("own", "openmp") else {}
        if way == "openmp":
            import torch  # noqa: F401
        attention = mhsa.load(artifact, threads=1 if way == "1" else threads, **pool)
        yield [lambda arrays=arrays: attention(**arrays) for arrays in sets]
        return
    problem = Problem(artifact, sets)
    (peer,) = find([name])
    with peer.open(problem, threads) as opened:
        yield opened.calls


def _take(turn: Turn, calls: Sequence[Callable[[], Any]], threads: int) -> Times:
    between = _between(turn.situation, threads)
    if turn.callers == 1:
        return one_caller(turn.seconds, calls, between)
    samples: list[list[float]] = []
    barrier = threading.Barrier(turn.callers + 1)

    def caller(number: int) -> None:
        call = in_turn(calls[number :: turn.callers])  # its own: some peers keep what a call needs beside its inputs
        call()
        barrier.wait()
        samples.append(timed_calls(turn.seconds, call, between))

    callers = [threading.Thread(target=caller, args=(number,)) for number in range(turn.callers)]
    for thread in callers:
        thread.start()
    barrier.wait()
    begin = time.perf_counter()
    for thread in callers:
        thread.join()
    elapsed = time.perf_counter() - begin
    return Times([seconds for one in samples for seconds in one], sum(len(one) + WARM_UP for one in samples) / elapsed)


def _between(situation: str, threads: int) -> Callable[[], Any]:
    """What the program does before each call."""
    if situation == "idle":
        return lambda: time.sleep(IDLE)
    if situation == "openblas":
        one, other = np.ones((256, 512), "f4"), np.ones((512, 512), "f4")
        return lambda: one @ other
    if not situation.startswith("torch"):
        return lambda: None
    import torch

    torch.set_num_threads(threads)
    layer, rows = _layer()

    def run() -> None:
        with torch.inference_mode():
            layer(rows)
        if situation == "torch-idle":
            time.sleep(IDLE)

    return run


@functools.cache
def _layer() -> tuple[Any, Any]:
    import torch

    return torch.nn.Linear(512, 2048), torch.randn(64, 512)


# The process that asks


BUSY = "import os, sys\nos.nice(19)\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextmanager
def _beside(situation: str) -> Iterator[None]:
    if situation != "busy":
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", BUSY, str(max(os.sched_getaffinity(0)))])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def measure(
    workload: Workload, folders: dict[str, Path], jobs: Sequence[tuple[str, int]], turns: int, figures: Figures
) -> None:
    """Adds a row for each job, a situation and a number of callers."""
    with ExitStack() as stack:
        sizes = msgspec.json.encode(workload.dims).decode()
        words = {name: [__file__, "--serve", name, str(f), sizes, str(figures.threads)] for name, f in folders.items()}
        candidates, missing = started(stack, words)
        figures.missing |= {f"{name}, {workload.name}": reason for name, reason in missing.items()}
        for situation, callers in jobs:
            row = Row(workload.name, situation, callers)
            with _beside(situation):
                for candidate in candidates:
                    candidate.take(Turn(situation, 0.05, callers))
                for name, times in rounds(candidates, Turn(situation, 0.1 * max(1, callers / 2), callers), turns):
                    row.add(name, times)
            figures.rows.append(row)


def main() -> int:
    options = _parse()
    if options.picture:
        check_path(options.picture, "--picture")
    figures = published.read(options.read, Figures) if options.read else _measured(options)
    published.show([table(figures), callers_table(figures)], figures.missing)
    if options.picture:
        draw(figures, options.picture)
    return 0


def _parse() -> argparse.Namespace:
    parser = published.command_line(__doc__, turns=12)
    parser.add_argument("--workload", nargs="+", default=["blocks", "decode2048"], metavar="NAME")
    parser.add_argument("--situation", nargs="*", default=list(SITUATIONS), choices=SITUATIONS, metavar="NAME")
    parser.add_argument("--callers", nargs="*", type=int, default=list(CALLERS), choices=CALLERS)
    parser.add_argument("--candidate", nargs="+", default=[OWN, *PEERS], metavar="NAME")
    parser.add_argument("--before", type=Path, metavar="DIR", help="artifacts of another version, by workload")
    parser.add_argument("--picture", type=Path, metavar="FILE")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take the figures from this JSON, measure nothing")
    return parser.parse_args()


def _measured(options: argparse.Namespace) -> Figures:
    figures = Figures.here(["onnxruntime", "openvino", "numpy"], options.threads)
    jobs = [(situation, 1) for situation in options.situation if not situation.startswith("torch")]
    jobs += [("alone", callers) for callers in options.callers if callers > 1]
    jobs += [(situation, 1) for situation in options.situation if situation.startswith("torch")]
    with tempfile.TemporaryDirectory() as place:
        workloads = choose(options.workload)
        for workload in track(workloads, console=Console(stderr=True), disable=not sys.stderr.isatty()):
            folder = Path(place, workload.name)
            compile_workload(workload, symbolic=False).save(folder)
            folders = dict.fromkeys(options.candidate, folder)
            if options.before:
                folders[BEFORE] = options.before / workload.name
            measure(workload, folders, jobs, options.turns, figures)
            print(f"{workload.name} is done", file=sys.stderr)
            published.write(figures, options.json)
    return figures


def table(figures: Figures) -> Table:
    """A line for each workload and situation: milliseconds, and ours against the best peer and against ours alone."""
    rows = [row for row in figures.rows if row.callers == 1]
    names = list(dict.fromkeys(name for row in rows for name in row.seconds))
    shown = Table("workload", "situation", *(f"{name}, ms" for name in names), "best peer / ours", "of ours alone")
    alone = {row.workload: row.of(OWN) for row in rows if row.situation == "alone" and OWN in row.seconds}
    for row in rows:
        times = [f"{row.of(name) * 1e3:.4g}" if name in row.seconds else "-" for name in names]
        best = row.best_peer()
        ratio = f"{row.of(best) / row.of(OWN):.2f} {best}" if best and OWN in row.seconds else "-"
        share = f"{row.of(OWN) / alone[row.workload]:.2f}" if row.workload in alone and OWN in row.seconds else "-"
        shown.add_row(row.workload, row.situation, *times, ratio, share)
    return shown


def callers_table(figures: Figures) -> Table:
    """A line for each workload and number of callers: calls a second, the median and the 99th percentile."""
    rows = [row for row in figures.rows if row.situation == "alone"]
    names = list(dict.fromkeys(name for row in rows for name in row.seconds))
    table = Table("workload", "callers", *(f"{name}, calls/s, p50 and p99 ms" for name in names))
    for row in rows:
        cells = [
            f"{median(row.rate[name]):.5g}  {row.of(name) * 1e3:.3g}  {median(row.slowest[name]) * 1e3:.3g}"
            if name in row.seconds
            else "-"
            for name in names
        ]
        table.add_row(row.workload, str(row.callers), *cells)
    return table


_TICKS = (1, 2, 5, 10, 20)


def draw(figures: Figures, path: Path) -> None:
    """Times in each situation as multiples of ours alone, a dot for each candidate."""
    rows = [row for row in figures.rows if row.callers == 1 and OWN in row.seconds]
    alone = {row.workload: row.of(OWN) for row in rows if row.situation == "alone"}
    labels = [f"{row.workload}, {row.situation}" for row in rows]
    with figure(path, (7.2, 0.6 + 0.19 * len(rows))) as axes:
        for i, row in enumerate(rows):
            for name in row.seconds:
                own = name == OWN
                axes.plot(
                    row.of(name) / alone[row.workload], i, "o" if own else "|", color=OURS if own else "#777777",
                    markersize=5 if own else 7,
                )  # fmt: skip
        axes.set_yticks(range(len(rows)), labels, fontsize=7)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.set_xticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axes.minorticks_off()
        axes.axvline(1, color="#e4e4e4", zorder=0)
        axes.set_title(f"Time of a call, by ours alone: dots ours, bars others ({figures.threads} threads)")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        name, folder, sizes, threads = sys.argv[2:]
        serve(name, Path(folder), msgspec.json.decode(sizes, type=dict[str, int]), int(threads))
    else:
        sys.exit(main())

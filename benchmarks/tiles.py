"""What runs on matrix tiles (AMX), and what could: linears, attention, blocks and whole models against their peers.

    python benchmarks/tiles.py [--only linears attention ...] [--case base128 ...] [--threads 1 2] [--json FILE]
    python benchmarks/tiles.py --numkong FOLDER ...    # with NumKong's attention, out of its sources
    python benchmarks/tiles.py --without-tiles ...     # on a CPU that has none, all but shares of their peak
    python benchmarks/tiles.py --read FILE             # the tables again, of what was measured

Sections: linears, attention, blocks are of bfloat16; float32 has linears and blocks of float32, held to it or by choice
of what products are; models are whole, float32 in and out. Linears, attention and float32 are timed by the protocol of
kernels, in one process, and held against float64; blocks and models by that of applications, a process each. The
peaks, of products of tiles in registers and of float32 multiply-adds, take turns with the candidates in both.
How it is timed: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import application
import figures as published
import models
import msgspec
import numkong_peers
import torch_linear_peers
from processes import Turn, rounds, started
from rich import box
from rich.console import Console
from rich.table import Table

import mhsa_compile as mhsa
from mhsa_bench import roofline, tile_peak
from mhsa_bench.bench import BenchCandidate, attempt, open_candidate
from mhsa_bench.peers import openvino, registry
from mhsa_bench.peers.onnxruntime import OnnxRuntimeOwnGraph
from mhsa_bench.peers.peer import Peer, Problem
from mhsa_bench.peers.registry import Compiled, Fastest
from mhsa_bench.report import DISTURBED
from mhsa_bench.roofline import Probe
from mhsa_compile.bench.timing import INPUT_SETS, interleave, workers_apart
from mhsa_compile.bench.workloads import Workload, choose, module_of
from mhsa_compile.errors import InputError
from mhsa_compile.hardware import host
from mhsa_compile.hardware.profile import detect
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.profile.call_profile import spread
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.verification.random_inputs import random_inputs

SECTIONS = ("linears", "attention", "blocks", "float32", "models")
OWN = "mhsa_compile"
AGAINST = ("torch", "onnxruntime", "onnxruntime-fused", "openvino", "numkong")
MODEL_CANDIDATES = {
    "torch": ("torch-sdpa", "inductor"),
    "onnxruntime": ("onnxruntime",),
    "onnxruntime-fused": ("onnxruntime-fused",),
    "openvino": ("openvino", "openvino-default"),
}
"""Of whole models, by the peer's name here; PyTorch's two stand for `torch`."""
MODELS = ("bert", "gpt2-prefill", "vit")
LINEARS = ((768, 768), (768, 2304), (768, 3072), (3072, 768))
"""Inputs and outputs of those in BERT, its projections of queries, keys and values as one."""
ROWS = (128, 512, 1024, 4096)
HEADS = ((64, 12), (128, 16))
LENGTHS = (128, 512, 1024, 2048)
PACKAGES = ("onnxruntime", "openvino", "numkong", "transformers", "numpy")
TURN = 0.1
"""Seconds of a turn in the protocol of applications."""


@dataclass(frozen=True)
class Case:
    """One row: a linear (M rows, K inputs, N outputs), a workload, or a whole model by its name alone."""

    section: str
    name: str
    dtype: str = "float32"
    linear: tuple[int, int, int] | None = None
    workload: Workload | None = None

    @property
    def flops(self) -> int | None:
        """Useful FLOPs of a call; None for a whole model, whose nobody counted."""
        if self.linear is not None:
            return 2 * prod(self.linear)
        if self.workload is None:
            return None
        spec, sizes = self.workload.spec, self.workload.dims
        projections = spec.projection_flops(**sizes) if self.workload.kind == "block" else 0
        return projections + spec.attention_flops(**sizes)

    @property
    def dims(self) -> dict[str, int]:
        if self.workload is not None:
            return self.workload.dims
        return {} if self.linear is None else {"N": self.linear[0]}


@dataclass
class Row:
    """What was measured of one case with so many threads.

    flops         of a call
    tile_gflops   products of tiles in registers, all threads together, in the best round; None where there are none
    all_gflops    the same with all eight tiles in use, the median of the rounds: far below it the machine was disturbed
    fma_gflops    float32 multiply-adds in registers, in the best round
    fma_spread    their interquartile range over the rounds, as a share of the median
    seconds       by candidate, the median call of each round or turn
    error_shares  by candidate, the largest error against float64 by the budget: above 1 is more than allowed
    forms         by candidate, which of a peer's forms was its fastest
    missing       by candidate, why it did not run
    """

    section: str
    name: str
    threads: int
    protocol: str
    flops: int | None = None
    tile_gflops: float | None = None
    all_gflops: float | None = None
    fma_gflops: float | None = None
    fma_spread: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    error_shares: dict[str, float] = field(default_factory=dict)
    forms: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def of(self, candidate: str) -> float:
        """Seconds of a call."""
        return median(self.seconds[candidate])

    def gflops(self, candidate: str) -> float | None:
        return None if self.flops is None else self.flops / self.of(candidate) / 1e9

    def share(self, candidate: str) -> float | None:
        """Its share of the peak of tiles, or of multiply-adds where there are none."""
        rate, peak = self.gflops(candidate), self.tile_gflops or self.fma_gflops
        return None if rate is None or peak is None else rate / peak

    def ratio(self, candidate: str, ours: str = OWN) -> float | None:
        """This candidate's time by ours in the same round, the median over the rounds: above 1, we are faster."""
        if candidate not in self.seconds or ours not in self.seconds:
            return None
        pairs = zip(self.seconds[candidate], self.seconds[ours], strict=True)
        return median(theirs / own for theirs, own in pairs)

    def best_peer(self) -> str | None:
        """The fastest of the others that compute what ours does: not those that round a float32 model by themselves."""
        peers = [name for name in self.seconds if not name.startswith(("mhsa", *models.ROUNDED))]
        return min(peers, key=lambda name: self.ratio(name) or self.of(name), default=None)

    @property
    def disturbed(self) -> bool:
        """Whether something else took CPU time meanwhile; the figures then mean little."""
        return self.fma_spread > DISTURBED


@dataclass
class Figures(published.Figures):
    """A row for each case and number of threads; `no_tiles` is why they could not be used, if so."""

    load: float
    no_tiles: str | None
    rows: list[Row] = field(default_factory=list)


# What is measured


def cases(sections: Sequence[str], names: Sequence[str] | None) -> list[Case]:
    """The cases of these sections, or those of these names. Raises InputError for a name that none of them has."""
    every = [case for section in SECTIONS if section in sections for case in _section(section)]
    if names is None:
        return every
    known = list(dict.fromkeys(case.name for case in every))
    if unknown := [name for name in names if name not in known]:
        raise InputError("case", f"some of {', '.join(known)}", repr(unknown[0]))
    return [case for case in every if case.name in names]


def _section(section: str) -> list[Case]:
    linears = [(f"{M} x {K} to {N}", (M, K, N)) for (K, N), M in product(LINEARS, ROWS)]
    if section == "linears":
        return [Case(section, name, "bfloat16", linear=sizes) for name, sizes in linears]
    if section == "attention":
        return [_core(E, H, L, causal) for (E, H), causal, L in product(HEADS, (False, True), LENGTHS)]
    if section == "blocks":
        return [Case(section, one.name, "bfloat16", workload=one.at("bfloat16")) for one in choose(["blocks"])]
    if section == "float32":
        blocks = [Case(section, one.name, workload=one) for one in choose(["blocks"])]
        return [*(Case(section, name, linear=sizes) for name, sizes in linears), *blocks]
    return [Case(section, name) for name in MODELS]


def _core(E: int, H: int, L: int, causal: bool) -> Case:
    name = f"e{E}-{L}{'c' if causal else ''}"
    spec = AttentionSpec(embed_dim=E * H, num_heads=H, dtype="bfloat16", **({"causal": True} if causal else {}))
    return Case("attention", name, "bfloat16", workload=Workload(name, "core", "tiles", spec, 1, L, L))


def peers(case: Case, against: Sequence[str], sources: Path | None) -> list[Peer]:
    """Who takes part in the protocol of kernels; a linear has only one form in ONNX."""
    every: dict[str, Peer]
    if case.linear is not None:
        own_graph = Fastest("openvino", [openvino.OpenVinoOwnGraph()])
        every = {"torch": Fastest("torch", torch_linear_peers.FORMS), "onnxruntime": OnnxRuntimeOwnGraph()}
        every |= {"openvino": own_graph, "numkong": numkong_peers.NumKongLinear()}
    else:
        every = {peer.name: peer for peer in registry.PEERS} | {"numkong": numkong_peers.attention(sources)}
    if case.section == "float32":
        del every["numkong"]
    return [every[name] for name in against if name in every]


# Ours, compiled in a process of its own


def prepare(case: Case, products: Sequence[str], folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Compiles a case: (folders by the names of our candidates, why others are missing)."""
    import torch

    torch.manual_seed(0)
    module, more = _module(case)
    folders, missing = {}, {}
    for word in (None, *(products if case.section == "float32" else ())):
        name = OWN if word is None else f"{OWN}, {word}"
        try:
            argument: dict[str, Any] = {} if word is None else dict(models.products_argument(word))
            artifact = mhsa.compile(module, dims=case.dims, cache=False, **more, **argument)
            artifact.save(folder / name)
            folders[name] = folder / name
        except Exception as error:
            missing[name] = _words(error)
    return folders, missing


def _module(case: Case) -> tuple[Any, dict[str, Any]]:
    """The module, and what else `compile` is told of it."""
    import torch

    if case.workload is not None:
        return module_of(case.workload), {}
    assert case.linear is not None
    M, K, N = case.linear
    dtype = getattr(torch, case.dtype)
    rows = torch.zeros(M, K, dtype=dtype)
    return torch.nn.Linear(K, N, dtype=dtype).eval(), {"example_inputs": (rows,), "without_attention": "accept"}


def _words(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# The protocol of kernels, in a process of its own


@contextmanager
def peaks(threads: int) -> Iterator[list[Probe]]:
    """What keeps all threads busy once: multiply-adds of float32, then, where there are tiles, products of few and of
    all of them."""
    profile = detect()
    with ExitStack() as stack:
        probes = [stack.enter_context(roofline.multiply_adds(profile, threads))]
        if tile_peak.why_no_tiles() is None:
            sums = tile_peak.FEW_SUMS, tile_peak.MOST_SUMS
            probes += [stack.enter_context(tile_peak.tile_products(profile, threads, count)) for count in sums]
        for probe in probes:
            probe.run()
        yield probes


def note_peaks(row: Row, probes: Sequence[Probe], times: Sequence[Sequence[float]]) -> None:
    """A peak is what the machine did at best."""
    row.fma_gflops, *tiles = (probe.amount / min(one) / 1e9 for probe, one in zip(probes, times, strict=True))
    row.fma_spread = spread(times[0])
    if tiles:
        row.tile_gflops, row.all_gflops = max(tiles), probes[-1].amount / median(times[-1]) / 1e9


def in_one_process(case: Case, folders: Mapping[str, Path], threads: int, options: argparse.Namespace) -> Row:
    """All candidates interleaved and held against float64."""
    from mhsa_compile.bench import accuracy

    tile_peak.why_no_tiles()  # asks for them before anybody else could need them
    row = Row(case.section, case.name, threads, "kernels", case.flops)
    artifacts = {name: Artifact.open(folder) for name, folder in folders.items()}
    own = artifacts[OWN]
    inputs = [random_inputs(own.manifest, case.dims, seed) for seed in range(INPUT_SETS)]
    problem = Problem(own, inputs)
    problem = replace(problem, error_share=accuracy.truth(own, inputs[0], problem.weights).share)
    with ExitStack() as stack:
        candidates = [_own(stack, name, replace(problem, artifact=one), threads) for name, one in artifacts.items()]
        others = peers(case, options.against, options.numkong)
        candidates += [attempt(stack, peer, problem, threads) for peer in others]
        running = [candidate for candidate in candidates if candidate.missing is None]
        probes = stack.enter_context(peaks(threads))
        stack.enter_context(workers_apart(frozenset().union(*(candidate.sole_workers for candidate in running))))
        turns = [*(candidate.calls for candidate in running), *([probe.run] for probe in probes)]
        times = interleave(turns, options.seconds)
    for candidate, seconds in zip(running, times, strict=False):
        row.seconds[candidate.name], row.forms[candidate.name] = seconds, candidate.form
        if candidate.error_share is not None:
            row.error_shares[candidate.name] = candidate.error_share
    note_peaks(row, probes, times[len(running) :])
    row.missing = {candidate.name: candidate.missing for candidate in candidates if candidate.missing is not None}
    return row


def _own(stack: ExitStack, name: str, problem: Problem, threads: int) -> BenchCandidate:
    """Ours is timed however far it is off: bfloat16 by choice is over the budget of float32."""
    try:
        return replace(open_candidate(stack, Compiled(), problem, threads, problem.error_share), name=name)
    except Exception as error:
        return BenchCandidate(name, missing=_words(error))


# The protocol of applications


def each_in_its_process(case: Case, folders: Mapping[str, Path], threads: int, options: argparse.Namespace) -> Row:
    """Each candidate asleep but for its turns; the peaks are this process's own turns."""
    assert case.workload is not None
    row = Row(case.section, case.name, threads, "applications", case.flops)
    names = {peer.name for peer in registry.PEERS}
    of = dict(folders) | {name: folders[OWN] for name in options.against if name in names}
    sizes = msgspec.json.encode(case.dims).decode()
    program = [application.__file__, "--serve"]
    words = {name: [*program, name, str(folder), sizes, str(threads)] for name, folder in of.items()}
    with peaks(threads) as probes, ExitStack() as stack:
        candidates, row.missing = started(stack, words)
        for candidate in candidates:
            candidate.take(Turn("alone", TURN / 2))
        limits: list[list[float]] = [[] for _ in probes]
        for name, times in rounds(candidates, Turn("alone", TURN), options.turns):
            row.seconds.setdefault(name, []).append(median(times.calls))
            for probe, seconds in zip(probes, limits, strict=True):
                begin = perf_counter()
                probe.run()
                seconds.append(perf_counter() - begin)
    if row.seconds:
        note_peaks(row, probes, limits)
    return row


def whole_model(case: Case, threads: int, options: argparse.Namespace) -> Row:
    """What `benchmarks/models.py` measures, with two candidates that round float32 factors to bfloat16."""
    row = Row(case.section, case.name, threads, "applications")
    candidates = [OWN, *models.PRODUCTS]
    candidates += [name for peer in options.against for name in MODEL_CANDIDATES.get(peer, ())]
    figures = published.TurnFigures.here([], threads)
    models.measure(case.name, figures, candidates, options.turns)
    row.seconds = figures.seconds.get(case.name, {})
    row.missing = {name.removesuffix(f", {case.name}"): words for name, words in figures.missing.items()}
    return row


def measured(options: argparse.Namespace, no_tiles: str | None) -> Figures:
    """Measures all cases, the kernels' each in a process of its own: who crashes takes no other along. The JSON
    grows."""
    figures = Figures.here(PACKAGES, os.getloadavg()[0], no_tiles)
    for case in cases(options.only, options.case):
        with tempfile.TemporaryDirectory() as place:
            folders: dict[str, Path] = {}
            missing: dict[str, str] = {}
            if case.section != "models":
                ours = _apart(prepare, case, options.products, Path(place))
                folders, missing = ({}, {OWN: ours}) if isinstance(ours, str) else ours
            for threads in options.threads:
                row = _row(case, folders, threads, options) if OWN in folders or case.section == "models" else None
                row = row or Row(case.section, case.name, threads, "", case.flops)
                row.missing |= missing
                figures.rows.append(row)
                published.write(figures, options.json)
        print(f"{case.section}, {case.name} is done", file=sys.stderr)
    return figures


def _row(case: Case, folders: Mapping[str, Path], threads: int, options: argparse.Namespace) -> Row:
    if case.section == "models":
        return whole_model(case, threads, options)
    if case.section == "blocks":
        return each_in_its_process(case, folders, threads, options)
    row = _apart(in_one_process, case, folders, threads, options)
    if isinstance(row, Row):
        return row
    return Row(case.section, case.name, threads, "kernels", case.flops, missing={"all": row})


def _apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own, or why it returned nothing."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *arguments).result()
        except BrokenProcessPool:
            return "its process died"
        except Exception as error:
            return _words(error)


# What is shown


def tables(figures: Figures) -> Iterator[Table]:
    for section, threads in dict.fromkeys((row.section, row.threads) for row in figures.rows):
        yield table([row for row in figures.rows if (row.section, row.threads) == (section, threads)])


def table(rows: Sequence[Row]) -> Table:
    """Of a section: ours, the best peer's time by ours, then everybody's GFLOP/s, share of the peak of tiles, and time
    by ours; of whole models milliseconds."""
    first = rows[0]
    names = list(dict.fromkeys(name for row in rows for name in row.seconds if name != OWN))
    protocols = " and ".join(dict.fromkeys(row.protocol for row in rows if row.protocol))
    title = f"{first.section}, {first.threads} threads, protocol of {protocols}{_peaks(rows)}"
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    shown.add_column(first.section)
    for column in ("ms", OWN, "error / budget", "best peer / ours", *names):
        shown.add_column(column, justify="right")
    if first.section == "models":
        shown.add_column("openvino-default / mhsa-bf16", justify="right")
    for row in rows:
        best = row.best_peer()
        ratio = "-" if best is None or OWN not in row.seconds else f"{row.ratio(best):.2f} {best}"
        time = f"{row.of(OWN) * 1e3:.3f}" if OWN in row.seconds else "-"
        error = f"{row.error_shares[OWN]:.2f}" if OWN in row.error_shares else "-"
        cells = [time, _cell(row, OWN), error, ratio, *(_cell(row, name) for name in names)]
        if first.section == "models":
            rounded = row.ratio("openvino-default", "mhsa-bf16")
            cells.append("-" if rounded is None else f"{rounded:.2f}")
        shown.add_row(row.name, *cells, style="red" if row.disturbed else "")
    ratios = [row.ratio(best) or 1.0 for row in rows if (best := row.best_peer()) and OWN in row.seconds]
    if ratios:
        mean = prod(ratios) ** (1 / len(ratios))
        shown.caption = f"Best peer / ours: {min(ratios):.2f} to {max(ratios):.2f}, geometric mean {mean:.2f}."
    if disturbed := [row.name for row in rows if row.disturbed]:
        shown.caption = f"{shown.caption or ''} Disturbed, measure again: {', '.join(disturbed)}.".strip()
    return shown


def _peaks(rows: Sequence[Row]) -> str:
    words = []
    for what, rates in (
        ("tiles", [row.tile_gflops for row in rows if row.tile_gflops is not None]),
        ("all eight in use", [row.all_gflops for row in rows if row.all_gflops is not None]),
        ("float32 multiply-adds", [row.fma_gflops for row in rows if row.fma_gflops is not None]),
    ):
        words += [f"; {what} {min(rates):.0f} to {max(rates):.0f} GFLOP/s"] if rates else []
    return "".join(words)


def _cell(row: Row, name: str) -> str:
    if name not in row.seconds:
        return "missing" if name in row.missing else "-"
    rate, share, ratio = row.gflops(name), row.share(name), row.ratio(name)
    what = f"{row.of(name) * 1e3:.4g} ms" if rate is None else f"{rate:.0f}"
    what += "" if share is None else f" {share:.0%}"
    return what if ratio is None or name == OWN else f"{what} {ratio:.2f}"


def show(figures: Figures) -> None:
    """Prints the tables, then who is missing from them, a line for each reason."""
    console = Console(width=None if sys.stdout.isatty() else 180)
    for one in tables(figures):
        console.print(one)
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in figures.rows:
        for name, words in row.missing.items():
            reasons.setdefault((row.section, name, words), []).append(row.name)
    for (section, name, words), where in reasons.items():
        places = dict.fromkeys(where)
        console.print(f"{section}, {name}: {words} ({len(places)} of them, {next(iter(places))} first)", markup=False)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = published.command_line(__doc__)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=SECTIONS, metavar="SECTION")
    parser.add_argument("--case", nargs="+", metavar="NAME", help="rows by name, as the tables have them")
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, host.allowed_cpus()}))
    choices = [*dict.fromkeys((*AGAINST, *(peer.name for peer in registry.PEERS)))]
    parser.add_argument("--against", nargs="*", default=list(AGAINST), choices=choices, metavar="PEER")
    parser.add_argument("--products", nargs="*", default=["ieee", "auto", "bf16"], metavar="WORD")
    parser.add_argument("--numkong", type=Path, metavar="FOLDER", help="NumKong's sources, which have its attention")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each candidate of kernels (default: 1)")
    parser.add_argument("--turns", type=int, default=12, help="of each candidate of applications (default: 12)")
    parser.add_argument("--without-tiles", action="store_true", help="measure although the CPU has none")
    parser.add_argument("--read", type=Path, metavar="FILE", help="take the figures from this JSON, measure nothing")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    options = parse(words)
    if options.read:
        show(published.read(options.read, Figures))
        return 0
    no_tiles = tile_peak.why_no_tiles()
    if no_tiles is not None and not options.without_tiles:
        print(f"No matrix tiles here: {no_tiles}. --without-tiles measures all but shares of their peak.")
        return 0
    try:
        figures = measured(options, no_tiles)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    show(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

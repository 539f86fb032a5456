"""What a benchmark on a GPU found: read and written as JSON, and shown as a table of plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from math import prod
from statistics import median

from gpu_bench.workloads import CallWork
from mhsa_compile.runtime.profile.call_profile import spread

OURS = "mhsa-compile"


@dataclass(frozen=True)
class Machine:
    """What a published figure must say of the GPU that it was measured on; `cuda` is the driver's."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_gib: float
    cuda: tuple[int, int]
    host: str


@dataclass(frozen=True)
class GpuRow:
    """One candidate: `missing` says why it did not run, and then there are no numbers.

    median_us      microseconds a call, median over the rounds
    spread         interquartile range over the rounds, as a share of the median
    ratio          this candidate's time by ours in the same round, median over the rounds: above 1, we are faster
    tflops, gbs    useful FLOPs, and least bytes, a second: 10^12 and 10^9
    of_matrix      `tflops` as a share of the matrix product's in the same rounds
    of_copy        `gbs` as a share of the copy's in the same rounds
    error_share    largest error of sampled rows against float64 as a share of the budget: above 1 is wrong
    """

    name: str
    median_us: float | None = None
    spread: float | None = None
    ratio: float | None = None
    tflops: float | None = None
    gbs: float | None = None
    of_matrix: float | None = None
    of_copy: float | None = None
    error_share: float | None = None
    missing: str | None = None


@dataclass(frozen=True)
class Ceilings:
    """What the GPU can do at best, measured in the same rounds as the candidates: a large product of bfloat16 matrices,
    and a large copy, bytes read and bytes written both counted."""

    matrix_tflops: float
    copy_gbs: float
    matrix_spread: float


@dataclass(frozen=True)
class GpuResult:
    """One workload. The first row is this project's; `kernels` are what computes ours, each with its config."""

    workload: str
    group: str
    dims: dict[str, int]
    dtype: str
    graphs: bool
    work: CallWork
    rounds: int
    ceilings: Ceilings
    kernels: tuple[str, ...]
    rows: tuple[GpuRow, ...]

    @property
    def ours(self) -> GpuRow:
        return self.rows[0]

    @property
    def best_peer(self) -> GpuRow | None:
        """The fastest of the others that ran and computed the same."""
        ran = [row for row in self.rows[1:] if row.median_us is not None]
        return min(ran, key=lambda row: row.median_us or 0.0, default=None)

    @property
    def advantage(self) -> float | None:
        """The fastest peer's time by ours."""
        return None if self.best_peer is None else self.best_peer.ratio

    @property
    def ok(self) -> bool:
        """Whether our own output was within the budget."""
        return self.ours.error_share is not None and self.ours.error_share <= 1


@dataclass
class Figures:
    """All figures of one run. `failed`: workloads that brought their process down, and with which words."""

    machine: Machine
    versions: dict[str, str | None]
    date: date
    seconds: float
    results: list[GpuResult] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return bool(self.results) and not self.failed and all(result.ok for result in self.results)


@dataclass(frozen=True)
class Sample:
    """A candidate that ran: seconds a call in each round."""

    name: str
    seconds: Sequence[float]
    error_share: float


def rows(
    samples: Sequence[Sample | GpuRow], work: CallWork, matrix: Sequence[float], copy: Sequence[float]
) -> tuple[GpuRow, ...]:
    """The rows of a result; the first sample is ours. `matrix` and `copy`: the ceilings' rates in each round, in FLOPs
    and bytes a second."""
    ours = samples[0].seconds if isinstance(samples[0], Sample) else None
    return tuple(s if isinstance(s, GpuRow) else _row(s, ours, work, matrix, copy) for s in samples)


def _row(
    sample: Sample, ours: Sequence[float] | None, work: CallWork, matrix: Sequence[float], copy: Sequence[float]
) -> GpuRow:
    middle = median(sample.seconds)
    return GpuRow(
        sample.name,
        median_us=middle * 1e6,
        spread=spread(sample.seconds),
        ratio=None if ours is None else median(t / o for t, o in zip(sample.seconds, ours, strict=True)),
        tflops=work.flops / middle / 1e12,
        gbs=work.bytes / middle / 1e9,
        of_matrix=median(work.flops / t / rate for t, rate in zip(sample.seconds, matrix, strict=True)),
        of_copy=median(work.bytes / t / rate for t, rate in zip(sample.seconds, copy, strict=True)),
        error_share=sample.error_share,
    )


_COLUMNS = ("workload", "ours us", "TFLOP/s", "of matrix", "GB/s", "of copy", "spread", "error", "best peer")


def text(figures: Figures) -> str:
    """What was measured where and when; a table for each group; what failed. A peer's column is its time / ours."""
    lines = [heading(figures.machine, figures.date.isoformat())]
    for group in dict.fromkeys(result.group for result in figures.results):
        lines += ["", *_group([result for result in figures.results if result.group == group])]
    lines += ["", *(f"{name}: failed, {words}" for name, words in figures.failed.items())]
    return "\n".join(lines).rstrip() + "\n"


def heading(machine: Machine, day: str) -> str:
    (major, minor), cuda = machine.capability, ".".join(map(str, machine.cuda))
    return (
        f"{machine.name}, compute capability {major}.{minor}, {machine.multiprocessors} multiprocessors, "
        f"{machine.memory_gib:.0f} GiB, driver for CUDA {cuda}; host {machine.host}; {day}"
    )


def _group(results: Sequence[GpuResult]) -> list[str]:
    peers = list(dict.fromkeys(row.name for result in results for row in result.rows[1:]))
    cells = [[*_COLUMNS, *peers], *(_cells(result, peers) for result in results)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    ceilings = [result.ceilings for result in results]
    title = (
        f"{results[0].group}: a product of matrices {_range(c.matrix_tflops for c in ceilings)} TFLOP/s, "
        f"a copy {_range(c.copy_gbs for c in ceilings)} GB/s"
    )
    return [title, *(line.rstrip() for line in lines), *_mean(results)]


def _cells(result: GpuResult, peers: Sequence[str]) -> list[str]:
    ours, rows = result.ours, {row.name: row for row in result.rows}
    best = result.best_peer
    advantage = "-" if best is None else f"{_ratio(best)} {best.name}"
    name = result.workload + ("" if result.ok else " (WRONG)" if ours.missing is None else "")
    if ours.missing is not None:
        return [name, "missing", *["-"] * 6, advantage, *(_ratio(rows.get(peer)) for peer in peers)]
    numbers = [
        f"{ours.median_us:.1f}", f"{ours.tflops:.0f}", f"{ours.of_matrix:.0%}", f"{ours.gbs:.0f}",
        f"{ours.of_copy:.0%}", f"{ours.spread:.1%}", f"{ours.error_share:.2f}",
    ]  # fmt: skip
    return [name, *numbers, advantage, *(_ratio(rows.get(peer)) for peer in peers)]


def _ratio(row: GpuRow | None) -> str:
    if row is None or row.median_us is None:
        return "-"
    return f"({row.median_us:.1f} us)" if row.ratio is None else f"{row.ratio:.2f}"


def _mean(results: Iterable[GpuResult]) -> list[str]:
    advantages = [result.advantage for result in results if result.ok and result.advantage is not None]
    if not advantages:
        return []
    mean = prod(advantages) ** (1 / len(advantages))
    return [f"fastest peer / ours: {min(advantages):.2f} to {max(advantages):.2f}, geometric mean {mean:.2f}"]


def _range(values: Iterable[float]) -> str:
    least, *_, most = sorted([*values] * 2)
    return f"{least:.0f}" if round(least) == round(most) else f"{least:.0f} to {most:.0f}"

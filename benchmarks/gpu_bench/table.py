"""Figures as a table of plain text, for a terminal and for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from gpu_bench.report import Figures, GpuResult, GpuRow, Machine

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

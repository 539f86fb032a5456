"""Pictures of tuning: a search, trial by trial, and where one algorithm overtakes another. Notation: L query length,
S key length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhsa_compile.bench.plots.figure import (
    FAINT,
    GRID,
    INK,
    OURS,
    figure,
)

if TYPE_CHECKING:
    from mhsa_compile.tuning.tasks import TaskResult, TuningReport

COLOURS = (OURS, "#d9622b", "#4f8a4b", "#8a63ad", "#b8860b", "#3a9a9a", "#8c8c8c")
SLOWEST = 3.0
"""The slowest time that a picture shows, in times the default's: slower trials are drawn at the edge."""


def searches(reports: Mapping[str, TuningReport], path: Path) -> None:
    """A dot for each trial: its time by the default's; a line for the best so far. Failures are crosses at the top."""
    ops = [(name, op) for name, report in reports.items() for op in report.ops if op.history]
    with figure(path, (7.6, 4.6)) as axes:
        axes.set_yscale("log", base=2)
        for place, (name, op) in enumerate(ops):
            _search(axes, op, COLOURS[place % len(COLOURS)], f"{name} " if len(reports) > 1 else "")
        axes.axhline(1, color=INK, linewidth=1)
        axes.annotate(
            "the default", (1, 1), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points", ha="right",
            va="bottom", fontsize=8, color=INK,
        )  # fmt: skip
        lowest = min((min(_best_so_far(op)) for _, op in ops), default=1.0)
        axes.set_ylim(min(0.8, lowest * 0.93), SLOWEST * 1.35)
        below = (0.125, 0.25, 0.5) if lowest < 0.5 else (0.5, 0.6, 0.7, 0.8, 0.9)
        ticks = [tick for tick in (*below, 1, 1.5, 2, 3) if tick >= lowest * 0.93]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_xlabel("trial")
        axes.set_ylabel("time, by that of the default in the same rounds")
        axes.grid(axis="y", color=GRID)
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), frameon=False, fontsize=8)
        axes.set_title("Search: " + ", ".join(reports), pad=12)


def _search(axes: Any, op: TaskResult, colour: str, prefix: str) -> None:
    tried = [(number, score) for number, score in enumerate(op.history, 1) if score is not None]
    inside = [(number, score) for number, score in tried if score <= SLOWEST]
    beyond = [number for number, score in tried if score > SLOWEST]
    failed = [number for number, score in enumerate(op.history, 1) if score is None]
    axes.plot(*_columns(inside), "o", color=colour, markersize=3, alpha=0.45, markeredgewidth=0)
    axes.plot(beyond, [SLOWEST * 1.08] * len(beyond), "^", color=colour, markersize=3.5, alpha=0.45, markeredgewidth=0)
    axes.plot(failed, [SLOWEST * 1.22] * len(failed), "x", color=colour, markersize=5)
    sizes = " ".join(f"{name}={size}" for name, size in op.sizes.items())
    times = (
        f"{op.default_us:,.0f} to {op.best_us:,.0f} µs" if op.speedup > 1 else f"{op.default_us:,.0f} µs, the default"
    )
    failures = f", {len(failed)} failed (x)" if failed else ""
    label = f"{prefix}{op.op} {sizes}: {times}{failures}"
    best = list(_best_so_far(op))
    axes.plot(range(len(best)), best, "-", color=colour, linewidth=1.8, drawstyle="steps-post", label=label)


def _best_so_far(op: TaskResult) -> Iterator[float]:
    """The best score after each trial, and 1 before the first."""
    return accumulate((1.0, *(float("inf") if score is None else score for score in op.history)), min)


def _columns(pairs: Sequence[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def crossover(ratios: Mapping[int, Mapping[int, float]], path: Path, names: tuple[str, str], title: str) -> None:
    """A line for each S, over L. `ratios`: S -> L -> time of the second algorithm by that of the first: above 1 the
    first is faster."""
    with figure(path, (6.6, 4.2)) as axes:
        for place, (S, by_length) in enumerate(sorted(ratios.items())):
            lengths = sorted(by_length)
            colour = COLOURS[place % len(COLOURS)]
            axes.plot(lengths, [by_length[L] for L in lengths], "o-", color=colour, markersize=4, linewidth=1.6)
            end = (lengths[-1], by_length[lengths[-1]])
            axes.annotate(f"S = {S:,}", end, (7, 0), textcoords="offset points", va="center", fontsize=8, color=colour)
        axes.axhline(1, color=INK, linewidth=1)
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xticks(sorted({L for by_length in ratios.values() for L in by_length}))
        axes.set_xlabel("queries of a call")
        axes.set_ylabel(f"time of {names[1]} by that of {names[0]}")
        place_of = {"transform": axes.get_yaxis_transform(), "fontsize": 8, "color": FAINT}
        axes.text(0.01, 1.02, f"{names[0]} is faster", va="bottom", **place_of)
        axes.text(0.01, 0.98, f"{names[1]} is faster", va="top", **place_of)
        axes.grid(axis="y", color=GRID)
        axes.margins(x=0.08)
        axes.set_title(title, pad=12)

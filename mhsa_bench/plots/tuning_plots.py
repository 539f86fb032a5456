"""The picture of a search, trial by trial."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhsa_bench.plots.figure import COLOURS, GRID, INK, figure

if TYPE_CHECKING:
    from mhsa_compile.tuning.tasks import TaskResult, TuningReport

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
    scores = [(number, score) for number, score in enumerate(op.history, 1) if score is not None]
    inside = [[pair[axis] for pair in scores if pair[1] <= SLOWEST] for axis in (0, 1)]
    beyond = [number for number, score in scores if score > SLOWEST]
    failures_at = [number for number, score in enumerate(op.history, 1) if score is None]
    axes.plot(*inside, "o", color=colour, markersize=3, alpha=0.45, markeredgewidth=0)
    axes.plot(beyond, [SLOWEST * 1.08] * len(beyond), "^", color=colour, markersize=3.5, alpha=0.45, markeredgewidth=0)
    axes.plot(failures_at, [SLOWEST * 1.22] * len(failures_at), "x", color=colour, markersize=5)
    sizes = " ".join(f"{name}={size}" for name, size in op.sizes.items())
    times = (
        f"{op.default_us:,.0f} to {op.best_us:,.0f} µs" if op.speedup > 1 else f"{op.default_us:,.0f} µs, the default"
    )
    failures = f", {len(failures_at)} failed (x)" if failures_at else ""
    label = f"{prefix}{op.op} {sizes}: {times}{failures}"
    best = list(_best_so_far(op))
    axes.plot(range(len(best)), best, "-", color=colour, linewidth=1.8, drawstyle="steps-post", label=label)


def _best_so_far(op: TaskResult) -> Iterator[float]:
    """The best score after each trial, and 1 before the first."""
    return accumulate((1.0, *(float("inf") if score is None else score for score in op.history)), min)

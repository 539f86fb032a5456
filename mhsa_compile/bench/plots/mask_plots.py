"""Pictures of masks: a square for each pair of a query and a key, coloured where the query sees the key, and why.

matplotlib is imported when something is drawn, without a display; the same masks give the same file.
Notation: L queries, S keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mhsa_compile.bench.plots.figure import (
    FAINT,
    GRID,
    INK,
    OURS,
    figure,
)
from mhsa_compile.spec.masks import BoolArray

COLOURS = (OURS, "#d9622b", "#4f8a4b", "#8a63ad")
"""The colours of the reasons, in their order."""
EMPTY = "#f3f3f3"
GAP = 5
"""The distance between two panels, in squares."""
SQUARE = 0.088  # inches


@dataclass(frozen=True)
class Panel:
    """One mask. `reasons`: name -> bool (L, S); a pair has the colour of the first reason that it is seen for."""

    title: str
    reasons: Mapping[str, BoolArray]


def picture(panels: Sequence[Panel], path: Path) -> None:
    """Panels side by side, with one legend."""
    shapes = [next(iter(panel.reasons.values())).shape for panel in panels]
    width, height = sum(S for _, S in shapes) + GAP * (len(panels) - 1), max(L for L, _ in shapes)
    names = list(dict.fromkeys(name for panel in panels for name in panel.reasons))
    colours = dict(zip(names, COLOURS, strict=False))
    with figure(path, (SQUARE * (width + 8), SQUARE * (height + 12))) as axes:
        axes.set_axis_off()
        axes.set_aspect("equal")
        axes.set_xlim(-3, width + 0.5)
        axes.set_ylim(height + 3.5, -5.5)
        left = 0
        for panel, (L, S) in zip(panels, shapes, strict=True):
            _panel(axes, panel, left, L, S, colours)
            left += S + GAP
        handles = [axes.plot([], [], "s", color=colours[name], markersize=7, label=name)[0] for name in names]
        if len(names) > 1:
            axes.legend(
                handles=handles, loc="lower left", bbox_to_anchor=(0.02, -0.02), ncols=len(names), frameon=False,
                fontsize=8, handletextpad=0.1, columnspacing=1.2, borderaxespad=0,
            )  # fmt: skip


def _panel(axes: Any, panel: Panel, left: int, L: int, S: int, colours: Mapping[str, str]) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((left, 0), S, L, facecolor=EMPTY, linewidth=0))
    seen = np.zeros((L, S), np.bool_)
    for name, visible in panel.reasons.items():
        axes.add_patch(_squares(visible & ~seen, left, colours[name]))
        seen |= visible
    for line in range(1, S):
        axes.plot([left + line] * 2, [0, L], color="white", linewidth=0.5)
    for line in range(1, L):
        axes.plot([left, left + S], [line] * 2, color="white", linewidth=0.5)
    axes.add_patch(Rectangle((left, 0), S, L, fill=False, edgecolor=GRID, linewidth=0.8))
    axes.text(left, -2.6, panel.title, color=INK, fontsize=9, fontweight="bold", ha="left", va="bottom")
    axes.text(left, -0.6, "keys \N{RIGHTWARDS ARROW}", color=FAINT, fontsize=7, ha="left", va="bottom")
    axes.text(
        left - 0.6, 0, "queries \N{RIGHTWARDS ARROW}", color=FAINT, fontsize=7, rotation=270, ha="right", va="top"
    )


def _squares(visible: BoolArray, left: int, colour: str) -> Any:
    """All squares of one colour as one path: a rectangle for each run of keys."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    corners: list[tuple[float, float]] = []
    codes: list[Any] = []
    for i, row in enumerate(visible):
        edges = np.flatnonzero(np.diff(row.astype(np.int8), prepend=0, append=0))
        for first, last in edges.reshape(-1, 2).tolist():
            a, b = left + first, left + last
            corners += [(a, i), (b, i), (b, i + 1), (a, i + 1), (a, i)]
            codes += [Outline.MOVETO, Outline.LINETO, Outline.LINETO, Outline.LINETO, Outline.CLOSEPOLY]
    outline = Outline(np.array(corners, np.float64).reshape(-1, 2), codes)
    return PathPatch(outline, facecolor=colour, linewidth=0)

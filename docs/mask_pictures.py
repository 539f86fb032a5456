"""Draws the pictures of docs/masks.md, into docs/masks/: `make pictures`.

A square for each pair of a query and a key, coloured where the query sees the key, and why. The same masks and the same
matplotlib give the same bytes. Notation: L queries, S keys.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mhsa_bench.plots.figure import COLOURS, FAINT, GRID, INK, figure
from mhsa_compile import masks
from mhsa_compile.spec.masks import BoolArray, Pattern

FOLDER = Path(__file__).parent / "masks"
N = 32  # positions

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
            _draw_panel(axes, panel, left, L, S, colours)
            left += S + GAP
        handles = [axes.plot([], [], "s", color=colours[name], markersize=7, label=name)[0] for name in names]
        if len(names) > 1:
            axes.legend(
                handles=handles, loc="lower left", bbox_to_anchor=(0.02, -0.02), ncols=len(names), frameon=False,
                fontsize=8, handletextpad=0.1, columnspacing=1.2, borderaxespad=0,
            )  # fmt: skip


def _draw_panel(axes: Any, panel: Panel, left: int, L: int, S: int, colours: Mapping[str, str]) -> None:
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


def _parts(**patterns: Pattern) -> dict[str, BoolArray]:
    return {name.strip("_"): pattern.array(N, N) for name, pattern in patterns.items()}


def _causal(reasons: dict[str, BoolArray]) -> dict[str, BoolArray]:
    before = masks.causal(N, N, "top_left")
    return {name: visible & before for name, visible in reasons.items()}


def _documents() -> dict[str, BoolArray]:
    lengths = (7, 12, 9)
    document = np.repeat(np.arange(4), (*lengths, N - sum(lengths)))
    same = masks.Documents(lengths=lengths).array(N, N)
    names = ("first document", "second", "third")
    return {name: same & (document == i) for i, name in enumerate(names)}


def _pictures() -> dict[str, list[Panel]]:
    both, one = masks.window(N, N, 4, 4), masks.window(N, N, 8, 0)
    longformer = _parts(window=masks.Longformer(window=6), global_=masks.Longformer(window=6, global_tokens=2))
    bigbird = _parts(
        window=masks.BigBird(block=2, global_blocks=0, random_blocks=0),
        global_=masks.BigBird(block=2, random_blocks=0),
        random=masks.BigBird(block=2, random_blocks=2),
    )
    distance = abs(np.arange(N)[:, np.newaxis] - np.arange(N))
    strided = {"near": distance < 6, "every sixth": masks.Strided(stride=6).array(N, N)}
    return {
        "causal": [
            Panel('"top_left", L = S', {"seen": masks.causal(24, 24, "top_left")}),
            Panel('"bottom_right", L < S', {"seen": masks.causal(12, 24, "bottom_right")}),
            Panel('"top_left", L < S', {"seen": masks.causal(12, 24, "top_left")}),
        ],
        "window": [Panel("(4, 4)", {"seen": both}), Panel("(8, 0)", {"seen": one})],
        "key-padding": [
            Panel(f"{n} of {N} keys", {"seen": np.repeat(masks.key_padding([n], N), 16, axis=0)}) for n in (21, 9)
        ],
        "longformer": [Panel("Longformer", longformer), Panel("causal", _causal(longformer))],
        "bigbird": [Panel("BigBird", bigbird), Panel("causal", _causal(bigbird))],
        "strided": [Panel("strided", strided), Panel("causal", _causal(strided))],
        "block-diagonal": [Panel("block-diagonal", _parts(seen=masks.BlockDiagonal(block=8)))],
        "documents": [Panel("documents", _documents()), Panel("causal", _causal(_documents()))],
    }


def draw(folder: Path, suffix: str = ".svg") -> None:
    folder.mkdir(exist_ok=True)
    for name, panels in _pictures().items():
        picture(panels, folder / f"{name}{suffix}")


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, sys.argv[2] if len(sys.argv) > 2 else ".svg")

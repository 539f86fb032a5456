"""Pictures of what one layer does with one text: a head step by step, all heads side by side, their subspaces, masks,
and the flow of the block. As wide as a phone, on a white card, so that they are legible on dark pages, too.

Every number and every cell is one of a `BlockFlow`, or of a layer's weights. Notation: L length, D embed, H heads, F
value head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from mhsa_analysis.block_flow import BlockFlow
from mhsa_analysis.layer_weights import principal_angles, subspace_overlap, weights_of
from mhsa_bench.plots.figure import COLOURS, FAINT, GRID, INK, OURS, canvas

LONGEST = 48
"""Tokens of a text that is drawn."""
WIDTH = 3.6
"""Inches: 346 pixels, which a phone shows as they are."""
_SMALL, _TEXT = 8.5, 9.5  # points
_ROW = 0.19  # inches, of a token
_COLUMNS = 3  # of maps side by side
_PLAIN = ("white", OURS)
_SIGNED = (COLOURS[1], "white", OURS)
_NOTHING = "#d0d0d0"
"""Where a weight is 0."""


def draw_layer(folder: Path, stem: str, flow: BlockFlow) -> list[Path]:
    """All pictures of a layer, the head and the query with the clearest weight step by step."""
    head, query = flow.clearest
    names = [f"head {i}" for i in range(len(flow.heads))]
    paths = [folder / f"{stem}-{kind}.svg" for kind in ("steps", "heads", "subspaces", "mask", "flow")]
    draw_steps(paths[0], flow, head, query)
    draw_maps(paths[1], dict(zip(names, flow.weights, strict=True)), flow.tokens)
    draw_subspaces(paths[2], flow.layer, "v")
    draw_maps(paths[3], {"mean of all heads": flow.weights.mean(axis=0)}, flow.tokens)
    draw_flow(paths[4], flow, head)
    return paths


def draw_steps(path: Path, flow: BlockFlow, head: int, query: int) -> None:
    """One query of one head: its scores, their softmax, and the values by their weights above the sum."""
    L, tokens = len(flow.tokens), [_plain(token) for token in flow.tokens]
    scores, weights = flow.scores[head, query], flow.weights[head, query]
    added = weights[:, np.newaxis] * flow.values_of(head)
    rows = np.concatenate([added, np.full((1, added.shape[1]), np.nan), flow.heads[head, query][np.newaxis]])
    with _page(path, _ROW * (L + 7)) as whole:
        whole.suptitle(f"Query “{tokens[query]}”, head {head}", x=0.02, ha="left", fontsize=11, fontweight="bold")
        first, second, third = whole.subplots(1, 3, sharey=True, width_ratios=(1, 1, 1))
        finite = np.isfinite(scores)
        _bars(first, "1  scores\nq·k / √d", np.where(finite, scores, 0.0), _numbers(scores))
        _bars(second, "2  softmax\nweights a", weights, [f"{100 * weight:.1f} %" for weight in weights])
        _cells(third, rows, _SIGNED, float(np.nanmax(np.abs(rows))))
        _heading(third, "3  a · v\nand the sum")
        third.set_xticks(())
        third.set_yticks([*range(L), L + 1], [*tokens, "sum"], fontsize=_SMALL)
        third.set_ylim(L + 1.5, -0.5)
        third.tick_params(axis="y", length=0)


def draw_maps(path: Path, maps: Mapping[str, np.ndarray], tokens: Sequence[str]) -> None:
    """Maps (L, L) of weights side by side: a row for each query, a column for each key."""
    across = min(_COLUMNS, len(maps)) if len(maps) != 4 else 2  # four are a square
    down = -(-len(maps) // across)
    largest = max(float(weights.max()) for weights in maps.values())
    legend = f"Rows are queries, columns keys; white is 0, blue {largest:.2f}."
    if any((weights == 0).any() for weights in maps.values()):
        legend += " Grey is exactly 0: hidden, or too little for float32."
    words = fill(", ".join(f"{i}\N{NO-BREAK SPACE}{_plain(token)}" for i, token in enumerate(tokens)), 54)
    text = f"{fill(legend, 58)}\n{words}"
    height = WIDTH / across * down + 0.3 * down + 0.15 * text.count("\n") + 0.3
    with _page(path, height) as whole:
        grid = whole.subplots(down, across, squeeze=False).ravel()
        for axes in grid[len(maps) :]:
            axes.set_axis_off()
        for axes, (name, weights) in zip(grid, maps.items(), strict=False):
            _cells(axes, np.where(weights == 0, np.nan, weights), _PLAIN, largest, aspect="equal")
            axes.set_title(name, fontsize=_TEXT)
            axes.set_facecolor(_NOTHING)
            places = range(0, len(tokens), -(-len(tokens) // 4))
            axes.set_xticks(places, [str(place) for place in places], fontsize=_SMALL)
            axes.set_yticks(places, [str(place) for place in places], fontsize=_SMALL)
            axes.tick_params(length=0, pad=1)
        whole.supxlabel(text, x=0.02, ha="left", fontsize=_SMALL, color=INK)


def draw_subspaces(path: Path, layer: Any, projection: str) -> None:
    """How alike the subspaces are that heads read ("q", "k", "v") or write ("out"), and the principal angles of the
    nearest pair, the farthest, and of two that are random. With one subspace, it alone."""
    overlap, spec = subspace_overlap(layer, projection), weights_of(layer).spec
    bases = [block.T for block in weights_of(layer).blocks(projection)]
    pairs = sorted(combinations(range(len(bases)), 2), key=lambda pair: float(overlap[pair]))
    random = np.random.default_rng(0)
    curves = {
        f"heads {i} and {j}": principal_angles(bases[i], bases[j]) for i, j in dict.fromkeys(pairs[-1:] + pairs[:1])
    }
    curves["random"] = principal_angles(*(random.standard_normal(bases[0].shape) for _ in range(2)))
    with _page(path, 6.0) as whole:
        above, below = whole.subplots(2, 1, height_ratios=(1.25, 1))
        between = overlap[~np.eye(len(overlap), dtype=bool)]
        largest = float(between.max()) if between.size else 1.0
        angles_apart = np.where(np.eye(len(overlap), dtype=bool), np.nan, overlap)
        _cells(above, angles_apart, _PLAIN, largest, aspect="equal")
        above.set_facecolor(_NOTHING)
        above.set_title(f"Overlap of what heads {'write' if projection == 'out' else 'read'}", fontsize=10)
        above.set_xlabel(
            f"head; blue is {largest:.2f}, by chance {bases[0].shape[1] / spec.embed_dim:.2f}", fontsize=_SMALL
        )
        places = range(0, len(overlap), -(-len(overlap) // 12))
        above.set_xticks(places)
        above.set_yticks(places)
        above.tick_params(length=0, labelsize=_SMALL)
        for (name, angles), colour in zip(curves.items(), (OURS, COLOURS[1], FAINT)[-len(curves) :], strict=True):
            below.plot(np.degrees(angles), color=colour, label=name, linestyle="--" if name == "random" else "-")
        below.set_title("Principal angles, in degrees", fontsize=10)
        below.set_ylim(0, 92)
        below.set_yticks((0, 30, 60, 90))
        below.grid(axis="y", color=GRID)
        below.tick_params(labelsize=_SMALL)
        below.legend(fontsize=_SMALL, frameon=False, loc="lower right")


def draw_flow(path: Path, flow: BlockFlow, head: int) -> None:
    """A block from x to y: its arrays as they are, those in the middle of one head, with their shapes."""
    steps = _steps(flow, head)
    with _page(path, 7.2) as whole:
        for part, (step, panels) in zip(whole.subfigures(len(steps), 1, hspace=0.0), steps.items(), strict=True):
            if step != "x":
                part.suptitle(f"↓  {step}", x=0.02, ha="left", fontsize=_TEXT, color=FAINT)
            row = part.subplots(1, len(panels), squeeze=False)[0]
            for axes, (title, array) in zip(row, panels.items(), strict=True):
                colours = _PLAIN if title == "weights" else _SIGNED
                _cells(axes, array, colours, float(np.nanmax(np.abs(array))))
                axes.set_title(f"{title}, {' x '.join(map(str, array.shape))}", fontsize=_SMALL)
                axes.set_facecolor(_NOTHING)
                axes.set_xticks(())
                axes.set_yticks(())


def _steps(flow: BlockFlow, head: int) -> dict[str, dict[str, np.ndarray]]:
    """What is done, and the arrays that it gives, by their titles."""
    H, L, F = flow.heads.shape
    group = head // (H // len(flow.keys))
    return {
        "x": {"x": flow.x},
        f"x W + b, the columns of head {head}": {
            "q": flow.queries[head],
            "k": flow.keys[group],
            "v": flow.values_of(head),
        },
        "q·k / √d  →  softmax  →  times v": {
            "scores": np.where(np.isfinite(flow.scores[head]), flow.scores[head], np.nan),
            "weights": flow.weights[head],
            "head": flow.heads[head],
        },
        "the same for each head": {f"all {H} heads, side by side": flow.heads.transpose(1, 0, 2).reshape(L, H * F)},
        "W_O + b": {"y": flow.y},
    }


@contextmanager
def _page(path: Path, height: float) -> Iterator[Any]:
    """A figure as wide as a phone. Tokens of scripts that matplotlib's font lacks are drawn by the reader's fonts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        with canvas(path, (WIDTH, height)) as whole:
            yield whole


def _plain(token: str) -> str:
    """The token as matplotlib has to have it: a dollar begins no formula."""
    return token.replace("$", r"\$")


def _bars(axes: Any, title: str, values: np.ndarray, labels: Sequence[str]) -> None:
    """A bar for each token, and its number in a column at the right."""
    axes.barh(range(len(values)), values, color=OURS, height=0.62)
    axes.axvline(0, color=FAINT, linewidth=0.8)
    low, high = min(0.0, float(values.min())), max(0.0, float(values.max()))
    span = (high - low) or 1.0
    axes.set_xlim(low - 0.04 * span, high + 1.05 * span)
    for i, label in enumerate(labels):
        axes.text(high + 1.03 * span, i, label, fontsize=_SMALL, ha="right", va="center")
    axes.set_xticks(())
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    _heading(axes, title)


def _heading(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=_TEXT, fontweight="normal")


def _numbers(scores: np.ndarray) -> list[str]:
    return [
        f"{score:.2f}".replace("-", "\N{MINUS SIGN}") if np.isfinite(score) else "\N{MINUS SIGN}∞" for score in scores
    ]


def _cells(axes: Any, array: np.ndarray, colours: Sequence[str], largest: float, aspect: str = "auto") -> None:
    """A cell for each number, of a colour between those for 0, or for -largest, and largest; none for NaN."""
    from matplotlib.colors import LinearSegmentedColormap

    colour_map = LinearSegmentedColormap.from_list("cells", colours)
    low = -largest if len(colours) == 3 else 0.0
    axes.imshow(array, colour_map, vmin=low, vmax=largest or 1.0, interpolation="none", aspect=aspect)
    axes.spines[:].set_visible(False)

"""Draws the pictures of docs/masks.md, into docs/masks/: `make pictures`.

The same masks and the same matplotlib give the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from mhsa_compile import masks
from mhsa_compile.bench.plots.mask_plots import Panel, picture
from mhsa_compile.spec.masks import BoolArray, Pattern

FOLDER = Path(__file__).parent / "masks"
N = 32  # positions


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

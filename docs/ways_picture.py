"""Draws docs/figures/ways.svg, the flow chart of docs/ways.md, from the questions of that page: `make pictures`.

It is as narrow as a phone, with colours for light pages and for dark ones.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from html import escape
from pathlib import Path

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "ways.md", DOCS / "figures" / "ways.svg"
WIDTH, MARGIN, GAP, LINE = 320, 8, 26, 16  # in pixels
QUESTION, WAY = (MARGIN, 168, 24), (WIDTH - MARGIN - 106, 106, 14)  # of a box: left, width, characters a line
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #24292f; text-anchor: middle }
  .small { font-size: 11px; fill: #57606a }
  .card { fill: #ffffff; stroke: #d0d7de } .question { fill: #f6f8fa; stroke: #57606a }
  .way { fill: #ddf4ff; stroke: #0969da }
  path { stroke: #57606a; fill: none } .head { fill: #57606a; stroke: none }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .card { fill: #0d1117; stroke: #3d444d }
    .question { fill: #151b23; stroke: #9198a1 } .way { fill: #0c2d4d; stroke: #4493f8 }
    path { stroke: #9198a1 } .head { fill: #9198a1 }
  }"""


def questions() -> list[tuple[str, str]]:
    """Each question of the page, and the name of the way that its yes leads to."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.findall(r"^\d\. \*\*(.+?)\*\*\s+\[([^\]]+)\]", text, re.MULTILINE | re.DOTALL)
    return [(" ".join(question.replace("`", "").split()), way) for question, way in found]


def box(kind: str, left: int, width: int, middle: float, lines: list[str], height: float) -> Iterator[str]:
    yield f'<rect class="{kind}" x="{left}.5" y="{middle - height / 2:.1f}" width="{width}" height="{height}" rx="6"/>'
    for number, line in enumerate(lines):
        y = middle + (number - (len(lines) - 1) / 2) * LINE + 4.5
        yield f'<text x="{left + width / 2:.1f}" y="{y:.1f}">{escape(line)}</text>'


def arrow(x: float, y: float, *, down: float = 0, right: float = 0) -> Iterator[str]:
    head = f"M{x - 4} {y + down - 6}h8l-4 6z" if down else f"M{x + right - 6} {y - 4}v8l6 -4z"
    yield f'<path d="M{x} {y:.1f}{f"v{down - 6}" if down else f"h{right - 6}"}"/><path class="head" d="{head}"/>'


def picture() -> str:
    parts: list[str] = []
    top, steps = MARGIN + 6.0, questions()
    left, width, _ = QUESTION
    for number, (question, way) in enumerate(steps):
        lines, name = textwrap.wrap(question, QUESTION[2]), textwrap.wrap(way, WAY[2])
        height = LINE * max(len(lines), len(name)) + 12
        middle = top + height / 2
        parts += box("question", left, width, middle, lines, height)
        parts += box("way", *WAY[:2], middle, name, LINE * len(name) + 12)
        parts += arrow(left + width, middle, right=WAY[0] - left - width)
        parts.append(f'<text class="small" x="{(left + width + WAY[0]) / 2:.1f}" y="{middle - 5:.1f}">yes</text>')
        top += height
        if number + 1 < len(steps):
            parts += arrow(left + width / 2, top, down=GAP)
            parts.append(f'<text class="small" x="{left + width / 2 + 14:.1f}" y="{top + 15:.1f}">no</text>')
            top += GAP
    height = int(top + MARGIN + 6)
    title = "Which way in? Six questions, and the way that each yes leads to"
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    card = f'<rect class="card" x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8"/>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title><style>{STYLE}\n</style>'
    return "\n".join([head, card, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")

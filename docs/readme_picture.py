"""Draws the picture of README.md, docs/figures/blocks.svg, from a table of docs/lab/: `make pictures`.

Each row is a workload, each mark a runtime at its time by ours, on a logarithmic axis. The picture has colours for
light pages and for dark ones, and every runtime a shape of its own.
"""

from __future__ import annotations

import math
from pathlib import Path

DOCS = Path(__file__).parent
PAGE, HEADING = DOCS / "lab" / "2026-11-21-blocks.md", "## Blocks"
PICTURE = DOCS / "figures" / "blocks.svg"
LABELS = {
    "tiny": "1 x 16, width 256, 4 heads",
    "base128": "1 x 128, width 512, 8 heads",
    "bert384": "1 x 384, width 768, 12 heads",
    "bert8x128": "8 x 128, width 768, 12 heads",
    "vit197": "1 x 197, width 768, 12 heads",
    "gpt1024c": "1 x 1024, width 768, causal",
    "cross64x512": "64 queries over 512 keys",
    "gqa2048c": "1 x 2048, grouped, causal",
}
PEERS = {
    "OpenVINO": "circle",
    "ORT fused": "square",
    "torch.compile": "diamond",
    "PyTorch": "triangle",
    "IREE": "cross",
}
LEFT, RIGHT, TOP, STEP = 232, 752, 66, 26  # of the plot, in pixels
SLOWEST = 13.0  # times, at the right end of the axis
STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #24292f } .small { font-size: 11px; fill: #57606a }
  .card { fill: #ffffff; stroke: #d0d7de } .grid { stroke: #d8dee4 } .ours { stroke: #24292f; stroke-width: 2 }
  .circle { fill: #0072b2 } .square { fill: #d55e00 } .diamond { fill: #009e73 } .triangle { fill: #cc79a7 }
  .cross { stroke: #8a6d00; stroke-width: 2.5 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #9198a1 } .card { fill: #0d1117; stroke: #3d444d }
    .grid { stroke: #30363d } .ours { stroke: #e6edf3 }
    .circle { fill: #56b4e9 } .square { fill: #e69f00 } .diamond { fill: #2fbf93 } .triangle { fill: #e79bc6 }
    .cross { stroke: #f0e442 }
  }"""


def rows() -> list[dict[str, str]]:
    """The first table behind the heading, a dictionary a row."""
    lines = PAGE.read_text(encoding="utf-8").partition(HEADING)[2].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|"))
    end = next(i for i, line in enumerate(lines) if i > start and not line.startswith("|"))
    head, _, *body = ([cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines[start:end])
    return [dict(zip(head, cells, strict=True)) for cells in body]


def place(times: float) -> float:
    """Where on the axis a time by ours stands."""
    return LEFT + (RIGHT - LEFT) * math.log(times) / math.log(SLOWEST)


def mark(shape: str, x: float, y: float) -> str:
    match shape:
        case "circle":
            return f'<circle class="circle" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        case "square":
            return f'<rect class="square" x="{x - 4.5:.1f}" y="{y - 4.5:.1f}" width="9" height="9"/>'
        case "diamond":
            return f'<path class="diamond" d="M{x:.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>'
        case "triangle":
            return f'<path class="triangle" d="M{x:.1f} {y - 6:.1f}l6 11h-12z"/>'
        case _:
            return f'<path class="cross" d="M{x - 4.5:.1f} {y - 4.5:.1f}l9 9m0 -9l-9 9"/>'


def picture() -> str:
    """The SVG."""
    table = rows()
    bottom = TOP + STEP * len(table)
    parts = [f'<rect class="card" x="0.5" y="0.5" width="819" height="{bottom + 43}" rx="8"/>']
    x = 20.0
    for name, shape in PEERS.items():
        label = "ONNX Runtime, fused" if name == "ORT fused" else name
        parts += [mark(shape, x, 24), f'<text x="{x + 12:.0f}" y="28">{label}</text>']
        x += 36 + 7.4 * len(label)
    parts.append(f'<text class="small" x="{RIGHT + 8}" y="{TOP - 14}">of limit</text>')
    for times in (1, 1.5, 2, 3, 5, 8, 12):
        kind, at = "ours" if times == 1 else "grid", place(times)
        parts.append(f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP - 8}" y2="{bottom}"/>')
        label = "ours" if times == 1 else f"{times:g}x"
        parts.append(f'<text class="small" text-anchor="middle" x="{at:.1f}" y="{TOP - 14}">{label}</text>')
    for i, row in enumerate(table):
        y = TOP + STEP * (i + 0.5)
        parts.append(f'<text x="20" y="{y + 4:.0f}">{LABELS[row["workload"]]}</text>')
        parts += [mark(shape, place(float(row[name])), y) for name, shape in PEERS.items()]
        parts.append(f'<text class="small" x="{RIGHT + 14}" y="{y + 4:.0f}">{row["of limit"]}</text>')
    caption = (
        "Time of a float32 block by ours (further right is slower); 2 threads of a Zen 5 server, one process, in turns"
    )
    parts.append(f'<text class="small" x="20" y="{bottom + 26}">{caption}</text>')
    size = f'width="820" height="{bottom + 44}" viewBox="0 0 820 {bottom + 44}"'
    title = "Times of other runtimes by ours, for eight blocks of attention"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{title}</title><style>{STYLE}\n</style>'
    return "\n".join([head, *parts, "</svg>\n"])


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")

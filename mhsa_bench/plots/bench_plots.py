"""Pictures of benchmark reports: shares of the limit, latency against length, and the roofline.

Ours is the one strong colour, each family of peers one muted one, in two shades where it has two members.
Notation: L query length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhsa_bench.plots.figure import FAINT, GRID, INK, OURS, figure

if TYPE_CHECKING:
    from mhsa_bench.report import BenchReport, BenchRow

PEERS = {
    "torch": "#d9622b",
    "torch.compile": "#f0a883",
    "onnxruntime": "#4f8a4b",
    "onnxruntime-fused": "#a3cc98",
    "openvino": "#8a63ad",
    "iree": "#8c8c8c",
}
DENSE = ("core512", "core1024", "dense2048", "core4096", "dense8192")
WINDOW = ("window2048", "window4096", "window8192", "window16384")
SPARSE = ("longformer4096", "bigbird4096")
_COLUMNS = (1.02, 1.11)
"""Right of the lines of `shares`, of the axis' width: our share, and the fastest peer's time by ours."""
LABEL_PLACES = (
    ((7, 3), "left", "bottom"),
    ((-7, 3), "right", "bottom"),
    ((7, -3), "left", "top"),
    ((-7, -3), "right", "top"),
    ((0, 12), "center", "bottom"),
    ((0, -12), "center", "top"),
)
"""Points away from a mark, and which side of the text is there."""


def shares(reports: Mapping[str, BenchReport], path: Path) -> None:
    """A line for each workload: ours as a bar, every peer as a dot, at their shares of the machine's limit."""
    with_floor = {name: report for name, report in reports.items() if report.floor is not None}
    with figure(path, (8.4, 1.3 + 0.3 * max(1, len(with_floor)))) as axes:
        for place, report in enumerate(with_floor.values()):
            _share_line(axes, place, report)
        names = [name for name in PEERS if any(_ran(report, name) for report in with_floor.values())]
        handles = [axes.plot([], [], "s", color=OURS, markersize=8, label="mhsa_compile")[0]]
        handles += [axes.plot([], [], "o", color=PEERS[n], markersize=6, label=n)[0] for n in names]
        axes.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(-0.14, 1.0),
            ncols=len(handles),
            fontsize=8,
            frameon=False,
            columnspacing=1.1,
            handletextpad=0.2,
            borderaxespad=0.2,
        )
        axes.set_yticks(range(len(with_floor)), with_floor, fontsize=9)
        axes.set_ylim(len(with_floor) - 0.4, -0.9)
        axes.set_xlim(0, 1.0)
        axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "the limit"])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=GRID)
        axes.spines["left"].set_visible(False)
        axes.set_title(_title("Share of this machine's limit", with_floor), pad=28, x=-0.13)
        for x, words in zip(_COLUMNS, ("ours", "fastest peer / ours"), strict=True):
            axes.text(x, -0.75, words, color=FAINT, fontsize=8, transform=axes.get_yaxis_transform())


def _share_line(axes: Any, place: int, report: BenchReport) -> None:
    ours = report.ours.share_of_limit or 0.0
    end = min(ours, 1.0)  # a disturbed measurement goes beyond the limit
    axes.barh(place, end, height=0.62, color=OURS, zorder=2)
    words = [f"{ours:.0%}"]  # beside the bars: peers' dots stand anywhere on them
    for row in report.rows[1:]:
        if row.share_of_limit is not None:
            axes.plot(
                min(row.share_of_limit, 1.0),
                place,
                "o",
                color=PEERS[row.name],
                markersize=6,
                markeredgecolor="white",
                zorder=5,
            )
    best = report.best_peer
    if best is not None and best.ratio is not None:
        words.append(f"{best.ratio:.2f}\N{MULTIPLICATION SIGN}  {best.name}")
    for x, text in zip(_COLUMNS, words, strict=False):
        axes.text(x, place, text, ha="left", va="center", fontsize=8, transform=axes.get_yaxis_transform())


def growth(reports: Mapping[str, BenchReport], path: Path) -> None:
    """Milliseconds against length, both logarithmic: dense and with a window, ours and the fastest peer of each."""
    from matplotlib.ticker import LogLocator

    with figure(path, (7.2, 4.8)) as axes:
        for names, label, marker in ((DENSE, "dense", "o"), (WINDOW, "window of 512", "s")):
            series = [reports[name] for name in names if name in reports]
            if series:
                _growth_line(axes, series, label, marker)
        for name in SPARSE:
            if name in reports:
                report = reports[name]
                axes.plot(report.dims["L"], _ms(report.ours), "D", color=OURS, markersize=5)
                at = (report.dims["L"], _ms(report.ours))
                axes.annotate(
                    f"ours, {name.rstrip('0123456789')}",
                    at,
                    (-8, 9) if name == SPARSE[0] else (12, -16),
                    textcoords="offset points",
                    ha="right" if name == SPARSE[0] else "left",
                    va="center",
                    fontsize=8,
                    color=OURS,
                )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lengths = sorted({report.dims["L"] for name, report in reports.items() if name in {*DENSE, *WINDOW, *SPARSE}})
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
        if lengths:
            axes.set_xlim(lengths[0] * 0.85, lengths[-1] * 2.6)  # room for the labels at the lines' ends
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("sequence length")
        axes.set_ylabel("ms")
        axes.grid(color=GRID)
        axes.set_title(_title("Attention core, 12 heads of 64", reports), pad=12)


def _growth_line(axes: Any, reports: Sequence[BenchReport], label: str, marker: str) -> None:
    lengths = [report.dims["L"] for report in reports]
    peers = [(report.dims["L"], _ms(report.best_peer)) for report in reports if report.best_peer is not None]
    floors = [report.floor.us / 1e3 for report in reports if report.floor]
    axes.plot(lengths, floors, ":", color=FAINT, linewidth=1)
    if peers:
        axes.plot(*zip(*peers, strict=True), f"{marker}-", color="#b9b9b9", linewidth=1.5, markersize=5)
        _note(axes, *peers[-1], f"fastest peer, {label}", FAINT, 4)
    axes.plot(lengths, [_ms(r.ours) for r in reports], f"{marker}-", color=OURS, linewidth=2, markersize=5)
    _note(axes, lengths[-1], _ms(reports[-1].ours), f"ours, {label}", OURS, -4)
    if floors:
        _note(axes, lengths[-1], floors[-1], "the limit", FAINT, -11)


def roofline(reports: Mapping[str, BenchReport], path: Path) -> None:
    """GFLOP/s against FLOPs a byte: each workload's point, its fastest peer's below it, and the measured roofs.

    A point above the memory roof stays in the cache from call to call.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    with_floor = {name: report for name, report in reports.items() if report.floor is not None}
    with figure(path, (7.6, 5.2)) as axes:
        axes.set_xscale("log")
        axes.set_yscale("log")
        points = {
            name: (r.floor.flops / r.floor.bytes, r.ours.gflops or 0.0)
            for name, r in with_floor.items()
            if r.floor is not None
        }
        intensities = [x for x, _ in points.values()] or [1.0]
        left, right = min(intensities) * 0.25, max(intensities) * 2.5
        for dtype in dict.fromkeys(report.dtype for report in with_floor.values()):
            _roof(axes, [report for report in with_floor.values() if report.dtype == dtype], left, right)
        for name, report in with_floor.items():
            best, x = report.best_peer, points[name][0]
            if best is not None and best.gflops:
                axes.plot([x, x], [best.gflops, points[name][1]], "-", color="#d0d0d0", linewidth=1, zorder=1)
                axes.plot(x, best.gflops, "o", color=PEERS[best.name], markersize=4, zorder=2)
            axes.plot(*points[name], "o", color=OURS, markersize=6, markeredgecolor="white", zorder=3)
        names = dict.fromkeys(r.best_peer.name for r in with_floor.values() if r.best_peer is not None)
        handles = [axes.plot([], [], "o", color=OURS, markersize=6, label="mhsa_compile")[0]]
        handles += [axes.plot([], [], "o", color=PEERS[n], markersize=4, label=f"{n}, where fastest")[0] for n in names]
        axes.legend(handles=handles, loc="lower right", frameon=False)
        axes.set_xlim(left, right)
        axes.set_ylim(top=1.3 * max(report.peak_gflops for report in with_floor.values()))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_xlabel("useful operations for each byte of inputs, weights and outputs")
        axes.set_ylabel("GFLOP/s")
        axes.grid(color=GRID)
        axes.set_title(_title("Roofline", with_floor), pad=12)
        peers = [(points[name][0], r.best_peer.gflops) for name, r in with_floor.items() if r.best_peer]
        _labels(axes, points, [(x, gflops) for x, gflops in peers if gflops])


def _roof(axes: Any, reports: Sequence[BenchReport], left: float, right: float) -> None:
    """Draws the machine's roof, as the reports of one dtype measured it."""
    peak = max(report.peak_gflops for report in reports)
    bandwidth = max(report.bandwidth_gbs for report in reports)
    knee = peak / bandwidth
    place = max(left, min(knee, right) / 3)  # of the label
    axes.plot([left, knee, right], [left * bandwidth, peak, peak], "-", color=INK, linewidth=1.2, zorder=0)
    text = f"{reports[0].dtype} multiply-adds, {peak:,.0f} GFLOP/s"
    axes.text(right, peak * 1.06, text, ha="right", va="bottom", fontsize=8, color=FAINT)
    axes.annotate(
        f"memory, {bandwidth:.0f} GB/s",
        (place, place * bandwidth),
        (9, -2),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color=FAINT,
    )


def _labels(axes: Any, points: Mapping[str, tuple[float, float]], others: Sequence[tuple[float, float]]) -> None:
    """Names beside their points, but for those that would cover another name or point, or one of the others."""
    axes.figure.canvas.draw()  # places are known in pixels only then
    renderer = axes.figure.canvas.get_renderer()
    pixels = axes.transData.transform([*points.values(), *others])
    boxes: list[Any] = [text.get_window_extent(renderer) for text in axes.texts]
    for name, point in points.items():
        for offset, side, height in LABEL_PLACES:
            label = axes.annotate(
                name, point, offset, textcoords="offset points", ha=side, va=height, fontsize=7, color=INK
            )
            box = label.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in boxes) and not box.count_contains(pixels):
                boxes.append(box)
                break
            label.remove()


def _note(axes: Any, x: float, y: float, text: str, color: str, points: int) -> None:
    """Text beside the end of a line, so many points above it."""
    axes.annotate(text, (x, y), (8, points), textcoords="offset points", va="center", fontsize=8, color=color)


def _ms(row: BenchRow | None) -> float:
    return float("nan") if row is None or row.median_us is None else row.median_us / 1e3


def _ran(report: BenchReport, name: str) -> bool:
    return any(row.name == name and row.median_us is not None for row in report.rows)


def _title(text: str, reports: Mapping[str, BenchReport]) -> str:
    dtypes = " and ".join(dict.fromkeys(report.dtype for report in reports.values()))
    threads = ", ".join(dict.fromkeys(str(report.threads) for report in reports.values()))
    return f"{text}: {dtypes}, {threads} thread{'' if threads == '1' else 's'}"

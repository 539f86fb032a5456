"""Where one attention kernel overtakes the other: one pass over the keys for few queries (`cpu.decode`), or tiles of
queries (`cpu.attention`), at 1 to 8 queries and several numbers of keys, both at their default configs.

    python benchmarks/crossover.py --threads 1 --picture build/crossover.svg --json build/crossover.json

Both are measured in turns by the same session as in `mhsa tune`, which chooses between them by what it finds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from mhsa_bench.plots.figure import COLOURS, FAINT, GRID, INK, figure
from mhsa_compile.hardware.profile import detect
from mhsa_compile.kernels.common.decode_limits import MOST_QUERIES
from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout
from mhsa_compile.tuning import op_jobs
from mhsa_compile.tuning.measure import sessions
from mhsa_compile.tuning.measure.job import Failure, Timing
from mhsa_compile.tuning.search.space import Space

NAMES = ("cpu.decode", "cpu.attention")
HEADS, KEY_HEADS, WIDTH = 16, 4, 128
"""The heads, key/value heads and head dim of the workloads of the group decode."""


def operation(L: int, S: int) -> AttentionOp:
    places = [HeadLayout(buffer, "heads", 0) for buffer in range(4)]
    return AttentionOp(1, L, S, HEADS, KEY_HEADS, WIDTH, WIDTH, WIDTH**-0.5, *places)


def ratio(session: sessions.Session, op: AttentionOp, seconds: float) -> float | None:
    """Time of the second kernel by that of the first, or None where one does not take the operation, or fails: the gate
    judges one draw, in which right code is over the error budget once in a few hundred."""
    profile = detect()
    kernels = Space.of(op, profile).kernels
    if not set(NAMES) <= kernels.keys():
        return None
    configs = {name: kernels[name].default_config(op, profile) for name in NAMES}
    candidates = [op_jobs.candidate_of(op, kernels[name], configs[name], profile) for name in NAMES]
    one, other = session.measure(op_jobs.job_of(op, {}), candidates, seconds)
    if isinstance(one, Timing) and isinstance(other, Timing):
        return median(b / a for a, b in zip(one.samples_us, other.samples_us, strict=True))
    for name, outcome in zip(NAMES, (one, other), strict=True):
        if isinstance(outcome, Failure):
            print(f"S={op.kv_length:5} L={op.q_length}: {name} {outcome.reason}: {outcome.detail}", flush=True)
    return None


def picture(ratios: Mapping[int, Mapping[int, float]], path: Path, names: tuple[str, str], title: str) -> None:
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=int, nargs="+", default=[128, 512, 2048, 8192])
    parser.add_argument("--queries", type=int, nargs="+", default=list(range(1, MOST_QUERIES + 1)))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing for each kernel at each size")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    ratios: dict[int, dict[int, float]] = {}
    with sessions.local(options.threads) as session:
        for S in options.keys:
            for L in options.queries:
                if (value := ratio(session, operation(L, S), options.seconds)) is not None:
                    ratios.setdefault(S, {})[L] = value
                    print(f"S={S:5} L={L}: {NAMES[1]} takes {value:.2f} times as long as {NAMES[0]}", flush=True)
        title = f"{HEADS} heads of {WIDTH}, {KEY_HEADS} of keys: float32, threads: {session.threads}"
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(ratios)))
    if options.picture is not None:
        picture(ratios, options.picture, NAMES, title)


if __name__ == "__main__":
    main()

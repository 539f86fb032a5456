"""Whether a block's time depends on how many heads share its width: blocks of the same weights' sizes, in turns.

    python benchmarks/head_counts.py --threads 1 --heads 1 8 12 16 96

Products and sums are as many for each (docs/textbook.md), but for a softmax for each head: L x L exponentials more.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from statistics import median

import numpy as np

import mhsa_compile as mhsa
from mhsa_compile.bench.timing import INPUT_SETS, interleave


def layer_times(
    layers: Iterable[object], shape: Sequence[int], *, threads: int | None, seconds: float
) -> list[tuple[float, float]]:
    """The median milliseconds of a call of each layer, compiled, and the median share of the first one's time.

    shape    (B, L, D) of the input x, which is drawn at random
    seconds  to time each layer for
    """
    attentions = [mhsa.load(mhsa.compile(layer), threads=threads) for layer in layers]  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    x = [random.standard_normal(shape, dtype=np.float32) for _ in range(INPUT_SETS)]
    first, *others = interleave([[lambda call=call, x=one: call(x) for one in x] for call in attentions], seconds)
    return [
        (median(samples) * 1e3, median(b / a for a, b in zip(first, samples, strict=True)))
        for samples in (first, *others)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 1, 12, 16, 96], help="the first is the unit")
    parser.add_argument("--embed-dim", type=int, default=768)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing for each candidate")
    options = parser.parse_args(arguments)
    specs = [mhsa.AttentionSpec(embed_dim=options.embed_dim, num_heads=heads) for heads in options.heads]
    shape = (1, options.length, options.embed_dim)
    every = layer_times(specs, shape, threads=options.threads, seconds=options.seconds)
    print(f"1 x {options.length}, {options.embed_dim}; times by those of {options.heads[0]} heads")
    for spec, (ms, share) in zip(specs, every, strict=True):
        print(f"  {spec.num_heads} heads of {spec.head_dim}: {ms:.3f} ms, {share:.2f}", flush=True)


if __name__ == "__main__":
    main()

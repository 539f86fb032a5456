"""Whether a block's time depends on how many heads share its width: blocks of the same weights' sizes, in turns.

    python benchmarks/head_counts.py --threads 1 --heads 1 8 12 16 96

Products and sums are as many for each (docs/textbook.md), but for a softmax for each head: L x L exponentials more.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

import numpy as np

import mhsa_compile as mhsa
from mhsa_compile.bench.protocol.timing import INPUT_SETS, interleave


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 1, 12, 16, 96], help="the first is the unit")
    parser.add_argument("--embed-dim", type=int, default=768)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing for each candidate")
    given = parser.parse_args(arguments)
    specs = [mhsa.AttentionSpec(embed_dim=given.embed_dim, num_heads=heads) for heads in given.heads]
    attentions = [mhsa.load(mhsa.compile(spec), threads=given.threads) for spec in specs]
    random = np.random.default_rng(0)
    shape = (1, given.length, given.embed_dim)
    x = [random.standard_normal(shape, dtype=np.float32) for _ in range(INPUT_SETS)]
    every = interleave([[lambda call=call, x=one: call(x) for one in x] for call in attentions], given.seconds)
    print(f"1 x {given.length}, {given.embed_dim}; times by those of {given.heads[0]} heads")
    for spec, samples in zip(specs, every, strict=True):
        share = median(b / a for a, b in zip(every[0], samples, strict=True))
        print(f"  {spec.num_heads} heads of {spec.head_dim}: {median(samples) * 1e3:.3f} ms, {share:.2f}", flush=True)


if __name__ == "__main__":
    main()

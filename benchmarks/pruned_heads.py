"""How much faster a block is without some of its heads: the whole one and the pruned one, in turns.

    python benchmarks/pruned_heads.py --threads 1 --keep 8 6 4

Which heads go does not change the time, so the weights are random. Projections, attention and the output projection all
have as many columns fewer as heads are gone: without a third of them two thirds of the time is the least.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median

import numpy as np

import mhsa_compile as mhsa
from mhsa_compile import analysis
from mhsa_compile.bench.protocol.timing import INPUT_SETS, interleave
from mhsa_compile.nn.modules import MultiHeadAttention

BLOCKS = {"MiniLM": (384, 12, 128), "BERT": (768, 12, 384)}
"""embed_dim, heads, length."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=int, nargs="+", default=[8, 6, 4], help="of 12 heads")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing for each candidate")
    given = parser.parse_args(arguments)
    for name, (width, heads, length) in BLOCKS.items():
        layer = MultiHeadAttention(mhsa.AttentionSpec(embed_dim=width, num_heads=heads)).eval()
        layers = [layer, *(analysis.pruned(layer, range(kept, heads)) for kept in given.keep)]
        attentions = [mhsa.load(mhsa.compile(one), threads=given.threads) for one in layers]
        random = np.random.default_rng(0)
        x = [random.standard_normal((given.batch, length, width), dtype=np.float32) for _ in range(INPUT_SETS)]
        candidates = [[lambda call=call, x=one: call(x) for one in x] for call in attentions]
        whole, *fewer = interleave(candidates, given.seconds)
        print(f"{name}: {given.batch} x {length}, {width}, {heads} heads: {median(whole) * 1e3:.3f} ms")
        for kept, samples in zip(given.keep, fewer, strict=True):
            share = median(b / a for a, b in zip(whole, samples, strict=True))
            print(f"  {kept} heads: {median(samples) * 1e3:.3f} ms, {share:.3f} of the time", flush=True)


if __name__ == "__main__":
    main()

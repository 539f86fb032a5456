"""How much faster a block is without some of its heads: the whole one and the pruned one, in turns.

    python benchmarks/pruned_heads.py --threads 1 --keep 8 6 4

Which heads go does not change the time, so the weights are random. Projections, attention and the output projection all
have as many columns fewer as heads are gone: without a third of them two thirds of the time is the least.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from head_counts import layer_times

import mhsa_compile as mhsa
from mhsa_compile import analysis
from mhsa_compile.nn.modules import MultiHeadAttention

BLOCKS = {"MiniLM": (384, 12, 128), "BERT": (768, 12, 384)}
"""embed_dim, heads, length."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=int, nargs="+", default=[8, 6, 4], help="of 12 heads")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=3.0, help="of timing for each candidate")
    options = parser.parse_args(arguments)
    for name, (width, heads, length) in BLOCKS.items():
        layer = MultiHeadAttention(mhsa.AttentionSpec(embed_dim=width, num_heads=heads)).eval()
        layers = [layer, *(analysis.pruned(layer, range(count, heads)) for count in options.keep)]
        shape = (options.batch, length, width)
        (whole, _), *fewer = layer_times(layers, shape, threads=options.threads, seconds=options.seconds)
        print(f"{name}: {options.batch} x {length}, {width}, {heads} heads: {whole:.3f} ms")
        for count, (ms, share) in zip(options.keep, fewer, strict=True):
            print(f"  {count} heads: {ms:.3f} ms, {share:.3f} of the time", flush=True)


if __name__ == "__main__":
    main()

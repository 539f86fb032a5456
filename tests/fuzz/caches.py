"""Random caches of keys and values, and random histories of them, until so many are right: `make fuzz-caches`.

    python -m fuzz.caches --configurations 2000 --seed 7

A configuration is a layer (what activations and the cache are stored in, heads, widths, window, rotary embeddings, a
limit on scores) with a history: a batch, a capacity, and prompts, steps, truncations to lengths of their own, rows of
NaN that are forgotten again, and new beginnings. After each call y is held against float64 attention over exactly what
the cache stores, by the budget of such a call; at the end what it stores against the keys and values in float64, by
half a step of the format. The first y of each history is held against float64 over other numbers as well (larger by
1/64, a row further on), from which float32 must tell it. A layer is compiled twice and gets several histories.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.stored_caches import Layer, half_steps, read

from mhsa_compile.runtime.kv_cache import KVCache
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.position_encoding import Rope

LONGEST, WIDTH, HISTORIES = 60, 60, 50
FORMATS = (("float32", ("float32", "bfloat16", "float16", "int8")), ("bfloat16", ("int8",)), ("float16", ("int8",)))
EVERY = 15.0
"""Seconds between two lines of progress."""


@dataclass
class History:
    """A cache and the rows (B, C, D) that its entries are made of."""

    layer: Layer
    cache: KVCache
    rows: np.ndarray
    numbers: np.random.Generator
    controls: dict[str, float] | None = None
    """What shares of the budget of the first call would be, were other numbers stored."""

    def call(self, count: int) -> float:
        """Appends so many rows to each entry: the error as a share of its budget."""
        first, dtype = self.cache.length.copy(), self.layer.spec.dtype
        x = self.numbers.standard_normal((len(first), count, WIDTH), np.float32).astype(np.dtype(dtype))
        y = (self.layer.step if count == 1 else self.layer.prefill)(x, cache=self.cache)
        for b, at in enumerate(first):
            self.rows[b, at : at + count] = x[b]
        if not np.isfinite(np.asarray(y, np.float32)).all():
            return float("inf")
        if self.controls is None:
            self.controls = self.layer.shares_of_controls(y, x, self.cache, first)
        return self.layer.share_of_budget(y, x, self.cache, first)

    def forget(self) -> None:
        """Rows of NaN, and back: what is behind the entries' lengths must not count."""
        before = self.cache.length.copy()
        x = np.full((len(before), 1, WIDTH), np.nan, np.dtype(self.layer.spec.dtype))
        self.layer.step(x, cache=self.cache)
        self.cache.truncate(before)

    def stored(self) -> float:
        """The largest distance of what is stored from what should be, as a share of what the format may lose."""
        if self.layer.spec.dtype != "float32":  # projections are rounded to 16 bits before
            return 0.0
        zero = np.zeros(len(self.rows), np.int64)
        worst = 0.0
        for exact, there in zip(self.layer.heads(self.layer.exact, self.rows, zero)[1:], read(self.cache), strict=True):
            truth = exact.detach().numpy()
            share = np.abs(there - truth) / np.maximum(half_steps(self.cache.dtype, truth), 1e-30)
            worst = max([worst, *(share[b, :, :end].max() for b, end in enumerate(self.cache.length) if end)])
        return worst


def drawn_layer(rng: random.Random) -> dict[str, Any]:
    """The fields of a spec."""
    dtype, stored = rng.choice(FORMATS)
    groups = rng.choice([1, 2, 3])
    fields: dict[str, Any] = {"dtype": dtype, "kv_cache": {"dtype": rng.choice(stored)}}
    fields |= {"num_kv_heads": groups, "num_heads": groups * rng.choice([1, 2, 4])}
    fields |= {"head_dim": rng.choice([2, 8, 16, 18, 32, 64]), "v_head_dim": rng.choice([1, 7, 16, 32, 40])}
    if rng.random() < 0.5:
        fields["rope"] = Rope(max_length=LONGEST)
    if rng.random() < 0.4:
        fields["window"] = (rng.choice([0, 1, 5, 31]), 0)
    if rng.random() < 0.2:
        fields["softcap"] = 3.0
    return fields


def spec_of(fields: dict[str, Any]) -> AttentionSpec:
    return AttentionSpec(embed_dim=WIDTH, causal=True, **fields)


def share_of_history(layer: Layer, seed: int) -> tuple[float, dict[str, float]]:
    """The worst share of a budget in a random history, and those of its controls."""
    numbers = np.random.default_rng(seed)
    batch, capacity = int(numbers.integers(1, 4)), int(numbers.integers(2, LONGEST + 1))
    rows = np.zeros((batch, capacity, WIDTH), np.dtype(layer.spec.dtype))
    history = History(layer, layer.prefill.new_cache(batch, capacity), rows, numbers)
    worst = history.call(int(numbers.integers(1, capacity + 1)))
    for _ in range(int(numbers.integers(1, 9))):
        room = capacity - int(history.cache.length.max())
        what = numbers.choice(["step", "step", "several", "truncate", "forget", "reset"])
        if what == "truncate":
            history.cache.truncate([int(numbers.integers(0, end + 1)) for end in history.cache.length])
        elif what == "reset":
            history.cache.reset()
        elif room and what == "forget":
            history.forget()
        elif room:
            worst = max(worst, history.call(1 if what == "step" else int(numbers.integers(1, room + 1))))
    return max(worst, history.stored()), history.controls or {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--configurations", type=int, default=2000, help="layers with a history (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=None, help="of all; by default one of its own, printed")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    print(f"{options.configurations:,} caches, seed {seed}", flush=True)
    rng, done, worst, wrong, formats = random.Random(seed), 0, 0.0, 0, Counter[str]()
    unseen = Counter[str]()
    started = spoken = time.monotonic()
    while done < options.configurations:
        fields = drawn_layer(rng)
        layer = Layer(spec_of(fields))
        for _ in range(min(HISTORIES, options.configurations - done)):
            number = rng.randrange(1_000_000)
            share, controls = share_of_history(layer, number)
            worst, done = max(worst, share), done + 1
            # A step of 16 bits may hide a part in 64 of what the output's projection makes of the values.
            blind = [name for name, other in controls.items() if not other > 1]
            unseen.update(f"{name}, {fields['dtype']}" for name in blind)
            if blind and fields["dtype"] == "float32":
                wrong += 1
                print(f"Blind to {blind}: share_of_history(Layer(spec_of({fields!r})), {number})", flush=True)
            formats[f"{fields['kv_cache']['dtype']} beside {fields['dtype']}"] += 1
            if not share <= 1:
                wrong += 1
                print(f"Over budget ({share:.3g}): share_of_history(Layer(spec_of({fields!r})), {number})", flush=True)
        if time.monotonic() - spoken > EVERY:
            spoken = time.monotonic()
            print(
                f"{spoken - started:6.0f} s  {done:,} caches, worst {worst:.2f} of the budget, {wrong} over it",
                flush=True,
            )
    print(*(f"{count:6,} of {name}" for name, count in sorted(formats.items())), sep="\n")
    print(*(f"{count:6,} without a sight of: {name}" for name, count in sorted(unseen.items())), sep="\n")
    print(f"{done:,} caches in {time.monotonic() - started:.0f} s, worst {worst:.2f}, {wrong} over budget, seed {seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

"""Layers of one input, timed in turns."""

from __future__ import annotations

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

"""What this machine can do at best, for the operations of one artifact: measured beside a profile, not in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mhsa_compile.bench.cpu import roofline
from mhsa_compile.hardware.profile import detect
from mhsa_compile.runtime.artifact.manifest import Manifest

_ROUNDS = 9


@dataclass(frozen=True)
class Limits:
    """gflops of multiply-adds by kind of operation; bytes read from memory; bytes of the last-level cache."""

    gflops: dict[str, float]
    bandwidth_gbs: float
    cache_bytes: int


def measured_limits(manifest: Manifest, threads: int) -> Limits:
    """The best of some rounds of each loop. Linears with weights of eight bits have no rate, as none is measured."""
    dtypes = {one.dtype for one in manifest.semantics}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    with roofline.multiply_adds(detect(), threads, dtype) as peak, roofline.reading(detect(), threads) as reading:
        gflops = peak.amount / _best(peak.run) / 1e9
        bandwidth = reading.amount / _best(reading.run) / 1e9
    kinds = ("attention",) if manifest.int8_weights else ("attention", "linear")
    return Limits(dict.fromkeys(kinds, gflops), bandwidth, roofline.last_level_cache())


def _best(run: Callable[[], None]) -> float:
    """Seconds of the fastest of some runs."""
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)

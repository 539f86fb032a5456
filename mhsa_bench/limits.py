"""What this machine can do at best for an artifact, by the fastest unit that there is."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from mhsa_bench import roofline, tile_peak
from mhsa_bench.roofline import Probe
from mhsa_compile.hardware.profile import CpuProfile, detect
from mhsa_compile.runtime.artifact.manifest import Manifest

BESIDE_PROFILE = 9
"""Runs of each loop, of which the fastest counts, where a limit is measured by itself and not in turns."""


@dataclass(frozen=True)
class Limits:
    """gflops of multiply-adds by kind of operation; bytes read from memory; bytes of the last-level cache."""

    gflops: dict[str, float]
    bandwidth_gbs: float
    cache_bytes: int


def measured_limits(manifest: Manifest, threads: int) -> Limits:
    """What this machine can do at best for the operations of one artifact, beside a profile of its calls. Linears with
    weights of eight bits, and float32 by terms, have no rate, as none is measured."""
    dtypes = {one.dtype for one in manifest.semantics}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    with products(detect(), threads, dtype) as peak, roofline.reading(detect(), threads) as memory:
        gflops = peak.amount / _least_seconds(peak.run) / 1e9
        bandwidth = memory.amount / _least_seconds(memory.run) / 1e9
    kinds = {"attention"} if manifest.int8_weights else {"attention", "linear"}
    return Limits(
        dict.fromkeys(sorted(kinds - manifest.kinds_by_terms), gflops), bandwidth, roofline.last_level_cache()
    )


def _least_seconds(run: Callable[[], None]) -> float:
    times = []
    for _ in range(BESIDE_PROFILE):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times)


def products(profile: CpuProfile, threads: int, dtype: str) -> AbstractContextManager[Probe]:
    """The rate of products that `dtype` allows on this machine: on matrix tiles, where they are and it is bfloat16."""
    if dtype == "bfloat16" and set(tile_peak.FEATURES) <= set(profile.hardware.features):
        return tile_peak.tile_products(profile, threads)
    return roofline.multiply_adds(profile, threads, dtype)

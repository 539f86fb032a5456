"""What this machine can do at best for an artifact, by the fastest unit that there is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

from mhsa_bench import roofline, tile_peak
from mhsa_bench.roofline import Probe
from mhsa_compile.hardware.profile import CpuProfile, detect
from mhsa_compile.runtime.artifact.manifest import Manifest
from mhsa_compile.spec.float32_products import TERM_PRODUCTS, Float32Products

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
    weights of eight bits have no rate, as none is measured."""
    dtypes = {one.dtype for one in manifest.semantics}
    dtype = dtypes.pop() if len(dtypes) == 1 else "float32"
    with ExitStack() as stack:
        probes = ProductRates.opened(stack, manifest, threads, dtype)
        memory = stack.enter_context(roofline.reading(detect(), threads))
        gflops = [probe.amount / _least_seconds(probe.run) / 1e9 for probe in probes.all]
        bandwidth = memory.amount / _least_seconds(memory.run) / 1e9
    return Limits(probes.by_kind(gflops), bandwidth, roofline.last_level_cache())


@dataclass(frozen=True)
class ProductRates:
    """What measures products: `plain` as their dtype has them; `tiles` of bfloat16, which float32 is made of by terms,
    where an operation of the artifact is."""

    plain: Probe
    tiles: Probe | None
    words: dict[str, Float32Products]

    @staticmethod
    def opened(stack: ExitStack, manifest: Manifest, threads: int, dtype: str) -> ProductRates:
        kinds = ("attention",) if manifest.int8_weights else ("attention", "linear")
        words = {kind: word for kind in kinds if (word := manifest.products_of(kind)) is not None}
        by_terms = any(word != "ieee" for word in words.values())
        return ProductRates(
            stack.enter_context(products(detect(), threads, dtype)),
            stack.enter_context(tile_peak.tile_products(detect(), threads)) if by_terms else None,
            words,
        )

    @property
    def all(self) -> list[Probe]:
        return [self.plain, *([] if self.tiles is None else [self.tiles])]

    def by_kind(self, gflops: Sequence[float]) -> dict[str, float]:
        """Kind of operation -> the rate of its products, from the rates of `all`. A kind whose operations differ, or
        whose rate is not measured, is not in it."""
        plain, *tiles = gflops
        return {
            kind: plain if word == "ieee" else tiles[0] / len(TERM_PRODUCTS[word]) for kind, word in self.words.items()
        }


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

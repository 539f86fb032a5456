"""What this machine can do at best: multiply-adds when nothing waits for memory, and bytes when nothing is computed.

Each is a loop in one thread for each of the candidates' threads, measured in turns with them. A kernel's share of the
limit is how near it comes to the one that binds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import tvm
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_bench.native_threads import together
from mhsa_compile.files.room import available_memory
from mhsa_compile.hardware import host
from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, constant, let, load, splat, store
from mhsa_compile.kernels.cpu.units.choice import units
from mhsa_compile.kernels.cpu.units.unit import Unit

ROUNDS = 1 << 20
"""About 4 ms on every machine that starts two FMAs a cycle: far above the cost of handing out work."""
TIMES_CACHE = 8
"""The bandwidth is measured on arrays so many times the last-level cache, of which little can stay there."""
MOST_READ = 1 << 30
"""The bandwidth is measured on so many bytes at most, or on twice the last-level cache if that is more: arrays read in
order leave nothing there for the next round. Never on more than a quarter of the memory that is free."""
DEFAULT_CACHE_KIB = 32 << 10
"""The last-level cache of a machine that does not tell."""


@dataclass(frozen=True)
class Probe:
    """`run` keeps every thread busy once and does `amount` in all: FLOPs (2 per multiply-add) or bytes."""

    run: Callable[[], None]
    amount: int


def last_level_cache() -> int:
    """The bytes of the last-level cache."""
    return 1024 * (host.cache_kib(3) or host.cache_kib(2) or DEFAULT_CACHE_KIB)


def read_bytes(cache: int, free: int | None) -> int:
    """How many bytes the bandwidth is measured on, by a last-level cache of `cache` bytes and `free` bytes of memory.
    A server's cache of 480 MB is that of a socket: a process of few CPUs on it needs no 4 GB to see memory."""
    size = min(TIMES_CACHE * cache, max(MOST_READ, 2 * cache))
    return size if free is None else min(size, free // 4)


@contextmanager
def multiply_adds(profile: CpuProfile, threads: int, dtype: str = "float32") -> Iterator[Probe]:
    """The rate of multiply-adds that `dtype` allows on this machine (`profile` must be its own).

    float32 on vectors; bfloat16 on matrix or dot products where the CPU has them. Elsewhere, and for float16, which is
    storage only, the arithmetic is that of float32, and so is the rate.
    """
    # Enough chains to hide the latency of every FMA unit (4 cycles x 2 units), with registers left for the factors.
    accumulators = profile.hardware.vector_registers * 3 // 4
    unit = units(profile, "bfloat16" if dtype == "bfloat16" else "float32")[0]
    lanes, accumulators = unit.rows * unit.lanes, accumulators // unit.rows
    if unit.dtype == "float32":
        loop = _compiled(profile, _fma_loop(lanes, accumulators))
        factors = tvm.runtime.tensor(np.array([0.999, 0.001], np.float32))  # a = a * 0.999 + 0.001 tends to 1, for ever
    else:
        loop = _compiled(profile, _dot_loop(unit, accumulators))
        factors = tvm.runtime.tensor(np.zeros(2, unit.word))
    sums = [tvm.runtime.tensor(np.zeros(lanes, np.float32)) for _ in range(threads)]
    with together([partial(loop, factors, total, ROUNDS) for total in sums]) as run:
        yield Probe(run, 2 * unit.group * ROUNDS * accumulators * lanes * threads)


@contextmanager
def reading(profile: CpuProfile, threads: int, least_bytes: int | None = None) -> Iterator[Probe]:
    """The rate at which so many threads read arrays that lie in memory, larger than the last-level cache: `read_bytes`
    of them, or `least_bytes`."""
    lanes, streams = profile.vector_lanes("float32"), 8
    total = read_bytes(last_level_cache(), available_memory()) if least_bytes is None else least_bytes
    count = -(-total // (4 * threads * streams * lanes)) * streams * lanes  # elements that each thread reads
    loop = _compiled(profile, _sum_loop(lanes, streams, count))
    arrays = [tvm.runtime.tensor(np.ones(count, np.float32)) for _ in range(threads)]
    sums = [tvm.runtime.tensor(np.zeros(lanes, np.float32)) for _ in range(threads)]
    with together([partial(loop, array, total) for array, total in zip(arrays, sums, strict=True)]) as run:
        yield Probe(run, 4 * count * threads)


def _compiled(profile: CpuProfile, function: Expr) -> Callable[..., None]:
    module = tvm.IRModule({"limit": function.with_attr("global_symbol", "limit")})
    loop: Callable[..., None] = tvm.compile(module, target=tvm.target.Target(profile.tvm_config()))["limit"]
    return loop


def _fma_loop(lanes: int, accumulators: int) -> Expr:
    """(factors (2,), total (lanes,), rounds): a = a * factors[0] + factors[1] in every accumulator, `rounds` times."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("fma")
        factors = argument("factors", [T.int64(2)], "float32")
        total = argument("total", [T.int64(lanes)], "float32")
        rounds = T.arg("rounds", T.int64())
        tile = RegisterTile(accumulators, [(0, lanes)])
        tile.each(lambda row, _: constant(float(row), lanes))  # equal ones would be merged into one
        factor, summand = (let(splat(factors[i], lanes)) for i in range(2))
        with T.serial(rounds):
            tile.each(lambda row, column: tile.get(row, column) * factor + summand)
        store(total, [T.int64(0)], _sum(tile, accumulators), lanes)
    return builder.get()


def _dot_loop(unit: Unit, accumulators: int) -> Expr:
    """(factors (2,) of words, total (rows * lanes,), rounds): a = a + the products of the groups in both factors."""
    lanes = unit.rows * unit.lanes
    with IRBuilder() as builder, T.prim_func():
        T.func_name("dot")
        factors = argument("factors", [T.int64(2)], unit.word)
        total = argument("total", [T.int64(lanes)], "float32")
        rounds = T.arg("rounds", T.int64())
        with unit.imported():
            tile = RegisterTile(accumulators, [(0, lanes)])
            tile.each(lambda row, _: constant(float(row), lanes))
            left, right = let(splat(factors[0], unit.rows)), let(splat(factors[1], unit.lanes))
            with T.serial(rounds):
                unit.multiply(tile, [left] * accumulators, [right], columns_first=True)
            store(total, [T.int64(0)], _sum(tile, accumulators), lanes)
    return builder.get()


def _sum_loop(lanes: int, streams: int, count: int) -> Expr:
    """(array (count,), total (lanes,)): the array's sum, in as many accumulators as there are loads under way."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("read")
        array = argument("array", [T.int64(count)], "float32")
        total = argument("total", [T.int64(lanes)], "float32")
        tile = RegisterTile(streams, [(0, lanes)])
        tile.fill(0.0)
        with T.serial(T.int64(count // (streams * lanes))) as i:
            tile.each(
                lambda row, column: (
                    tile.get(row, column) + load(array, [i * T.int64(streams * lanes) + T.int64(row * lanes)], lanes)
                )
            )
        store(total, [T.int64(0)], _sum(tile, streams), lanes)
    return builder.get()


def _sum(tile: RegisterTile, rows: int) -> Expr:
    """Adds up all rows, so that none is optimised away."""
    result = tile.get(0, 0)
    for row in range(1, rows):
        result = result + tile.get(row, 0)
    return result

"""The ceiling: how many FLOPs a second this machine's vector units do when nothing waits for memory.

A loop of fused multiply-adds on accumulators that never leave their registers, in one thread for each of the
candidates' threads. What a kernel reaches of it is its share of peak.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import tvm
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.vectors import Expr, RegisterTile, argument, bind, constant, splat, store
from mhsa_compile.profile import TargetProfile

ROUNDS = 1 << 20  # about 4 ms on every machine that starts two FMAs a cycle: far above the cost of handing out work


@dataclass(frozen=True)
class Peak:
    """`run` keeps every thread busy once and does `flops` in all, 2 per multiply-add."""

    run: Callable[[], None]
    flops: int


@contextmanager
def fma_peak(profile: TargetProfile, threads: int) -> Iterator[Peak]:
    """The loop, compiled for this machine (`profile` must be its own), with its threads for as long as it is open.

    The threads are the caller and Python's, each inside one native call: TVM's pool belongs to the candidate and keeps
    its settings.
    """
    lanes = profile.vector_lanes("float32")
    accumulators = _accumulators(profile)
    module = tvm.IRModule({"fma": _fma_loop(lanes, accumulators).with_attr("global_symbol", "fma")})
    loop = tvm.compile(module, target=tvm.target.Target(profile.tvm_config()))["fma"]
    factors = tvm.runtime.tensor(np.array([0.999, 0.001], np.float32))  # a = a * 0.999 + 0.001 tends to 1, for ever
    sums = [tvm.runtime.tensor(np.zeros(lanes, np.float32)) for _ in range(threads)]
    with ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="fma-peak") as pool:

        def run() -> None:
            others = [pool.submit(loop, factors, total, ROUNDS) for total in sums[1:]]
            loop(factors, sums[0], ROUNDS)
            for other in others:
                other.result()

        yield Peak(run, 2 * ROUNDS * accumulators * lanes * threads)


def _accumulators(profile: TargetProfile) -> int:
    """Enough chains to hide the latency of every FMA unit (4 cycles x 2 units), with registers left for the factors."""
    return profile.hardware.vector_registers * 3 // 4


def _fma_loop(lanes: int, accumulators: int) -> Expr:
    """(factors (2,), total (lanes,), rounds): a = a * factors[0] + factors[1] in every accumulator, `rounds` times."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name("fma")
        factors = argument("factors", [T.int64(2)], "float32")
        total = argument("total", [T.int64(lanes)], "float32")
        rounds = T.arg("rounds", T.int64())
        tile = RegisterTile(accumulators, [(0, lanes)])
        tile.each(lambda row, _: constant(float(row), lanes))  # equal ones would be merged into one
        factor, summand = (bind(splat(factors[i], lanes)) for i in range(2))
        with T.serial(rounds):
            tile.each(lambda row, column: tile.get(row, column) * factor + summand)
        result = tile.get(0, 0)  # all are used, so that none is optimised away
        for row in range(1, accumulators):
            result = result + tile.get(row, 0)
        store(total, [T.int64(0)], result, lanes)
    return builder.get()

"""Checks the kernels' exp2 against float64 at every float32 below 127.5, NaN included: `make exp2-exhaustive`.

    python benchmarks/exp2_exhaustive.py

About 3.2e9 values, in a minute or two on one CPU. One ulp is the distance of two neighbouring float32 numbers at the
true value. Exits with 1 if the error is larger than the docstring of `exp2` says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from tvm import tirx
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import TargetProfile, detect
from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.simd import vector_math, vectors

STATED_ULP = 0.95
"""The largest error in ulp for x >= -126, where 2^x is a normal number: what the docstring of `exp2` promises."""
STATED_SUBNORMAL = 2.0**-126.5
"""The largest absolute error for x below -126, since what lies below -126.5 becomes 0."""
CHUNK = 1 << 22
RANGES = ((0x80000000, 0xFF7FFFFF), (0x00000000, 0x42FEFFFF))
"""Bits of the first and the last number: from -0 to the most negative one, from 0 to the last below 127.5."""


@dataclass
class Worst:
    """The largest error so far and the x at which it was seen."""

    error: float = 0.0
    x: float = 0.0

    def see(self, errors: Any, x: Any) -> None:
        if errors.size and (largest := errors.max()) > self.error:
            self.error, self.x = float(largest), float(x[errors.argmax()])


def main() -> int:
    profile = detect()
    exp2 = compiled_exp2(profile)
    begin, normal, subnormal = time.perf_counter(), Worst(), Worst()
    for x in numbers():
        y = exp2(x)
        at_least = x >= -126.0
        true = np.exp2(x[at_least].astype(np.float64))
        # The spacing of float32 around 2^x is 2^(floor(x) - 23).
        ulp = np.exp2(np.floor(x[at_least].astype(np.float64)) - 23)
        normal.see(np.abs(y[at_least] - true) / ulp, x[at_least])
        rest = x[~at_least]
        if rest.size:
            subnormal.see(np.abs(y[~at_least] - np.exp2(rest.astype(np.float64))), rest)
            if not (y[~at_least][rest < -127.0] == 0).all():
                subnormal.see(np.array([np.inf]), rest)
    edges_hold = check_edges(exp2)
    lanes = profile.vector_lanes("float32")
    seconds, below = time.perf_counter() - begin, subnormal.error
    print(f"exp2, {lanes} lanes, every float32 below 127.5 and every NaN, {seconds:.0f} s")
    print(f"  x >= -126   largest error {normal.error:.4f} ulp, at x = {normal.x!r}")
    print(f"  x <  -126   largest absolute error {below:.3e} (2^{np.log2(below):.2f}), at x = {subnormal.x!r}")
    print(f"  0, -0, -infinity, NaN: {'right' if edges_hold else 'WRONG'}")
    return int(normal.error > STATED_ULP or subnormal.error > STATED_SUBNORMAL or not edges_hold)


def compiled_exp2(profile: TargetProfile) -> Callable[[Any], Any]:
    """`exp2` over an array whose size is a multiple of the vector's, on this machine."""
    lanes = profile.vector_lanes("float32")
    n = tirx.Var("n", "int64")
    with IRBuilder() as builder, T.prim_func():
        T.func_name("run")
        x, y = (argument(name, [n, T.int64(lanes)], "float32") for name in ("x", "y"))
        with T.serial(n) as i:
            at = [i, T.int64(0)]
            vectors.store(y, at, vector_math.exp2(vectors.load(x, at, lanes), lanes), lanes)
    module = tvm.IRModule({"run": builder.get().with_attr("global_symbol", "run")})
    run = tvm.compile(module, target=tvm.target.Target(profile.tvm_config()))["run"]

    def call(values: Any) -> Any:
        source, result = (tvm.runtime.tensor(a.reshape(-1, lanes)) for a in (values, np.empty_like(values)))
        run(source, result)
        return result.numpy().reshape(-1)

    return call


def numbers() -> Iterator[Any]:
    """Every finite float32 below 127.5, in chunks; -infinity and the NaN are `check_edges`'s."""
    for begin, last in RANGES:
        for first in range(begin, last + 1, CHUNK):
            yield np.arange(first, min(first + CHUNK, last + 1), dtype=np.uint32).view(np.float32)


def check_edges(exp2: Callable[[Any], Any]) -> bool:
    """2^0 = 1 for both zeros, 2^-infinity = 0, and NaN for every NaN with the sign bit, and as many without."""
    edge = np.array([0.0, -0.0, -np.inf, np.nan] * 16, np.float32)
    y = exp2(edge).reshape(-1, 4)
    right = bool((y[:, :2] == 1).all() and (y[:, 2] == 0).all() and np.isnan(y[:, 3]).all())
    for first in (0xFF800000, 0x7F800000):
        bits = np.arange(first, first + (1 << 23), dtype=np.uint32)
        right &= bool(np.isnan(exp2(bits.view(np.float32))[1:]).all())  # the first is an infinity
    return right


if __name__ == "__main__":
    sys.exit(main())

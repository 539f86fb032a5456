"""Floats in bytes by the range of all of them: DynamicQuantizeLinear on a vector CPU.

Two loops over the array, each shared among the cores: the smallest and the largest number, then the bytes. The second
divides, as ONNX Runtime does: a product with the reciprocal rounds some numbers to the byte beside theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, ceil_div, prim_func
from mhsa_compile.kernels.cpu.simd.vectors import (
    constant,
    each_run,
    halved,
    load,
    materialize,
    splat,
    store,
    vector_type,
)
from mhsa_compile.kernels.interface.kernel import CACHE_LINE, Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import QuantiseOp

LEVELS = 255
SHARE = 1 << 12
"""Elements of a share at least: fewer are read faster than another core is told of them."""
ROUNDING = 12582912.0  # 1.5 * 2**23: added to a small number, it leaves the nearest integer in the sum's low bits
ROUNDING_BITS = 0x4B400000  # of that number itself
_LINE = CACHE_LINE // 4  # float32 of a cache line, one of which each share has for its range
_AT_ONCE = 4  # vectors, so that none waits for the one before


class CpuQuantiseKernel(Fixed):
    """Bytes of float32 by their range, for any vector CPU."""

    name = "cpu.quantise"
    op_type = QuantiseOp

    def emit(self, op: QuantiseOp, profile: CpuProfile, config: Config) -> Emitted:
        return Emitted(_quantise(op, profile.vector_lanes("float32"), profile.hardware.cores))


def _quantise(op: QuantiseOp, lanes: int, cores: int) -> Expr:
    dim = SizeVars()
    dims = [dim(d) for d in op.dims]
    with prim_func("quantise") as builder:
        x, y = argument("x", dims, "float32"), argument("y", dims, "uint8")
        scale, zero = argument("scale", [], "float32"), argument("zero", [], "uint8")
        size = prod(dims, start=T.int64(1))
        x, y = (T.decl_buffer((size,), tensor.dtype, data=tensor.data) for tensor in (x, y))
        count = materialize(size)
        most = materialize(ceil_div(count, SHARE))
        shares = materialize(T.max(T.int64(1), T.min(most, T.int64(cores))))
        share = materialize(ceil_div(ceil_div(count, shares), CACHE_LINE) * CACHE_LINE)
        ranges = T.alloc_buffer((2, cores * _LINE), "float32")
        with T.parallel(shares) as part:
            begin = materialize(T.min(part * share, count))
            _range(x, begin, materialize(T.min(begin + share, count)), ranges, part * _LINE, lanes)
        step, origin = _step_and_zero(ranges, shares, count)
        T.buffer_store(scale, step, [])
        T.buffer_store(zero, T.cast(T.cast(origin, "int32"), "uint8"), [])
        with T.parallel(shares) as part:
            begin = materialize(T.min(part * share, count))
            end = materialize(T.min(begin + share, count))

            def quantise(i: Expr, n: int) -> None:
                store(y, [i], _bytes(load(x, [i], n), step, origin, n), n)

            each_run(begin, end, lanes, quantise, at_once=_AT_ONCE)
    return builder.get()


def _range(x: Expr, begin: Expr, end: Expr, ranges: Expr, place: Expr, lanes: int) -> None:
    """The smallest and the largest of x[begin:end], NaN left out."""
    extremes = [_Extreme(T.min, math.inf, lanes), _Extreme(T.max, -math.inf, lanes)]

    def fold(i: Expr, n: int) -> None:
        for j in range(max(1, n // lanes)):
            value = materialize(load(x, [i + j * lanes], min(n, lanes)), "float32", min(n, lanes))
            for extreme in extremes:
                extreme.fold(value, j, min(n, lanes))

    each_run(begin, end, _AT_ONCE * lanes, fold)
    for row, extreme in enumerate(extremes):
        store(ranges, [T.int64(row), place], extreme.joined(), 1)


class _Extreme:
    """The smallest or the largest so far, in some vectors, and in one number of what fills no vector."""

    def __init__(self, combine: Callable[[Expr, Expr], Expr], first: float, lanes: int) -> None:
        self._combine, self._lanes = combine, lanes
        self._wide = T.alloc_buffer((_AT_ONCE, lanes), "float32")
        self._single = T.alloc_buffer((1,), "float32")
        for i in range(_AT_ONCE):
            store(self._wide, [T.int64(i), T.int64(0)], constant(first, lanes), lanes)
        store(self._single, [T.int64(0)], T.float32(first), 1)

    def fold(self, value: Expr, number: int, lanes: int) -> None:
        cell, at = (self._wide, [T.int64(number), T.int64(0)]) if lanes > 1 else (self._single, [T.int64(0)])
        # What is compared comes first: where it is NaN, the other one is taken.
        store(cell, at, self._combine(value, load(cell, at, lanes)), lanes)

    def joined(self) -> Expr:
        values = [self._wide[i, j] for i in range(_AT_ONCE) for j in range(self._lanes)]
        return self._combine(halved(values, self._combine), self._single[0])


def _step_and_zero(ranges: Expr, shares: Expr, count: Expr) -> tuple[Expr, Expr]:
    """(scale, zero) as float32."""
    low, high = (T.alloc_buffer((1,), "float32") for _ in range(2))
    store(low, [T.int64(0)], T.float32(math.inf), 1)
    store(high, [T.int64(0)], T.float32(-math.inf), 1)
    with T.serial(shares) as part:
        store(low, [T.int64(0)], T.min(low[0], ranges[0, part * _LINE]), 1)
        store(high, [T.int64(0)], T.max(high[0], ranges[1, part * _LINE]), 1)
    least, most = materialize(low[0], "float32"), materialize(high[0], "float32")
    nothing = T.And(least > most, count > 0)  # but NaN
    bottom = materialize(T.min(least, T.float32(0)), "float32")
    top = materialize(T.max(most, T.float32(0)), "float32")
    step = T.Select(top == bottom, T.float32(1), (top - bottom) / T.float32(LEVELS))
    step = materialize(T.Select(nothing, T.float32(math.nan), step), "float32")
    place = materialize(T.float32(0) - bottom / step, "float32")
    # Of NaN the upper bound, as ONNX Runtime has it.
    place = materialize(T.Select(place <= T.float32(LEVELS), place, T.float32(LEVELS)), "float32")
    place = materialize(T.max(place, T.float32(0)), "float32")
    return step, materialize(T.cast(_nearest(place, 1), "float32"), "float32")


def _bytes(x: Expr, step: Expr, origin: Expr, lanes: int) -> Expr:
    quotient = materialize(x / splat(step, lanes), "float32", lanes)
    # Cut before it is rounded, as both bounds are whole numbers; NaN becomes the lower one.
    above = T.Select(quotient >= splat(T.float32(0) - origin, lanes), quotient, splat(T.float32(0) - origin, lanes))
    above = materialize(above, "float32", lanes)
    within = T.min(above, splat(T.float32(LEVELS) - origin, lanes))
    value = _nearest(within, lanes) + splat(T.cast(origin, "int32"), lanes)
    return T.cast(value, vector_type("uint8", lanes))


def _nearest(value: Expr, lanes: int) -> Expr:
    """The nearest whole number as int32, of two the even one."""
    bits = T.reinterpret(vector_type("int32", lanes), value + constant(ROUNDING, lanes))
    return bits - splat(T.int32(ROUNDING_BITS), lanes)

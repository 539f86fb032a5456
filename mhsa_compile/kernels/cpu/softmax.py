"""Softmax along any axis on a vector CPU, of scores that no attention takes.

Along the last axis a task is some rows, each read as vectors of neighbours. Along another it is some columns beside
each other, a vector of them at a time. Each is read three times, while it lies in the first levels of cache: for its
largest, for the exponentials and their sum, and to divide by that.
"""

from __future__ import annotations

import math
from math import prod

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, ceil_div, prim_func
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cpu.simd.vector_math import exp2
from mhsa_compile.kernels.cpu.simd.vectors import constant, each_run, halved, load, materialize, splat, store
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import SoftmaxOp

WORK = 1 << 13
"""Elements of a task, about: some microseconds."""
COLUMNS = 4
"""Vectors of columns in a task."""


class CpuSoftmaxKernel(Fixed):
    """Softmax of float32 along any axis, for any vector CPU."""

    name = "cpu.softmax"
    op_type = SoftmaxOp

    def emit(self, op: SoftmaxOp, profile: CpuProfile, config: Config) -> Emitted:
        return Emitted(_softmax(op, profile.vector_lanes("float32")))


def _softmax(op: SoftmaxOp, lanes: int) -> Expr:
    dim = SizeVars()
    dims = [dim(d) for d in op.dims]
    with prim_func("softmax") as builder:
        x, y = argument("x", dims, "float32"), argument("y", dims, "float32")
        before, after = dims[: op.axis], dims[op.axis + 1 :]
        size = prod(dims, start=T.int64(1))
        x, y = (T.decl_buffer((size,), "float32", data=tensor.data) for tensor in (x, y))
        outer, length = materialize(prod(before, start=T.int64(1))), materialize(dims[op.axis])
        if all(isinstance(d, int) and d == 1 for d in op.dims[op.axis + 1 :]):
            rows = materialize(T.max(T.int64(1), T.truncdiv(T.int64(WORK), T.max(length, T.int64(1)))))
            with T.parallel(materialize(ceil_div(outer, rows))) as task:
                first = materialize(task * rows)
                with T.serial(materialize(T.min(rows, outer - first))) as i:
                    _row(x, y, materialize((first + i) * length), length, lanes)
        else:
            inner, width = materialize(prod(after, start=T.int64(1))), COLUMNS * lanes
            chunks = materialize(ceil_div(inner, width))
            with T.parallel(materialize(outer * chunks)) as task:
                start = materialize(T.truncdiv(task, chunks) * length * inner)
                begin = materialize(T.truncmod(task, chunks) * width)
                end = materialize(T.min(begin + width, inner))
                each_run(begin, end, lanes, lambda i, n: _columns(x, y, materialize(start + i), length, inner, n))
    return builder.get()


def _row(x: Expr, y: Expr, start: Expr, length: Expr, lanes: int) -> None:
    """y = softmax(x), of `length` neighbours from `start` on."""
    largest, total = _Fold(lanes, -math.inf), _Fold(lanes, 0.0)
    end = materialize(start + length)
    each_run(start, end, lanes, lambda i, n: largest.fold(T.max, load(x, [i], n), n))
    top = materialize(largest.joined(T.max), "float32")

    def power(i: Expr, n: int) -> None:
        value = _power(load(x, [i], n), splat(top, n), n)
        store(y, [i], value, n)
        total.fold(lambda one, other: one + other, value, n)

    each_run(start, end, lanes, power)
    factor = materialize(T.float32(1) / total.joined(lambda one, other: one + other), "float32")
    each_run(start, end, lanes, lambda i, n: store(y, [i], load(y, [i], n) * splat(factor, n), n))


def _columns(x: Expr, y: Expr, start: Expr, length: Expr, pitch: Expr, lanes: int) -> None:
    """The same of `lanes` columns beside each other, from one row to the next `pitch` elements."""
    largest, total = _Fold(lanes, -math.inf), _Fold(lanes, 0.0)
    with T.serial(length) as row:
        largest.fold(T.max, load(x, [start + row * pitch], lanes), lanes)
    with T.serial(length) as row:
        at = materialize(start + row * pitch)
        value = materialize(_power(load(x, [at], lanes), largest.vector(), lanes), "float32", lanes)
        store(y, [at], value, lanes)
        total.fold(lambda one, other: one + other, value, lanes)
    factor = materialize(constant(1.0, lanes) / total.vector(), "float32", lanes)
    with T.serial(length) as row:
        at = materialize(start + row * pitch)
        store(y, [at], load(y, [at], lanes) * factor, lanes)


def _power(x: Expr, largest: Expr, lanes: int) -> Expr:
    return exp2((x - largest) * constant(LOG2_E, lanes), lanes)


class _Fold:
    """A vector of partial results in a register, and one of single elements that fill no vector."""

    def __init__(self, lanes: int, first: float) -> None:
        self._lanes = lanes
        self._wide = T.alloc_buffer((lanes,), "float32")
        self._single = T.alloc_buffer((1,), "float32")
        store(self._wide, [T.int64(0)], constant(first, lanes), lanes)
        store(self._single, [T.int64(0)], T.float32(first), 1)

    def fold(self, combine: Expr, value: Expr, lanes: int) -> None:
        cell = self._wide if lanes == self._lanes else self._single
        store(cell, [T.int64(0)], combine(load(cell, [T.int64(0)], lanes), value), lanes)

    def vector(self) -> Expr:
        return load(self._wide, [T.int64(0)], self._lanes)

    def joined(self, combine: Expr) -> Expr:
        """All lanes and the single elements, combined in halves."""
        return combine(halved([self._wide[i] for i in range(self._lanes)], combine), self._single[0])

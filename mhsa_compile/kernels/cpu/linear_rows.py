"""x as the inner loop of a linear reads it: in place where it can, else copied once per call into a form that it can.

The copy is a parallel loop of its own before the product, not part of each task: every panel reads the same rows.
Quantisation of activations: per row and symmetric, as in Dettmers et al., LLM.int8(), 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.linear_format import Format
from mhsa_compile.kernels.cpu.storage import load_wide, vector_type
from mhsa_compile.kernels.cpu.vectors import Expr, constant, each_vector, load, settle, splat, store

LARGEST = 127
ROUNDING = 12582912.0  # 1.5 * 2**23: added to a small number, it leaves the nearest integer in the sum's low bits
ROUNDING_BITS = 0x4B400000  # of that number itself
LEAST = 1e-30
"""Rows that are smaller everywhere count as zero: their scale would have no reciprocal."""


@dataclass(frozen=True)
class Rows:
    """(count, steps) of what a step multiplies, int32 or float32; for int8 also the scale of each row (count,)."""

    format: Format
    data: Expr
    scales: Expr | None = None

    def step(self, row: Expr, step: Expr) -> Expr:
        terms = self.format.terms
        if terms == 1:
            return load(self.data, [row, step], 1)
        return T.reinterpret("int32", load(self.data, [row, step * terms], terms))


def prepared(format: Format, x: Expr, count: Expr, size: Expr) -> Rows:
    """The rows of x (count, K), after the loop that writes them if one is needed.

    `size` is `count` in terms of the arguments' dims: TVM moves allocations to the function's begin, where nothing else
    is known.
    """
    op = format.op
    if op.int8_weights:
        return _quantised(format, x, count, size)
    if format.dot is None and op.dtype == "float32":
        return Rows(format, x)
    if format.dot is not None and op.in_features % format.terms == 0:
        return Rows(format, x)
    width = format.steps * format.terms
    data = T.alloc_buffer((size, T.int64(width)), "uint16" if format.dot else "float32")

    def copy(k: Expr, n: int) -> None:
        narrow = T.reinterpret(vector_type("uint16", n), load(x, [row, k], n)) if format.dot else None
        store(data, [row, k], load_wide(x, [row, k], n) if narrow is None else narrow, n)

    with T.parallel(count) as row:
        each_vector(op.in_features, format.lanes, copy)
        for k in range(op.in_features, width):
            store(data, [row, T.int64(k)], T.uint16(0), 1)  # meets a weight of zero, and must not be NaN
    return Rows(format, data)


def _quantised(format: Format, x: Expr, count: Expr, size: Expr) -> Rows:
    """Each row by its own scale, max |x| / 127: bytes x + 128 for a dot product, else whole numbers in float32."""
    K, width = format.op.in_features, format.steps * format.terms
    data = T.alloc_buffer((size, T.int64(width)), "uint8" if format.dot else "float32")
    scales = T.alloc_buffer((size,), "float32")
    with T.parallel(count) as row:
        largest = settle(_largest(x, row, K, format.lanes), "float32")
        store(scales, [row], largest / T.float32(LARGEST), 1)
        factor = quantising_factor(largest)

        def quantise(k: Expr, n: int) -> None:
            whole = nearest(load_wide(x, [row, k], n), factor, n)
            byte = T.cast((whole + splat(T.int32(128), n)) & splat(T.int32(255), n), vector_type("uint8", n))
            store(data, [row, k], byte if format.dot else T.cast(whole, vector_type("float32", n)), n)

        each_vector(K, format.lanes, quantise)
        for k in range(K, width):
            store(data, [row, T.int64(k)], T.uint8(0), 1)  # meets weights of zero: any byte would do
    return Rows(format, data, scales)


def quantising_factor(largest: Expr) -> Expr:
    """What brings numbers of up to that magnitude into -127 .. 127."""
    return settle(T.Select(largest < T.float32(LEAST), T.float32(0), T.float32(LARGEST) / largest), "float32")


def nearest(value: Expr, factor: Expr, lanes: int) -> Expr:
    """value * factor as int32, rounded to nearest even; some number or other for NaN and infinity."""
    shifted = value * splat(factor, lanes) + constant(ROUNDING, lanes)
    return T.reinterpret(vector_type("int32", lanes), shifted) - splat(T.int32(ROUNDING_BITS), lanes)


def magnitude(value: Expr, lanes: int) -> Expr:
    """The bits of |value| as int32: in the order of the numbers, NaN above all, so that no maximum loses one."""
    return T.reinterpret(vector_type("int32", lanes), value) & splat(T.int32(0x7FFFFFFF), lanes)


def _largest(x: Expr, row: Expr, K: int, lanes: int) -> Expr:
    """max |x[row]|."""
    top = T.alloc_buffer((lanes,), "int32")
    store(top, [T.int64(0)], splat(T.int32(0), lanes), lanes)

    def update(k: Expr, n: int) -> None:
        store(top, [T.int64(0)], T.max(load(top, [T.int64(0)], n), magnitude(load_wide(x, [row, k], n), n)), n)

    each_vector(K, lanes, update)
    largest = top[0]
    for lane in range(1, lanes):
        largest = T.max(largest, top[lane])
    return T.reinterpret("float32", largest)

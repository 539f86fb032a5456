"""x as the inner loop of a linear reads it: in place where it can, else copied once per call into a form that it can.

The copy is a parallel loop of its own before the product, not part of each task: every panel reads the same rows.
Quantisation of activations: per row and symmetric, as in Dettmers et al., LLM.int8(), 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd.dtypes import load_wide, vector_type
from mhsa_compile.kernels.cpu.simd.vectors import (
    Expr,
    constant,
    each_vector,
    load,
    materialize,
    splat,
    store,
)
from mhsa_compile.kernels.cpu.units.unit import Joined

LARGEST = 127
ROUNDING = 12582912.0  # 1.5 * 2**23: added to a small number, it leaves the nearest integer in the sum's low bits
ROUNDING_BITS = 0x4B400000  # of that number itself
LEAST = 1e-30
"""Rows that are smaller everywhere count as zero: their scale would have no reciprocal."""


@dataclass(frozen=True)
class PackedRows:
    """What steps multiply: words of a row, or the elements of these, (count, K); where rows are joined, those of two,
    step by step. For int8 also the scale of each row (count,)."""

    layout: PackedLayout
    data: Expr
    scales: Expr | None = None

    def of(self, lines: list[Expr]) -> Joined:
        """Those of a tile."""
        return Joined(self.data, lambda line, k: [line, k], lines)

    def at(self, row: Expr, k: Expr) -> list[Expr]:
        """The indices of term k of a row. (A vector of `lanes` terms begins at a multiple of that, so it is one
        step's.)"""
        if self.layout.unit.rows == 1:
            return [row, k]
        terms = T.int64(self.layout.unit.group)
        step = T.truncdiv(k, terms)
        place = step * 2 + T.truncmod(row, T.int64(2))
        return [T.truncdiv(row, T.int64(2)), place * terms + T.truncmod(k, terms)]


def prepared(layout: PackedLayout, x: Expr, count: Expr, size: Expr) -> PackedRows:
    """The rows of x (count, K), after the loop that writes them if one is needed.

    `size` is `count` in terms of the arguments' dims: TVM moves allocations to the function's begin, where nothing else
    is known.
    """
    op, unit = layout.op, layout.unit
    if op.int8_weights:
        return _quantised(layout, x, count, size)
    if not layout.widens and op.in_features % unit.group == 0 and unit.rows == 1:
        return PackedRows(layout, x)
    width = layout.steps * unit.group
    rows = PackedRows(layout, _allocated(layout, size, "float32" if layout.widens else "uint16"))
    with T.parallel(_whole(layout, count)) as row:
        source = materialize(T.min(row, count - 1)) if unit.rows > 1 else row

        def copy(k: Expr, n: int) -> None:
            # For an instruction the bits as they are; else float32.
            narrow = None if layout.widens else T.reinterpret(vector_type("uint16", n), load(x, [source, k], n))
            store(rows.data, rows.at(row, k), load_wide(x, [source, k], n) if narrow is None else narrow, n)

        each_vector(op.in_features, layout.lanes, copy)
        for k in range(op.in_features, width):
            store(rows.data, rows.at(row, T.int64(k)), T.uint16(0), 1)  # meets a weight of zero, and must not be NaN
    return rows


def _allocated(layout: PackedLayout, size: Expr, dtype: str) -> Expr:
    width = layout.steps * layout.unit.group
    if layout.unit.rows == 1:
        return T.alloc_buffer((size, T.int64(width)), dtype)
    return T.alloc_buffer((T.truncdiv(size + 1, T.int64(2)), T.int64(2 * width)), dtype)


def _whole(layout: PackedLayout, count: Expr) -> Expr:
    """The number of rows, with the last one twice where it would have no neighbour."""
    return count if layout.unit.rows == 1 else materialize(ceil_div(count, 2) * 2)


def _quantised(layout: PackedLayout, x: Expr, count: Expr, size: Expr) -> PackedRows:
    """The rows of x, each quantised by its own scale, max |x| / 127: bytes for a dot product (x + 128 where it takes
    them unsigned), else whole numbers in float32."""
    K, width = layout.op.in_features, layout.steps * layout.unit.group
    scales = T.alloc_buffer((size,), "float32")
    rows = PackedRows(layout, _allocated(layout, size, "float32" if layout.widens else "uint8"), scales)
    with T.parallel(_whole(layout, count)) as row:
        source = materialize(T.min(row, count - 1)) if layout.unit.rows > 1 else row
        largest = materialize(_largest(x, source, K, layout.lanes), "float32")
        store(scales, [source], largest / T.float32(LARGEST), 1)
        factor = quantising_factor(largest)

        def quantise(k: Expr, n: int) -> None:
            whole = nearest(load_wide(x, [source, k], n), factor, n)
            if layout.widens:
                value = T.cast(whole, vector_type("float32", n))
            else:
                shifted = whole + splat(T.int32(128), n) if layout.offset else whole
                # Masked first: the cast is then of a number that a byte holds.
                value = T.cast(shifted & splat(T.int32(255), n), vector_type("uint8", n))
            store(rows.data, rows.at(row, k), value, n)

        each_vector(K, layout.lanes, quantise)
        for k in range(K, width):
            store(rows.data, rows.at(row, T.int64(k)), T.uint8(0), 1)  # meets weights of zero: any byte would do
    return rows


def quantising_factor(largest: Expr) -> Expr:
    """The factor that brings numbers of up to that magnitude into -127 .. 127."""
    return materialize(T.Select(largest < T.float32(LEAST), T.float32(0), T.float32(LARGEST) / largest), "float32")


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

"""x as the inner loop of a linear reads it: in place where it can, else copied once per call into a form that it can.

The copy is a parallel loop of its own before the product, not part of each task: every panel reads the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.formats.choice import load_wide
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd.vectors import each_vector, load, materialize, splat, store, vector_type
from mhsa_compile.kernels.cpu.units.unit import Joined


@dataclass(frozen=True)
class PackedRows:
    """What steps multiply: words of a row, or the elements of these, (count, K); where rows are joined, those of two,
    step by step. For int8 also the scale of each row (count,)."""

    layout: PackedLayout
    data: Expr
    scales: Expr | None = None

    def of(self, lines: list[Expr]) -> Joined:
        """The words of a tile's lines."""
        return Joined(self.data, lambda line, k: [line, k], lines)

    def at(self, row: Expr, k: Expr) -> list[Expr]:
        """The indices of term k of a row."""
        if self.layout.unit.rows == 1:
            return [row, k]
        rows, terms = T.int64(self.layout.unit.rows), T.int64(self.layout.unit.group)
        place = T.truncdiv(k, terms) * rows + T.truncmod(row, rows)
        return [T.truncdiv(row, rows), place * terms + T.truncmod(k, terms)]


def prepared(layout: PackedLayout, x: Expr, count: Expr, size: Expr) -> PackedRows:
    """The rows of x (count, K), after the loop that writes them if one is needed.

    `size` is `count` in terms of the arguments' dims: TVM moves allocations to the function's begin, where nothing else
    is known.
    """
    op, unit = layout.op, layout.unit
    if layout.format.rounds_x:
        return _quantised(layout, x, count, size)
    is_taken, width = unit.dtype == op.dtype, layout.steps * unit.group
    if is_taken and op.in_features == width and unit.rows == 1:
        return PackedRows(layout, x)
    has_bits = is_taken and op.dtype != "float32"
    rows = PackedRows(layout, allocated(layout, size, "uint16" if has_bits else "float32"))
    with T.parallel(whole(layout, count)) as row:
        copy_row(rows, x, materialize(T.min(row, count - 1)) if unit.rows > 1 else row, row)
        for k in range(op.in_features, width):
            # Meets a weight of zero, and must not be NaN.
            store(rows.data, rows.at(row, T.int64(k)), T.cast(T.uint16(0), rows.data.dtype), 1)
    return rows


def copy_row(rows: PackedRows, x: Expr, source: Expr, row: Expr) -> None:
    """Row `source` of x, as row `row`: for an instruction the bits as they are; else float32."""
    layout = rows.layout

    def copy(k: Expr, n: int) -> None:
        if str(rows.data.dtype) == "uint16":
            value = T.reinterpret(vector_type("uint16", n), load(x, [source, k], n))
        else:
            value = load_wide(x, [source, k], n)
        store(rows.data, rows.at(row, k), value, n)

    each_vector(layout.op.in_features, layout.together, copy)


def allocated(layout: PackedLayout, size: Expr, dtype: str) -> Expr:
    """An array for prepared rows, with room for whole steps."""
    rows = layout.unit.rows
    lines = size if rows == 1 else ceil_div(size, rows)
    return T.alloc_buffer((lines, T.int64(layout.pitch)), dtype)


def whole(layout: PackedLayout, count: Expr) -> Expr:
    """The number of rows, with the last one again where it would have no neighbour."""
    rows = layout.unit.rows
    return count if rows == 1 else materialize(ceil_div(count, rows) * rows)


def _quantised(layout: PackedLayout, x: Expr, count: Expr, size: Expr) -> PackedRows:
    """The rows of x, each quantised by its own scale, max |x| / 127: bytes for a dot product (x + 128 where it takes
    them unsigned), else whole numbers in float32."""
    K, width = layout.op.in_features, layout.steps * layout.unit.group
    scales = T.alloc_buffer((size,), "float32")
    rows = PackedRows(layout, allocated(layout, size, "float32" if layout.widens else "uint8"), scales)
    with T.parallel(whole(layout, count)) as row:
        source = materialize(T.min(row, count - 1)) if layout.unit.rows > 1 else row

        def read(k: Expr, n: int) -> Expr:
            return load_wide(x, [source, k], n)

        factor = layout.format.scale(read, K, layout.lanes, lambda step: store(scales, [source], step, 1))

        def quantise(k: Expr, n: int) -> None:
            if layout.widens:
                value = layout.format.rounded(read(k, n), n, factor)
            else:
                bits = layout.format.bits(read(k, n), n, factor)
                bits = bits + splat(T.int32(128), n) if layout.offset else bits
                # Masked first: the cast is then of a number that a byte holds.
                value = T.cast(bits & splat(T.int32(255), n), vector_type("uint8", n))
            store(rows.data, rows.at(row, k), value, n)

        each_vector(K, layout.together, quantise)
        for k in range(K, width):
            store(rows.data, rows.at(row, T.int64(k)), T.uint8(0), 1)  # meets weights of zero: any byte would do
    return rows

"""Tiles of matrices in shared memory, filled by asynchronous copies; what lies outside of a matrix becomes zeros.

Rows are cut into chunks of 16 bytes. A chunk's place in its row is its number joined with the row's by exclusive or, so
that eight neighbouring rows have theirs of the same number in different banks, as ldmatrix reads them, and so have rows
that lie one behind another, as copies write them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.cuda.linear.block_shape import CHUNK
from mhsa_compile.kernels.cuda.primitives.warp import materialize

BANKED = 8  # chunks that lie side by side in all banks


@dataclass(frozen=True)
class Matrix:
    """`rows` x `columns` in global memory, one row behind the other; `flat` are its elements."""

    flat: Expr
    rows: Expr | int
    columns: int


class LinearTiles:
    """`slots` tiles of `rows` x `width` elements, from byte `first` of the block's shared memory on."""

    def __init__(self, pool: Expr, first: int, slots: int, rows: int, width: int, *, swizzle: bool = True) -> None:
        self.rows, self.width, self.swizzle = rows, width, swizzle
        self.element = DTYPE_BYTES[str(pool.dtype)]
        self.end = first + slots * rows * width * self.element
        self.chunk = CHUNK // self.element
        """Elements of a chunk."""
        shape, offset = (slots, rows, width), T.int32(first // self.element)
        self._buffer = T.decl_buffer(shape, pool.dtype, data=pool.data, elem_offset=offset, scope="shared.dyn")

    def at(self, slot: Expr, row: Expr, chunk: Expr, rest: Expr | int = 0) -> Expr:
        """An element of a chunk."""
        return self._buffer[slot, row, (chunk ^ self._swizzle(row)) * self.chunk + rest]

    def address(self, slot: Expr, row: Expr, chunk: Expr, rest: Expr | int = 0) -> Expr:
        return T.address_of(self.at(slot, row, chunk, rest))

    def _swizzle(self, row: Expr) -> Expr:
        chunks = min(BANKED, self.width // self.chunk)
        if not self.swizzle or chunks == 1:
            return T.int32(0)
        rows = BANKED // chunks  # that fill all banks
        return (row >> T.int32(rows.bit_length() - 1)) & T.int32(chunks - 1)


class MatrixTiles(LinearTiles):
    """Tiles of a matrix."""

    def __init__(
        self, pool: Expr, first: int, slots: int, rows: int, width: int, matrix: Matrix, *, swizzle: bool = True
    ) -> None:
        super().__init__(pool, first, slots, rows, width, swizzle=swizzle)
        self.matrix = matrix
        self.unit = gcd(self.chunk, matrix.columns)
        """Elements that one copy moves: rows of the matrix begin at multiples of it."""

    def copy(self, slot: Expr, row: Expr, column: Expr, thread: Expr, threads: int) -> None:
        """Begins to copy the tile at this place of the matrix."""
        units = self.width // self.unit
        stride = threads // units  # rows that are copied at once
        line = materialize(T.truncdiv(thread, T.int32(units)))
        at = materialize(T.truncmod(thread, T.int32(units)) * self.unit)
        pitch = T.int64(self.matrix.columns)
        first = materialize(T.cast(row + line, "int64") * pitch + T.cast(column + at, "int64"), "int64")
        inside = None
        if self.matrix.columns % self.width:
            inside = materialize(column + at < self.matrix.columns, "bool")
        for turn in range(-(-self.rows // stride)):
            number = line + turn * stride
            # From turn to turn a constant further: one address to compute.
            source = T.address_of(self.matrix.flat[first + T.int64(turn * stride * self.matrix.columns)])
            target = self.address(
                slot, number, T.truncdiv(at, T.int32(self.chunk)), T.truncmod(at, T.int32(self.chunk))
            )
            if (turn + 1) * stride <= self.rows:
                self._copy_unit(target, source, row + number, inside)
            else:
                with T.If(number < self.rows), T.Then():
                    self._copy_unit(target, source, row + number, inside)

    def _copy_unit(self, target: Expr, source: Expr, row: Expr, inside: Expr | None) -> None:
        size = self.unit * self.element
        rows = self.matrix.rows
        conditions = [] if inside is None else [inside]
        if not isinstance(rows, int) or rows % self.rows:
            conditions.append(row < rows)
        # Past the first-level cache, which takes whole chunks alone.
        name = "cp.async.cg.shared.global.L2::128B" if size == CHUNK else "cp.async.ca.shared.global"
        if conditions:
            holds = conditions[0] if len(conditions) == 1 else T.And(*conditions)
            T.evaluate(T.ptx[name](target, source, size, T.Select(holds, T.uint32(size), T.uint32(0))))
        else:
            T.evaluate(T.ptx[name](target, source, size))


def why_not_copy(width: int, unit: int, threads: int) -> str | None:
    """Why so many threads cannot copy tiles of this width by so many elements at once, or None."""
    if threads % (width // unit):
        return f"{threads} threads copy rows of {width // unit} pieces"
    return None

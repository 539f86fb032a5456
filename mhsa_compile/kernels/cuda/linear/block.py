"""A block of a linear on a GPU: which part of y it computes, and the order of its copies and products.

    for each tile of terms, x and the weights copied ahead through a ring in shared memory:
        wait for the tile; all are done with the one before, into whose place the next copy goes
        sums += x W^T of the tile
    sums of the slices together; y = sums + bias

One barrier a tile. What multiplies, tensor cores or threads, is a subclass's.

Tiles lie in shared memory row by row; what is outside of a matrix becomes zeros. Rows are cut into chunks of 16 bytes.
A chunk's place in its row is its number joined with the row's by exclusive or, so that eight neighbouring rows have
theirs of the same number in different banks, as ldmatrix reads them, and so have rows that lie one behind another, as
copies write them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.cuda.linear.block_shape import CHUNK
from mhsa_compile.kernels.cuda.primitives import simt, smem_pipeline
from mhsa_compile.kernels.cuda.primitives.simt import WARP, barrier, clear, load, materialize, registers, store
from mhsa_compile.kernels.interface.ops import LinearOp

GROUP = 8
"""Rows of blocks that are computed together, column by column: those that run at a time share rows of x and weights,
which the second-level cache then has."""


class LinearOperands(NamedTuple):
    """x, the packed weights, the bias and y of one linear, and how many rows of x there are."""

    x: Expr
    weight: Expr
    bias: Expr
    y: Expr
    rows: Expr


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
            chunk, rest = T.truncdiv(at, T.int32(self.chunk)), T.truncmod(at, T.int32(self.chunk))
            target = self.address(slot, number, chunk, rest)
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


def dealt(part: Expr, rows: Expr, columns: int, size: tuple[int, int]) -> tuple[Expr, Expr]:
    """(first row, first column) of one part of y, of this size."""
    height, width = size
    lines, across = materialize(T.truncdiv(rows + (height - 1), T.int32(height))), -(-columns // width)
    group = materialize(T.truncdiv(part, T.int32(GROUP * across)))
    among = materialize(T.min(T.int32(GROUP), lines - group * GROUP))
    rest = materialize(part - group * (GROUP * across))
    line = group * GROUP + T.truncmod(rest, among)
    return materialize(line * height), materialize(T.truncdiv(rest, among) * width)


class LinearBlock:
    """Emits one block. `x_tiles` and `weight_tiles` are the ring; `first` is the block's first row and column."""

    weight_tiles: MatrixTiles

    def __init__(
        self, op: LinearOp, shape: Any, place: simt.ThreadIndex, operands: LinearOperands, first: tuple[Expr, Expr]
    ) -> None:
        self.op, self.shape, self.place, self.operands = op, shape, place, operands
        self.first_row, self.first_column = first
        # Of the one dtype that all its views have: TVM gives the whole another one's, and leaves its count as it was.
        self.pool = T.alloc_buffer((shape.shared_bytes // shape.element,), op.dtype, scope="shared.dyn")
        across = T.int32(shape.columns // shape.warp_columns)
        self.slice = materialize(T.truncdiv(place.warp, T.int32(shape.parts)))
        self.part = materialize(T.truncmod(place.warp, T.int32(shape.parts)))
        self.part_row = materialize(T.truncdiv(self.part, across) * shape.warp_rows)
        self.part_column = materialize(T.truncmod(self.part, across) * shape.warp_columns)
        self.sums = registers(shape.sums)
        self.words = registers(4, "uint32")
        x = Matrix(operands.x, operands.rows, op.in_features)
        self.x_tiles = MatrixTiles(self.pool, 0, shape.stages, shape.rows, shape.depth, x)
        self.allocate()

    def emit(self) -> None:
        turns, ahead = -(-self.op.in_features // self.shape.depth), self.shape.stages - 1
        # 1. The ring, full but for one tile.
        for turn in range(ahead):
            if turn < turns:
                self.copy(T.int32(turn), T.int32(turn))
            smem_pipeline.commit()
        clear(self.sums, self.shape.sums)
        # 2. One tile of terms after the other.
        with T.serial(T.int32(turns)) as turn:
            smem_pipeline.wait(ahead - 1)
            # It says both: all copies of this tile have arrived, and all are done with the place that is filled next.
            barrier()
            with T.If(turn + ahead < turns), T.Then():
                self.copy(turn + ahead, self._slot(turn + ahead))
            # Outside of the branch: an empty group counts too, so `wait` means the same in every turn.
            smem_pipeline.commit()
            self.multiply(self._slot(turn))
        # 3. All sums at the first slice, which writes.
        # What comes now takes the place of the ring.
        smem_pipeline.wait(0)
        barrier()
        if self.shape.slices > 1:
            self._gather()
        self._of_first_slice(self.write)

    def copy(self, turn: Expr, slot: Expr) -> None:
        """Begins to copy the tiles of these terms."""
        term, thread, threads = materialize(turn * self.shape.depth), self.place.thread, self.shape.threads
        self.x_tiles.copy(slot, self.first_row, term, thread, threads)
        self.weight_tiles.copy(slot, *self.weight_place(term), thread, threads)

    def weight_place(self, term: Expr) -> tuple[Expr, Expr]:
        """(first row, first column) of a tile of the weights, which are (out, in)."""
        return self.first_column, term

    def allocate(self) -> None:
        """Declares the weights' ring and registers."""
        raise NotImplementedError

    def multiply(self, slot: Expr) -> None:
        """Adds the products of a tile to the sums."""
        raise NotImplementedError

    def write(self) -> None:
        """Writes the part of y; the ring is free."""
        raise NotImplementedError

    def _slot(self, turn: Expr) -> Expr:
        return materialize(T.truncmod(turn, T.int32(self.shape.stages)))

    def _of_first_slice(self, body: Callable[[], None]) -> None:
        if self.shape.slices == 1:
            body()
            return
        with T.If(self.slice == T.int32(0)), T.Then():
            body()

    def _gather(self) -> None:
        """Adds the slices' sums to those of the first slice, through shared memory, four sums of all lanes side by
        side."""
        quads, chunk = self.shape.sums // 4, CHUNK // DTYPE_BYTES[str(self.pool.dtype)]

        def address(number: Expr, quad: int) -> Expr:
            row = ((number - 1) * self.shape.parts + self.part) * quads + quad
            first = self.shape.y_bytes // CHUNK
            return T.address_of(self.pool[(row * WARP + self.place.lane + first) * chunk])

        with T.If(self.slice > 0), T.Then():
            for quad in range(quads):
                store(address(self.slice, quad), [T.reinterpret("uint32", self.sums[4 * quad + i]) for i in range(4)])
        barrier()

        def add() -> None:
            with T.serial(T.int32(1), T.int32(self.shape.slices)) as number:
                for quad in range(quads):
                    load(self.words, 0, 4, address(number, quad))
                    for i in range(4):
                        at = 4 * quad + i
                        simt.set_register(self.sums, at, self.sums[at] + T.reinterpret("float32", self.words[i]))

        self._of_first_slice(add)

"""A block of a linear on a GPU: which part of y it computes, and the order of its copies and products.

    for each tile of terms, x and the weights copied ahead through a ring in shared memory:
        wait for the tile; all are done with the one before, into whose place the next copy goes
        sums += x W^T of the tile
    sums of the slices together; y = sums + bias

One barrier a tile. What multiplies, tensor cores or threads, is a subclass's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.cuda.linear.block_shape import CHUNK, LinearBlockShape
from mhsa_compile.kernels.cuda.linear.smem_tiles import MatrixTiles
from mhsa_compile.kernels.cuda.primitives import smem_pipeline
from mhsa_compile.kernels.cuda.primitives.warp import (
    WARP,
    ThreadIndex,
    barrier,
    load,
    materialize,
    registers,
    set_register,
    store,
)

GROUP = 8
"""Rows of blocks that are computed together, column by column: those that run at a time share rows of x and weights,
which the second-level cache then has."""


@dataclass(frozen=True)
class LinearOperands:
    """Flat x, weights, bias and y of one linear, and how many rows of x there are."""

    x: Expr
    weight: Expr
    bias: Expr
    y: Expr
    rows: Expr


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

    x_tiles: MatrixTiles
    weight_tiles: MatrixTiles

    def __init__(
        self, shape: LinearBlockShape, place: ThreadIndex, depth: int, first: tuple[Expr, Expr], dtype: str
    ) -> None:
        self.shape, self.place, self.depth = shape, place, depth
        self.first_row, self.first_column = first
        element = DTYPE_BYTES[dtype]
        # Of the one dtype that all its views have: TVM gives the whole another one's, and leaves its count as it was.
        self.pool = T.alloc_buffer((shape.shared_bytes // element,), dtype, scope="shared.dyn")
        across = T.int32(shape.columns // shape.warp_columns)
        self.slice = materialize(T.truncdiv(place.warp, T.int32(shape.parts)))
        self.part = materialize(T.truncmod(place.warp, T.int32(shape.parts)))
        self.part_row = materialize(T.truncdiv(self.part, across) * shape.warp_rows)
        self.part_column = materialize(T.truncmod(self.part, across) * shape.warp_columns)
        self.sums = registers(shape.sums)
        self.words = registers(4, "uint32")

    def emit(self) -> None:
        turns, ahead = -(-self.depth // self.shape.depth), self.shape.stages - 1
        # 1. The ring, full but for one tile.
        for turn in range(ahead):
            if turn < turns:
                self.copy(T.int32(turn), T.int32(turn))
            smem_pipeline.commit()
        for at in range(self.shape.sums):
            set_register(self.sums, at, T.float32(0))
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
        self._of_slice(self.write, T.int32(0))

    def copy(self, turn: Expr, slot: Expr) -> None:
        """Begins to copy the tiles of these terms."""
        raise NotImplementedError

    def multiply(self, slot: Expr) -> None:
        """Adds the products of a tile to the sums."""
        raise NotImplementedError

    def write(self) -> None:
        """Writes the part of y; the ring is free."""
        raise NotImplementedError

    def _slot(self, turn: Expr) -> Expr:
        return materialize(T.truncmod(turn, T.int32(self.shape.stages)))

    def _of_slice(self, body: Callable[[], None], number: Expr) -> None:
        if self.shape.slices == 1:
            body()
            return
        with T.If(self.slice == number), T.Then():
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
                        set_register(
                            self.sums, 4 * quad + i, self.sums[4 * quad + i] + T.reinterpret("float32", self.words[i])
                        )

        self._of_slice(add, T.int32(0))

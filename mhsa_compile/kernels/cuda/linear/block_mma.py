"""The products of a linear of 16-bit types on tensor cores, by mma.sync with float32 sums.

A warp's part is tiles of 16 x 8 sums. Each step of 16 terms needs a fragment of x for every 16 rows and one of the
weights for every 8 columns; those of the next step are loaded while this one is multiplied. Weights (out, in) are what
the instruction wants of its right operand as they are.
"""

from __future__ import annotations

from math import gcd

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.linear.block import LinearBlock, LinearTiles, Matrix, MatrixTiles
from mhsa_compile.kernels.cuda.linear.block_shape import CHUNK
from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.simt import COLUMNS, ROWS, WARP, load, materialize, registers, store


class TensorBlock(LinearBlock):
    """One block of y of a LinearOp."""

    def allocate(self) -> None:
        shape = self.shape
        weight = Matrix(self.operands.weight, self.op.out_features, self.op.in_features)
        self.weight_tiles = MatrixTiles(self.pool, self.x_tiles.end, shape.stages, shape.columns, shape.depth, weight)
        self.output = LinearTiles(self.pool, 0, shape.parts, shape.warp_rows, shape.warp_columns)
        self.row_tiles, self.column_tiles = shape.warp_rows // ROWS, shape.warp_columns // COLUMNS
        # Fragments of two steps in turn.
        self.left = [registers(4 * self.row_tiles, "uint32") for _ in range(2)]
        self.right = [registers(2 * self.column_tiles, "uint32") for _ in range(2)]

    def multiply(self, slot: Expr) -> None:
        steps = self.shape.depth // simt.DEPTH // self.shape.slices
        first = materialize(self.slice * (2 * steps)) if self.shape.slices > 1 else T.int32(0)
        self._load(slot, first, 0)
        for step in range(steps):
            if step + 1 < steps:
                # One step ahead, into the registers of the step before.
                self._load(slot, first + 2 * (step + 1), (step + 1) % 2)
            left, right = self.left[step % 2], self.right[step % 2]
            for m in range(self.row_tiles):
                for n in range(self.column_tiles):
                    simt.multiply_add(
                        self.sums, 4 * (m * self.column_tiles + n), left, 4 * m, right, 2 * n, self.op.dtype
                    )

    def _load(self, slot: Expr, chunk: Expr, turn: int) -> None:
        """The fragments of one step, whose terms begin with this chunk. Lane i gives the address of row i % 8 of matrix
        i // 8: of x, the upper and lower rows of the left half, then of the right; of the weights, the halves of eight
        columns, then of the next eight."""
        lane = self.place.lane
        row, half = T.truncmod(lane, T.int32(16)), T.truncdiv(lane, T.int32(16))
        for m in range(self.row_tiles):
            address = self.x_tiles.address(slot, self.part_row + row + m * ROWS, chunk + half)
            simt.load_matrices(self.left[turn], 4 * m, address)
        row = T.truncdiv(lane, T.int32(16)) * 8 + T.truncmod(lane, T.int32(8))
        half = T.truncmod(T.truncdiv(lane, T.int32(8)), T.int32(2))
        for pair in range(self.column_tiles // 2):
            address = self.weight_tiles.address(slot, self.part_column + row + pair * 2 * COLUMNS, chunk + half)
            simt.load_matrices(self.right[turn], 4 * pair, address)

    def write(self) -> None:
        """Writes y through shared memory, a warp's part by itself, so that 16 bytes of a row go out at once."""
        # 1. Rounded, with the bias.
        for n in range(self.column_tiles):
            column = self.first_column + self.part_column + (n * COLUMNS + 2 * self.place.q)
            load(self.words, 0, 2, T.address_of(self.operands.bias[column]), "global")
            bias = [materialize(T.reinterpret("float32", self.words[e]), "float32") for e in range(2)]
            for m in range(self.row_tiles):
                for half in range(2):
                    at = 4 * (m * self.column_tiles + n) + 2 * half
                    simt.pack(self.words, 2, self.sums[at] + bias[0], self.sums[at + 1] + bias[1], self.op.dtype)
                    row = self.place.g + (m * ROWS + half * 8)
                    store(self.output.address(self.part, row, T.int32(n), 2 * self.place.q), [self.words[2]])
        simt.warp_barrier()
        # 2. Out, as many elements at once as rows of y begin at multiples of.
        unit = gcd(CHUNK // 2, self.op.out_features, self.op.pitch)
        across = self.shape.warp_columns // unit
        for turn in range(self.shape.warp_rows * across // WARP):
            number = self.place.lane + turn * WARP
            row, at = T.truncdiv(number, T.int32(across)), T.truncmod(number, T.int32(across)) * unit
            line, column = self.first_row + self.part_row + row, self.first_column + self.part_column + at
            with T.If(T.And(line < self.operands.rows, column < self.op.out_features)), T.Then():
                chunk, rest = T.truncdiv(at, T.int32(8)), T.truncmod(at, T.int32(8))
                place = T.cast(line, "int64") * T.int64(self.op.pitch) + T.cast(column, "int64")
                self._move(self.output, (self.part, row, chunk, rest), place, unit)

    def _move(self, tiles: LinearTiles, source: tuple[Expr, Expr, Expr, Expr], place: Expr, unit: int) -> None:
        if unit == 1:
            T.buffer_store(self.operands.y, tiles.at(*source), [place])
            return
        words = unit // 2
        load(self.words, 0, words, tiles.address(*source))
        store(T.address_of(self.operands.y[place]), [self.words[i] for i in range(words)], "global")

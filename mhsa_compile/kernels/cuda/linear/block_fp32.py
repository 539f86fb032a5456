"""The products of a linear of float32 on CUDA cores: no digit is dropped, as tensor cores would drop them.

The threads of a warp stand as 4 x 8: thread (r, c) has rows r, r + 4, ... of its part, and columns 4 c .. 4 c + 3 of
every 32. A load of 16 bytes takes four cycles, one for each register of a warp, but two where lane n has the address of
lane n XOR 1, or of n XOR 2, for every n (NVIDIA on its developers' forum, of compute capability 7; CUTLASS has its
threads stand so as well). So bit 0 of a lane's number goes to c, and x is loaded in two cycles; bit 1 goes to r, and so
are the weights. They are packed (in, out), so that a thread's columns lie side by side.

The products of a tile are summed apart, and then added to what there is: a single chain of sums over all terms has more
error than PyTorch's libraries, which sum in parts as well.
"""

from __future__ import annotations

from math import gcd

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.linear.block import LinearBlock, Matrix, MatrixTiles
from mhsa_compile.kernels.cuda.linear.block_shape import CHUNK
from mhsa_compile.kernels.cuda.primitives.simt import clear, load, materialize, registers, set_register, store

VECTOR = CHUNK // 4
"""Elements that are loaded at once."""
_ROWS, _COLUMNS = 4, 8  # of a warp's threads


def padded(columns: int) -> int:
    """The width of the packed weights: rows of whole chunks."""
    return -(-columns // VECTOR) * VECTOR


class ThreadBlock(LinearBlock):
    """One block of y of a LinearOp."""

    def allocate(self) -> None:
        shape, end, lane = self.shape, self.x_tiles.end, self.place.lane
        weight = Matrix(self.operands.weight, self.op.in_features, padded(self.op.out_features))
        self.weight_tiles = MatrixTiles(self.pool, end, shape.stages, shape.depth, shape.columns, weight, swizzle=False)
        self.r = materialize(((lane >> T.int32(1)) & T.int32(1)) | ((lane >> T.int32(4)) << T.int32(1)))
        self.c = materialize((lane & T.int32(1)) | (((lane >> T.int32(2)) & T.int32(3)) << T.int32(1)))
        self.height, self.width = shape.thread_rows, shape.thread_columns
        self.partial = registers(shape.sums)
        self.left, self.right = registers(self.height * VECTOR, "uint32"), registers(self.width, "uint32")

    def weight_place(self, term: Expr) -> tuple[Expr, Expr]:
        return term, self.first_column

    def multiply(self, slot: Expr) -> None:
        clear(self.partial, self.shape.sums)
        vectors = self.shape.depth // VECTOR // self.shape.slices
        with T.unroll(T.int32(vectors)) as vector:
            chunk = self.slice * vectors + vector
            for i in range(self.height):
                row = self.part_row + self.r + i * _ROWS
                load(self.left, VECTOR * i, VECTOR, self.x_tiles.address(slot, row, chunk))
            for term in range(VECTOR):
                self._multiply_term(slot, chunk * VECTOR + term, term)
        # The tile's own sum is added as a whole: so no chain has more terms than a slice of a tile.
        for at in range(self.shape.sums):
            set_register(self.sums, at, self.sums[at] + self.partial[at])

    def _multiply_term(self, slot: Expr, row: Expr, term: int) -> None:
        """An outer product: a column of x, of which `left` has four, by row `row` of the weights' tile."""
        for j in range(self.width // VECTOR):
            column = T.truncdiv(self.part_column, T.int32(VECTOR)) + self.c + j * _COLUMNS
            load(self.right, VECTOR * j, VECTOR, self.weight_tiles.address(slot, row, column))
        for i in range(self.height):
            x = T.reinterpret("float32", self.left[VECTOR * i + term])
            for j in range(self.width):
                at = i * self.width + j
                set_register(self.partial, at, self.partial[at] + x * T.reinterpret("float32", self.right[j]))

    def write(self) -> None:
        """Writes four columns at once, or fewer where rows of y begin at multiples of fewer."""
        unit = gcd(VECTOR, self.op.out_features, self.op.pitch)
        for j in range(self.width // VECTOR):
            column = materialize(self.first_column + self.part_column + (self.c + j * _COLUMNS) * VECTOR)
            load(self.words, 0, VECTOR, T.address_of(self.operands.bias[column]), "global")
            bias = [materialize(T.reinterpret("float32", self.words[e]), "float32") for e in range(VECTOR)]
            for i in range(self.height):
                row = materialize(self.first_row + self.part_row + self.r + i * _ROWS)
                place = materialize(T.cast(row, "int64") * T.int64(self.op.pitch) + T.cast(column, "int64"), "int64")
                at = i * self.width + j * VECTOR
                for first in range(0, VECTOR, unit):
                    with T.If(T.And(row < self.operands.rows, column + first < self.op.out_features)), T.Then():
                        values = [self.sums[at + first + e] + bias[first + e] for e in range(unit)]
                        words = [T.reinterpret("uint32", value) for value in values]
                        store(T.address_of(self.operands.y[place + first]), words, "global")

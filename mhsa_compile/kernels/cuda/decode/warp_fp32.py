"""The arithmetic of one warp of a decode block in float32, by multiply-adds: all rows that share a key head, against a
tile of `keys` keys that the warp has to itself.

For the scores, 32 / `keys` lanes share a key, each with every so manieth chunk of four elements; for the sums, a lane
has chunks of four columns. Where the columns are fewer than 128, some lanes with the same ones share the keys.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.online_softmax import update_row_max
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores
from mhsa_compile.kernels.cuda.decode.block_shape import DecodeBlockShape
from mhsa_compile.kernels.cuda.decode.results import Area
from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.simt import (
    WARP,
    ThreadIndex,
    load,
    materialize,
    over_warp,
    registers,
    set_register,
)
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import Element, SharedTiles

CHUNK = 4  # elements of 32 bits in 16 bytes
HIDDEN = -1.0  # instead of a prob: no value, however large, is to be multiplied by it


class SimtWarp:
    """`keys` and `values` are the tiles of all warps, `queries` one for all. Every lane holds all rows."""

    def __init__(
        self, shape: DecodeBlockShape, place: ThreadIndex, keys: SharedTiles, values: SharedTiles, queries: SharedTiles
    ) -> None:
        self.shape, self.place, self.keys, self.values, self.queries = shape, place, keys, values, queries
        self.rows = tuple(T.int32(row) for row in range(shape.rows))
        self.lanes = shape.lanes_of_key
        self.key = materialize(T.truncdiv(place.lane, T.int32(self.lanes)))
        self.part = materialize(T.truncmod(place.lane, T.int32(self.lanes)))
        chunks = shape.v_head_dim // CHUNK
        # Chunks rounded up to a power of two, so that they divide the warp.
        self.sharing = max(1, WARP // (1 << (chunks - 1).bit_length())) if chunks < WARP else 1
        self.sharing = min(self.sharing, shape.keys)
        self.sharers = WARP // self.sharing  # the lanes with different columns
        self.column = materialize(T.truncmod(place.lane, T.int32(self.sharers)))  # the number of its first chunk
        self.turn = materialize(T.truncdiv(place.lane, T.int32(self.sharers)))  # among those that share its columns
        self.chunks = -(-chunks // self.sharers)
        R = shape.rows
        self.acc_s, self.rescale = registers(R), registers(R)
        self.acc, self.tile_acc = (registers(R * self.chunks * CHUNK) for _ in range(2))
        self.row_max, self.row_sum = registers(R), registers(R)
        self.left, self.right, self.value_row = registers(CHUNK), registers(CHUNK), registers(self.chunks * CHUNK)

    def cells(self, counts: Expr) -> simt.Fragment:
        return simt.StridedCells(self.key, 1, T.And(self.key == 0, counts))

    def begin(self, query: Element, scores: ThreadScores) -> None:
        """Reads Q and clears the sums. All threads of the block read Q together: it is there after the next barrier."""

        def piece(row: Expr, column: Expr) -> None:
            load(self.left, 0, CHUNK, T.address_of(query(row, column)), "global")
            simt.store(self.queries.address(T.int32(0), row, column), [self.left[i] for i in range(CHUNK)])

        self.queries.each_chunk(self.place.thread, self.shape.threads, piece)
        simt.clear(self.acc, self.shape.rows * self.chunks * CHUNK)
        for row in range(self.shape.rows):
            scores.begin(self.row_max, self.row_sum, row)

    def look(self, slot: Expr) -> None:
        """Does nothing: hidden values are left out where they are read."""

    def visit(self, slot: Expr, first_key: Expr, hides: Expr, scores: ThreadScores) -> None:
        # 1. S = Q K^T, the lanes of a key each a part, then all the sum.
        self._multiply_keys(slot)
        # 2. P, l and O by the new maximum.
        scores.convert(self.acc_s, 1, first_key)
        with T.If(hides), T.Then():
            scores.hide(self.acc_s, 1, first_key, None)
        for row in range(self.shape.rows):
            self._weigh(row, scores.factor, hides)
        # 3. O = O + P V.
        if not self.shape.hides_values:
            self._add_values(slot, hides=False)
            return
        with T.If(hides):
            with T.Then():
                self._add_values(slot, hides=True)
            with T.Else():
                self._add_values(slot, hides=False)

    def hand_over(self, area: Area) -> None:
        """Writes O, m and l of the rows."""
        for row in range(self.shape.rows):
            # The lanes of one key have the same sum: only different keys are added up.
            over_warp(self.row_sum, row, lambda a, b: a + b, step=self.lanes)
            area.set_stats(T.int32(row), self.row_max[row], self.row_sum[row])
            for chunk in range(self.chunks):
                cells = [(row * self.chunks + chunk) * CHUNK + i for i in range(CHUNK)]
                for at in cells:
                    over_warp(self.acc, at, lambda a, b: a + b, step=self.sharers)
                with T.If(self._has(chunk)), T.Then():
                    area.set_sums(T.int32(row), self._column(chunk), [self.acc[at] for at in cells])

    def _multiply_keys(self, slot: Expr) -> None:
        E = self.shape.head_dim
        simt.clear(self.acc_s, self.shape.rows)
        steps = -(-E // (CHUNK * self.lanes))
        for step in range(steps):
            column = (self.part + step * self.lanes) * CHUNK
            if (step + 1) * self.lanes * CHUNK <= E:
                self._multiply_chunk(slot, column)
            else:
                with T.If(column < E), T.Then():
                    self._multiply_chunk(slot, column)
        for row in range(self.shape.rows):
            over_warp(self.acc_s, row, lambda a, b: a + b, end=self.lanes)

    def _multiply_chunk(self, slot: Expr, column: Expr) -> None:
        load(self.left, 0, CHUNK, self.keys.address(slot, self.key, column))
        for row in range(self.shape.rows):
            load(self.right, 0, CHUNK, self.queries.address(T.int32(0), T.int32(row), column))
            sums = self.acc_s[row]
            for i in range(CHUNK):
                sums = sums + self.left[i] * self.right[i]
            set_register(self.acc_s, row, sums)

    def _weigh(self, row: int, factor: float, hides: Expr) -> None:
        """A lane's score of a row becomes its prob, or HIDDEN in a tile that hides anything."""
        hidden = materialize(T.And(hides, self.acc_s[row] == T.float32(-math.inf)), "bool")
        row_max = registers(1)
        set_register(row_max, 0, self.acc_s[row])
        over_warp(row_max, 0, T.max, step=self.lanes)
        origin = update_row_max(row_max[0] * T.float32(factor), self.row_max, self.row_sum, self.rescale, row)
        simt.exp2(self.acc_s, row, self.acc_s[row] * T.float32(factor) - origin)
        set_register(self.row_sum, row, self.row_sum[row] + self.acc_s[row])
        if self.shape.hides_values:
            set_register(self.acc_s, row, T.Select(hidden, T.float32(HIDDEN), self.acc_s[row]))

    def _add_values(self, slot: Expr, *, hides: bool) -> None:
        """The sum of the tile first: so there are no sums of very many terms."""
        width = self.chunks * CHUNK
        simt.clear(self.tile_acc, self.shape.rows * width)
        for turn in range(self.shape.keys // self.sharing):
            key = turn * self.sharing + self.turn
            for chunk in range(self.chunks):
                # A lane without such columns reads others, and writes nothing.
                column = T.min(self._column(chunk), T.int32(self.shape.v_head_dim - CHUNK))
                load(self.value_row, chunk * CHUNK, CHUNK, self.values.address(slot, key, column))
            for row in range(self.shape.rows):
                # All lanes of a key have its prob; the first one is asked.
                prob = materialize(simt.from_lane(self.acc_s[row], key * self.lanes), "float32")
                for i in range(width):
                    term = prob * self.value_row[i]
                    # 0 * NaN would be NaN.
                    term = T.Select(prob < T.float32(0), T.float32(0), term) if hides else term
                    set_register(self.tile_acc, row * width + i, self.tile_acc[row * width + i] + term)
        for row in range(self.shape.rows):
            for at in range(row * width, (row + 1) * width):
                set_register(self.acc, at, self.acc[at] * self.rescale[row] + self.tile_acc[at])

    def _column(self, chunk: int) -> Expr:
        return (self.column + chunk * self.sharers) * CHUNK

    def _has(self, chunk: int) -> Expr:
        """Whether the columns of the chunk of this number exist."""
        return self._column(chunk) < self.shape.v_head_dim

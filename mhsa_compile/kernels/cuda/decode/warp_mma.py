"""The arithmetic of one warp of a decode block in 16 bits, on tensor cores: all rows that share a key head, against a
tile of `keys` keys that the warp has to itself.

Rows are few, so they are the columns of the products, of which there are 8, and not their rows, of which there are 16:
S^T = K Q^T and O^T = V^T P^T. Rows beyond the last are copies of it, which nobody looks at. Even so the tensor cores
are idle for nine tenths of the time that the keys take to arrive.

Of the tiles of C a lane 4 g + q holds the rows 2 q and 2 q + 1 of the softmax, at the keys, or columns of V, g and
g + 8.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.nonfinite_values import WarpNonFiniteRepair
from mhsa_compile.kernels.cuda.attention.online_softmax import update_row_max
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores
from mhsa_compile.kernels.cuda.decode.block_shape import DecodeBlockShape
from mhsa_compile.kernels.cuda.decode.results import Area
from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.simt import DEPTH, ROWS, ThreadIndex, clear, load, registers, set_register
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import CHUNK, Element, SharedTiles, padded


class _Cells:
    """Cells in tiles of 8 keys, one of each; two rows are neighbours."""

    in_pairs = False

    def __init__(self, place: ThreadIndex, row_tiles: int, counts: Expr) -> None:
        self.first, self.row_tiles, self.leads = place.g, row_tiles, T.And(place.g == 0, counts)

    def offsets(self, count: int) -> list[int]:
        return [8 * n for n in range(count)]

    def at(self, row: int, count: int, number: int) -> int:
        return 4 * (number // 2 * self.row_tiles + row // 2) + 2 * (number % 2) + row % 2


class TensorWarp:
    """`keys` and `values` are the tiles of all warps, `queries` one for all, where Q does not stay in registers. `rows`
    are the numbers of a lane's rows, the last one's in the place of what is beyond."""

    def __init__(
        self,
        shape: DecodeBlockShape,
        place: ThreadIndex,
        keys: SharedTiles,
        values: SharedTiles,
        queries: SharedTiles | None,
    ) -> None:
        self.shape, self.place, self.keys, self.values, self.queries = shape, place, keys, values, queries
        self.dtype = shape.dtype
        self.row_tiles = shape.row_tiles
        self.thread_rows = 2 * self.row_tiles
        self.numbers = [2 * place.q + (8 * (row // 2) + row % 2) for row in range(self.thread_rows)]
        self.rows = tuple(simt.materialize(self._existing(number)) for number in self.numbers)
        self.tiles, self.value_tiles = shape.keys // 8, padded(shape.v_head_dim) // ROWS
        self.depth_steps = padded(shape.head_dim) // DEPTH
        self.layout = _Cells(place, self.row_tiles, T.bool(True))
        self.acc_s = registers(2 * self.tiles * self.row_tiles)
        self.acc = registers(4 * self.value_tiles * self.row_tiles)
        self.row_max, self.row_sum, self.rescale = (registers(self.thread_rows) for _ in range(3))
        query_steps = self.depth_steps if queries is None else 2
        self.query_words, self.words = registers(2 * self.row_tiles * query_steps, "uint32"), registers(4, "uint32")
        self.probs = registers(2, "uint32")
        self.repair = WarpNonFiniteRepair(values, place, self.dtype)

    def cells(self, counts: Expr) -> simt.Fragment:
        """`counts`: whether this warp is the one which has the scores of no key of the rows."""
        return _Cells(self.place, self.row_tiles, counts)

    def _existing(self, number: Expr) -> Expr:
        return T.min(number, T.int32(self.shape.rows - 1))

    # What happens, in order.

    def begin(self, query: Element, scores: ThreadScores) -> None:
        """Reads Q, whose elements are `query(row, column)`, and clears the sums. Where Q lies in shared memory all
        threads of the block read it together: it is there after the next barrier."""
        if self.queries is None:
            self._hold_queries(query)
        else:
            self._share_queries(self.queries, query)
        clear(self.acc, 4 * self.value_tiles * self.row_tiles)
        for row in range(self.thread_rows):
            scores.begin(self.row_max, self.row_sum, row)

    def look(self, slot: Expr) -> None:
        """Notes whether the values of a tile that hides anything are finite, by the pieces that this lane copied."""
        self.repair.look(slot)

    def visit(self, slot: Expr, first_key: Expr, hides: Expr, scores: ThreadScores) -> None:
        # 1. S^T = K Q^T.
        self._multiply_keys(slot)
        # 2. P, l and O by the new maximum.
        scores.convert(self.acc_s, self.tiles, first_key)
        with T.If(hides), T.Then():
            scores.hide(self.acc_s, self.tiles, first_key, None)
        references = [self._reference(row, scores.factor) for row in range(self.thread_rows)]
        if self.shape.hides_values:
            with T.If(hides), T.Then():
                self.repair.resolve(slot, self.thread_rows, self.tiles, self._sees, self._add_value)
        for row in range(self.thread_rows):
            for at in self._places(row):
                simt.exp2(self.acc_s, at, self.acc_s[at] * T.float32(scores.factor) - references[row])
                set_register(self.row_sum, row, self.row_sum[row] + self.acc_s[at])
        # 3. O^T = O^T + V^T P^T.
        self._multiply_values(slot)

    def hand_over(self, area: Area) -> None:
        """Writes O, m and l of the rows."""
        for row, number in enumerate(self.numbers):
            # Over g: lanes 4 g + q of one q have the same rows.
            simt.over_warp(self.row_sum, row, lambda a, b: a + b, step=4)
            with T.If(number < self.shape.rows), T.Then():
                area.set_stats(number, self.row_max[row], self.row_sum[row])
                for tile in range(self.value_tiles):
                    for half in range(2):
                        if tile * ROWS + 8 * half < self.shape.v_head_dim:
                            column = self.place.g + (tile * ROWS + 8 * half)
                            area.set_sums(number, column, [self.acc[self._sum(row, tile, half)]])

    # Q.

    def _hold_queries(self, query: Element) -> None:
        for step in range(self.depth_steps):
            for half in range(2):
                column = step * DEPTH + 8 * half
                for tile in range(self.row_tiles):
                    at = 2 * (step * self.row_tiles + tile) + half
                    if column >= self.shape.head_dim:
                        set_register(self.query_words, at, T.uint32(0))
                        continue
                    row = self._existing(self.place.g + 8 * tile)
                    load(self.query_words, at, 1, T.address_of(query(row, column + 2 * self.place.q)), "global")

    def _share_queries(self, queries: SharedTiles, query: Element) -> None:
        def piece(row: Expr, column: Expr) -> None:
            # A chunk of padding reads the last one there is, and becomes zeros.
            inside = T.min(column, T.int32(self.shape.head_dim - CHUNK))
            load(self.words, 0, 4, T.address_of(query(self._existing(row), inside)), "global")
            words = [T.Select(column < self.shape.head_dim, self.words[i], T.uint32(0)) for i in range(4)]
            simt.store(queries.address(T.int32(0), row, column), words)

        queries.each_chunk(self.place.thread, self.shape.threads, piece)

    def _query_words(self, step: int, tile: int) -> int:
        """The index at which the words of Q of a step begin; they are read now, two steps at a time, where Q does not
        stay in registers."""
        if self.queries is None:
            return 2 * (step * self.row_tiles + tile)
        at = 4 * tile
        if step % 2 == 0:
            lane = self.place.lane
            column = T.truncdiv(lane, T.int32(8)) * 8 + step * DEPTH
            last = T.int32(self.queries.form.columns - 8)  # of a step that is not there
            row = T.truncmod(lane, T.int32(8)) + 8 * tile
            simt.load_matrices(self.query_words, at, self.queries.address(T.int32(0), row, T.min(column, last)))
        return at + 2 * (step % 2)

    # Products.

    def _multiply_keys(self, slot: Expr) -> None:
        lane = self.place.lane
        row, column = T.truncmod(lane, T.int32(16)), T.truncdiv(lane, T.int32(16)) * 8
        clear(self.acc_s, 2 * self.tiles * self.row_tiles)
        for step in range(self.depth_steps):
            b = [self._query_words(step, tile) for tile in range(self.row_tiles)]
            for m in range(self.shape.keys // ROWS):
                simt.load_matrices(self.words, 0, self.keys.address(slot, row + m * ROWS, column + step * DEPTH))
                for tile in range(self.row_tiles):
                    at = 4 * (m * self.row_tiles + tile)
                    simt.multiply_add(self.acc_s, at, self.words, 0, self.query_words, b[tile], self.dtype)

    def _multiply_values(self, slot: Expr) -> None:
        lane = self.place.lane
        row = T.truncmod(lane, T.int32(8)) + T.truncdiv(lane, T.int32(16)) * 8
        column = T.truncmod(T.truncdiv(lane, T.int32(8)), T.int32(2)) * 8
        probs = registers(2 * self.row_tiles, "uint32")
        for m in range(self.shape.keys // DEPTH):
            for tile in range(self.row_tiles):
                for half in range(2):
                    at = 4 * (m * self.row_tiles + tile) + 2 * half
                    simt.pack(self.probs, half, self.acc_s[at], self.acc_s[at + 1], self.dtype)
                    # A word of C has two rows at one key; the right operand wants one row at two keys.
                    simt.transpose(probs, 2 * tile + half, self.probs[half])
            for v in range(self.value_tiles):
                address = self.values.address(slot, row + m * DEPTH, column + v * ROWS)
                simt.load_matrices(self.words, 0, address, transposed=True)
                for tile in range(self.row_tiles):
                    at = 4 * (v * self.row_tiles + tile)
                    simt.multiply_add(self.acc, at, self.words, 0, probs, 2 * tile, self.dtype)

    # The softmax.

    def _reference(self, row: int, factor: float) -> Expr:
        row_max = registers(1)
        set_register(row_max, 0, T.float32(-math.inf))
        for at in self._places(row):
            set_register(row_max, 0, T.max(row_max[0], self.acc_s[at]))
        simt.over_warp(row_max, 0, T.max, step=4)
        sums = [self._sum(row, tile, half) for tile in range(self.value_tiles) for half in range(2)]
        origin = update_row_max(row_max[0] * T.float32(factor), self.row_max, self.row_sum, self.rescale, row)
        for at in sums:
            set_register(self.acc, at, self.acc[at] * self.rescale[row])
        return origin

    def _places(self, row: int) -> list[int]:
        return [self.layout.at(row, self.tiles, number) for number in range(self.tiles)]

    def _sum(self, row: int, tile: int, half: int) -> int:
        """The index of the sum of a row and column tile * 16 + 8 * half + g."""
        return 4 * (tile * self.row_tiles + row // 2) + 2 * half + row % 2

    def _sees(self, row: int, number: int) -> Expr:
        """Whether a row sees the key of this lane's cell `number`, once what is hidden is -inf."""
        return T.Not(self.acc_s[self.layout.at(row, self.tiles, number)] == T.float32(-math.inf))

    def _add_value(self, row: int, tile: int, half: int, value: Expr) -> None:
        at = self._sum(row, tile, half)
        set_register(self.acc, at, self.acc[at] + value)

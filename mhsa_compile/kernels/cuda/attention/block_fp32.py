"""One block of float32 attention: some rows of queries of one head against all the keys they see, by multiply-adds.

    for each tile of keys that some row sees, its K and V copied ahead through a ring in shared memory:
        S = Q K^T                        float32, not TF32
        m' = max(m, max S);  P = 2^(S - m');  l = 2^(m - m') l + sum P
        O = 2^(m - m') O + P V           the tile's own sum first: so there are no sums of very many terms
    Y = O / l, and zeros where nothing was visible (l = 0)

Half a warp has some rows: each of its lanes every 16th key of a tile for S, and every 16th chunk of four columns for O.
P goes through shared memory, where only that half looks at it. As in `block_mma`, K of tile j + `stages` is copied
while tile j becomes probs, and V of tile j + `stages` - 1 from before its scores are computed.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.key_range import KeyTiles
from mhsa_compile.kernels.cuda.attention.launch import AttentionBlock, TileShape
from mhsa_compile.kernels.cuda.attention.online_softmax import inverse, update_row_max
from mhsa_compile.kernels.cuda.primitives import simt, smem_pipeline
from mhsa_compile.kernels.cuda.primitives.simt import barrier, clear, load, materialize, registers, set_register, store
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import RowFormat, SharedTiles, words

LANES = 16
"""Lanes that have the same rows: half a warp."""
CHUNK, WORD = 4, 4  # elements of 16 bytes, and bytes of an element
HIDDEN = -1.0  # instead of a prob: no value, however large, is to be multiplied by it


class Fp32BlockShape(TileShape):
    """The sizes of a block, and what they come to."""

    @property
    def rows(self) -> int:
        """Rows of queries of a thread."""
        return self.queries * LANES // self.threads

    @property
    def keys_of_lane(self) -> int:
        return self.keys // LANES

    @property
    def chunks(self) -> int:
        """Chunks of a thread's columns of O."""
        return -(-self.v_head_dim // (CHUNK * LANES))

    @property
    def key_form(self) -> RowFormat:
        """The form of K's rows, an odd number of chunks each: the eight that are read at once, of as many keys, lie in
        different banks."""
        return RowFormat(self.head_dim, WORD, self.head_dim, CHUNK * (self.head_dim // CHUNK | 1))

    @property
    def value_form(self) -> RowFormat:
        return words(self.v_head_dim)

    @property
    def prob_form(self) -> RowFormat:
        return RowFormat(self.keys, WORD, self.keys, self.keys + CHUNK)

    @property
    def shared_bytes(self) -> int:
        tiles = self.key_form.bytes(self.keys) + self.value_form.bytes(self.keys)
        return self.key_form.bytes(self.queries) + self.stages * tiles + self.prob_form.bytes(self.queries)

    @property
    def tile_registers(self) -> int:
        """The registers in which a thread holds O twice, S, m and l, and the operands of products."""
        sums = 2 * CHUNK * self.chunks
        return self.rows * (sums + self.keys_of_lane + 3 + CHUNK) + CHUNK * max(self.chunks, self.keys_of_lane)


class Fp32AttentionBlock(AttentionBlock[Fp32BlockShape]):
    """Emits one block."""

    def allocate(self) -> None:
        shape, stages = self.shape, self.shape.stages
        pool = T.alloc_buffer((shape.shared_bytes // WORD,), "float32", scope="shared.dyn")
        self.queries = SharedTiles(pool, 0, 1, shape.queries, shape.key_form)
        self.keys = SharedTiles(pool, self.queries.end, stages, shape.keys, shape.key_form)
        self.values = SharedTiles(pool, self.keys.end, stages, shape.keys, shape.value_form)
        self.probs = SharedTiles(pool, self.values.end, 1, shape.queries, shape.prob_form)
        self.first_row, self.lane = _rows_and_lane(shape, self.place)
        self.order = KeyTiles(self.scores.key_range, shape.keys)
        rows, columns = shape.rows, CHUNK * shape.chunks
        self.acc_s = registers(rows * shape.keys_of_lane)
        self.acc, self.tile_acc = registers(rows * columns), registers(rows * columns)
        self.row_max, self.row_sum, self.rescale = registers(rows), registers(rows), registers(rows)
        self.left = registers(rows * CHUNK)
        self.right = registers(CHUNK * max(shape.chunks, 1))

    @staticmethod
    def layout(shape: Fp32BlockShape, place: simt.ThreadIndex, first: Expr) -> tuple[tuple[Expr, ...], simt.Fragment]:
        row, lane = _rows_and_lane(shape, place)
        base = materialize(first + row)
        return tuple(base + i for i in range(shape.rows)), simt.StridedCells(lane, LANES, lane == 0)

    def begin(self) -> None:
        for row in range(self.shape.rows):
            self.scores.begin(self.row_max, self.row_sum, row)
        clear(self.acc, self.shape.rows * CHUNK * self.shape.chunks)

    def visit(self, turn: Expr) -> None:
        # Groups of copies that may still be under way: K and V of the tiles ahead.
        pending, stages = 2 * (self.shape.stages - 1), self.shape.stages
        slot = materialize(T.truncmod(turn, T.int32(stages)))
        first_key = self.order.first_key(turn)
        bits_row, hides = self.order.hides(turn, first_key)
        # 1. K has arrived; all are done with the V before.
        smem_pipeline.wait(pending)
        barrier()
        self.copy_values(turn + (stages - 1))
        # 2. S = Q K^T.
        self._multiply_keys(slot)
        # 3. V has arrived; all are done with this K.
        smem_pipeline.wait(pending)
        barrier()
        self.copy_keys(turn + stages)
        # 4. P and l by the new maximum.
        tiles = self.shape.keys_of_lane
        self.scores.convert(self.acc_s, tiles, first_key)
        with T.If(hides), T.Then():
            self.scores.hide(self.acc_s, tiles, first_key, bits_row)
        for row in range(self.shape.rows):
            self._weigh(row, hides)
        # P is read by the half warp that wrote it, so the block need not wait.
        simt.warp_barrier()
        # 5. O = 2^(m - m') O + P V.
        self._add_values(slot, hides)

    # Products.

    def _multiply_keys(self, slot: Expr) -> None:
        """A loop over chunks of the head, of a size that the cache of instructions holds."""
        rows, keys = self.shape.rows, self.shape.keys_of_lane
        clear(self.acc_s, rows * keys)
        with T.serial(T.int32(self.shape.head_dim // CHUNK)) as chunk:
            column = chunk * CHUNK
            for row in range(rows):
                # The same address for all 16 lanes of a row: one read serves them.
                load(self.left, row * CHUNK, CHUNK, self.queries.address(T.int32(0), self.first_row + row, column))
            for key in range(keys):
                load(self.right, 0, CHUNK, self.keys.address(slot, self.lane + key * LANES, column))
                for row in range(rows):
                    for i in range(CHUNK):
                        _add(self.acc_s, row * keys + key, self.left[row * CHUNK + i] * self.right[i])

    def _add_values(self, slot: Expr, hides: Expr) -> None:
        rows, columns = self.shape.rows, CHUNK * self.shape.chunks
        clear(self.tile_acc, rows * columns)
        # Two copies of the loop, since the one with care has a select for each multiply-add.
        if not self.hides_values:
            self._multiply_values(slot, hides=False)
        else:
            with T.If(hides):
                with T.Then():
                    self._multiply_values(slot, hides=True)
                with T.Else():
                    self._multiply_values(slot, hides=False)
        for row in range(rows):
            for at in range(row * columns, (row + 1) * columns):
                set_register(self.acc, at, self.acc[at] * self.rescale[row] + self.tile_acc[at])

    def _multiply_values(self, slot: Expr, *, hides: bool) -> None:
        rows, columns = self.shape.rows, CHUNK * self.shape.chunks
        with T.serial(T.int32(self.shape.keys // CHUNK)) as group:
            first = group * CHUNK
            for row in range(rows):
                load(self.left, row * CHUNK, CHUNK, self.probs.address(T.int32(0), self.first_row + row, first))
            for key in range(CHUNK):
                for chunk in range(self.shape.chunks):
                    # A lane without such columns reads others, and writes nothing.
                    column = T.min(self._column(chunk), T.int32(self.shape.v_head_dim - CHUNK))
                    load(self.right, chunk * CHUNK, CHUNK, self.values.address(slot, first + key, column))
                for row in range(rows):
                    prob = self.left[row * CHUNK + key]
                    for i in range(columns):
                        at = row * columns + i
                        term = prob * self.right[i]
                        # 0 * NaN would be NaN.
                        term = T.Select(prob < T.float32(0), T.float32(0), term) if hides else term
                        _add(self.tile_acc, at, term)

    # The softmax.

    def _weigh(self, row: int, hides: Expr) -> None:
        """A row's scores become probs, or HIDDEN, in shared memory."""
        keys, factor, new = self.shape.keys_of_lane, T.float32(self.scores.factor), registers(1)
        cells = range(row * keys, (row + 1) * keys)
        set_register(new, 0, T.float32(-math.inf))
        for at in cells:
            set_register(new, 0, T.max(new[0], self.acc_s[at]))
        # Each half of the warp by itself: the other one has other rows.
        simt.over_warp(new, 0, T.max, end=LANES)
        origin = update_row_max(new[0] * factor, self.row_max, self.row_sum, self.rescale, row)
        for key, at in enumerate(cells):
            hidden = materialize(T.And(hides, self.acc_s[at] == T.float32(-math.inf)), "bool")
            simt.exp2(self.acc_s, at, self.acc_s[at] * factor - origin)
            set_register(self.row_sum, row, self.row_sum[row] + self.acc_s[at])
            prob = self.acc_s[at]
            if self.hides_values:
                prob = materialize(T.Select(hidden, T.float32(HIDDEN), prob), "float32")
            store(self.probs.address(T.int32(0), self.first_row + row, self.lane + key * LANES), [prob])

    def write(self) -> None:
        for row, number in enumerate(self.scores.numbers):
            simt.over_warp(self.row_sum, row, lambda a, b: a + b, end=LANES)
            part = inverse(self.row_sum[row])
            for chunk in range(self.shape.chunks):
                column = self._column(chunk)
                there = T.And(number < self.scores.key_range.q_length, column < self.shape.v_head_dim)
                with T.If(there), T.Then():
                    first = (row * self.shape.chunks + chunk) * CHUNK
                    values = [self.acc[first + i] * part for i in range(CHUNK)]
                    store(T.address_of(self.operands[3](number, column)), values, "global")

    def _column(self, chunk: int) -> Expr:
        return (self.lane + chunk * LANES) * CHUNK


def _add(sums: Expr, at: int, term: Expr) -> None:
    set_register(sums, at, sums[at] + term)


def _rows_and_lane(shape: Fp32BlockShape, place: simt.ThreadIndex) -> tuple[Expr, Expr]:
    """(a thread's first row in the block, its number among the lanes that have the same rows)."""
    half, lane = T.truncdiv(place.thread, T.int32(LANES)), T.truncmod(place.thread, T.int32(LANES))
    return materialize(half * shape.rows), materialize(lane)

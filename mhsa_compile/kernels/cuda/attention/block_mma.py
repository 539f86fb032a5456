"""One block of attention: some rows of queries of one head against all the keys that they see, on tensor cores.

    for each tile of keys that some row sees, its K and V copied ahead through a ring in shared memory:
        S = Q K^T                        each warp for its own rows, in registers, float32
        m' = max(m, max S);  P = 2^(S - m');  l = 2^(m - m') l + sum P;  O = 2^(m - m') O
        O = O + P V                      P rounded to 16 bits: as it lies in registers, it is the left operand
    Y = O / l, and zeros where nothing was visible (l = 0)

A tile that every row sees takes no masks. Copies: K of tile j + `stages` begins when all warps have multiplied by K of
tile j, V of tile j + `stages` - 1 when all have multiplied by V of tile j - 1; so there are two barriers a tile.

A hidden value that is not finite makes O NaN, by a prob of 0. That shows at the end, and the block begins anew, with
care (`BlockNonFiniteRepair`): nothing is lost in a model that is well.
Sources: FlashAttention-2, Dao 2023 (arXiv:2307.08691); online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867).
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.key_range import KeyTiles
from mhsa_compile.kernels.cuda.attention.launch import WARPS, AttentionBlock, TileShape
from mhsa_compile.kernels.cuda.attention.nonfinite_values import BlockNonFiniteRepair
from mhsa_compile.kernels.cuda.attention.online_softmax import Softmax
from mhsa_compile.kernels.cuda.attention.thread_scores import rows_of
from mhsa_compile.kernels.cuda.primitives import simt, smem_pipeline
from mhsa_compile.kernels.cuda.primitives.simt import COLUMNS, DEPTH, ROWS, barrier, load_matrices, pack, registers
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import ELEMENT, SharedTiles, halves, padded, tile_bytes

QUERY_REGISTERS = 32
"""Registers that Q may stay in; where it has more fragments, they are read again for every tile of keys."""


class MmaBlockShape(TileShape):
    """The sizes of a block, and what they come to."""

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows of queries of a warp."""
        return self.queries // WARPS // ROWS

    @property
    def flag_byte(self) -> int:
        """The byte at which the word of `BlockNonFiniteRepair` lies: behind all tiles and the output that takes their
        place."""
        tiles = tile_bytes(self.keys, self.head_dim) + tile_bytes(self.keys, self.v_head_dim)
        inputs = tile_bytes(self.queries, self.head_dim) + self.stages * tiles
        return max(inputs, tile_bytes(self.queries, self.v_head_dim))

    @property
    def shared_bytes(self) -> int:
        return self.flag_byte + 16

    @property
    def tile_registers(self) -> int:
        """The registers in which a thread holds its part of S, O and Q."""
        columns = self.keys + padded(self.v_head_dim)
        query_tiles = padded(self.head_dim) // DEPTH if self.holds_queries else 1
        # A lane's part of 16 rows: 4 float32 of 8 columns of S or O, 4 words of 16 columns of Q.
        return self.row_tiles * (columns // 2 + 4 * query_tiles)

    @property
    def holds_queries(self) -> bool:
        return self.row_tiles * padded(self.head_dim) // DEPTH * 4 <= QUERY_REGISTERS


class MmaAttentionBlock(AttentionBlock[MmaBlockShape]):
    """Emits one block."""

    def allocate(self) -> None:
        op, shape = self.op, self.shape
        self.order = KeyTiles(self.scores.key_range, shape.keys)
        E, F = shape.head_dim, shape.v_head_dim
        # Of the one dtype that all its views have: TVM gives the whole another one's, and leaves its count as it was.
        pool = T.alloc_buffer((shape.shared_bytes // ELEMENT,), op.dtype, scope="shared.dyn")
        self.queries = SharedTiles(pool, 0, 1, shape.queries, halves(E))
        self.keys = SharedTiles(pool, self.queries.end, shape.stages, shape.keys, halves(E))
        self.values = SharedTiles(pool, self.keys.end, shape.stages, shape.keys, halves(F))
        # In the place of Q, K and V, when they are done with.
        self.output = SharedTiles(pool, 0, 1, shape.queries, halves(F))
        flag = T.address_of(pool[shape.flag_byte // ELEMENT])
        self.repair = BlockNonFiniteRepair(self.values, flag, self.place, shape.threads, op.dtype)
        self.depth_steps, self.key_steps = padded(E) // DEPTH, shape.keys // DEPTH
        self.key_tiles, self.value_tiles = shape.keys // COLUMNS, padded(F) // COLUMNS
        self.softmax = Softmax(2 * shape.row_tiles, self.key_tiles, self.value_tiles, self.scores)
        self.acc_s, self.acc = self.softmax.acc_s, self.softmax.acc
        self.attempts = registers(1, "int32")
        words = 4 * shape.row_tiles
        self.query_words = registers(words * (self.depth_steps if shape.holds_queries else 1), "uint32")
        self.prob_words, self.words = registers(words, "uint32"), registers(4, "uint32")

    @staticmethod
    def layout(shape: MmaBlockShape, place: simt.ThreadIndex, first: Expr) -> tuple[tuple[Expr, ...], simt.Fragment]:
        return rows_of(place, first, shape.queries, WARPS), simt.QuadFragment(place)

    def sweep(self) -> None:
        """All tiles, and once more if need be."""
        if not self.hides_values:
            super().sweep()
            return
        simt.set_register(self.attempts, 0, T.int32(0))
        with T.While(self.attempts[0] < 2):
            super().sweep()
            # `attempts` is the same in all threads, so all come to the barrier in `any_of_block`, or none.
            begins_anew = T.And(self.attempts[0] == 0, simt.any_of_block(self.softmax.is_spoilt()))
            simt.set_register(self.attempts, 0, T.Select(begins_anew, T.int32(1), T.int32(2)))

    def begin(self) -> None:
        self.softmax.begin()

    def visit(self, turn: Expr) -> None:
        # Groups of copies that may still be under way: K and V of the tiles ahead.
        pending, stages = 2 * (self.shape.stages - 1), self.shape.stages
        # A constant where there is one slot: all its addresses are then base and constant.
        slot = simt.materialize(T.truncmod(turn, T.int32(stages))) if stages > 1 else T.int32(0)
        first_key = self.order.first_key(turn)
        bits_row, hides = self.order.hides(turn, first_key)
        # 1. K has arrived; all are done with the V before.
        smem_pipeline.wait(pending)
        barrier()
        self.copy_values(turn + (stages - 1))
        # 2. S = Q K^T.
        # Not before the loop: Q comes in one group of copies with the first K.
        if self.shape.holds_queries:
            with T.If(turn == 0), T.Then():
                for step in range(self.depth_steps):
                    self._load_queries(step)
        self._multiply_keys(slot)
        # 3. V has arrived; all are done with this K.
        smem_pipeline.wait(pending)
        self._with_care(hides, lambda: self.repair.look(slot, turn))
        barrier()
        self.copy_keys(turn + stages)
        # 4. P, l and O by the new maximum.
        self.scores.convert(self.acc_s, self.key_tiles, first_key)
        with T.If(hides), T.Then():
            self.scores.hide(self.acc_s, self.key_tiles, first_key, bits_row)
        with T.If(self.softmax.update_max()), T.Then():
            self.softmax.rescale_acc()
        sizes = self.shape.row_tiles, self.shape.keys
        # Before scores become probs: what is hidden is still told by its -inf.
        self._with_care(hides, lambda: self.repair.resolve(slot, turn, self.acc_s, self.acc, *sizes))
        self.softmax.softmax_step()
        # 5. O = O + P V.
        self._multiply_values(slot)

    def _with_care(self, hides: Expr, act: Callable[[], None]) -> None:
        """Emits `act` for a tile of which not all rows see all, in the second attempt."""
        if self.hides_values:
            with T.If(T.And(hides, self.attempts[0] == 1)), T.Then():
                act()

    # Products.

    def _load_queries(self, step: int) -> None:
        """Q's fragments of one step: rows i % 16, columns 8 (i // 16) of lane i's address."""
        lane = self.place.lane
        row, column = T.truncmod(lane, T.int32(16)), T.truncdiv(lane, T.int32(16)) * 8 + step * DEPTH
        for m in range(self.shape.row_tiles):
            first = self.place.warp * (self.shape.row_tiles * ROWS) + m * ROWS
            at = self._query_word(step, m)
            load_matrices(self.query_words, at, self.queries.address(T.int32(0), first + row, column))

    def _query_word(self, step: int, m: int) -> int:
        return 4 * (m + (step * self.shape.row_tiles if self.shape.holds_queries else 0))

    def _multiply_keys(self, slot: Expr) -> None:
        lane = self.place.lane
        # Of the four matrices two lie along the head, for one fragment; the next two are eight keys further.
        row = T.truncdiv(lane, T.int32(16)) * 8 + T.truncmod(lane, T.int32(8))
        column = T.truncmod(T.truncdiv(lane, T.int32(8)), T.int32(2)) * 8
        simt.clear(self.acc_s, 2 * self.shape.row_tiles * self.key_tiles * 2)
        for step in range(self.depth_steps):
            if not self.shape.holds_queries:
                self._load_queries(step)
            for pair in range(self.key_tiles // 2):
                address = self.keys.address(slot, row + pair * 2 * COLUMNS, column + step * DEPTH)
                load_matrices(self.words, 0, address)
                for m in range(self.shape.row_tiles):
                    for half in range(2):
                        at = 4 * (m * self.key_tiles + 2 * pair + half)
                        a = self._query_word(step, m)
                        simt.multiply_add(self.acc_s, at, self.query_words, a, self.words, 2 * half, self.op.dtype)

    def _multiply_values(self, slot: Expr) -> None:
        lane = self.place.lane
        row, column = T.truncmod(lane, T.int32(16)), T.truncdiv(lane, T.int32(16)) * 8
        for step in range(self.key_steps):
            for m in range(self.shape.row_tiles):
                # Two neighbouring tiles of C are the four words of an A.
                for i in range(4):
                    at = 4 * (m * self.key_tiles + 2 * step + i // 2) + 2 * (i % 2)
                    pack(self.prob_words, 4 * m + i, self.acc_s[at], self.acc_s[at + 1], self.op.dtype)
            for pair in range(self.value_tiles // 2):
                address = self.values.address(slot, row + step * DEPTH, column + pair * 2 * COLUMNS)
                # V lies key by key; the right operand wants a column's keys side by side.
                load_matrices(self.words, 0, address, transposed=True)
                for m in range(self.shape.row_tiles):
                    for half in range(2):
                        at = 4 * (m * self.value_tiles + 2 * pair + half)
                        simt.multiply_add(self.acc, at, self.prob_words, 4 * m, self.words, 2 * half, self.op.dtype)

    def write(self) -> None:
        """Writes the rows of O, each divided by its sum; through shared memory, so that whole chunks of a row go out at
        once."""
        barrier()  # all are done with Q, K and V
        share = self.shape.row_tiles * ROWS
        first = simt.materialize(self.place.warp * share)
        for row in range(2 * self.shape.row_tiles):
            part = self.softmax.inverse_row_sum(row)
            number = first + self.place.g + (ROWS * (row // 2) + 8 * (row % 2))
            for n in range(self.value_tiles):
                low, high = (self.acc[simt.cell(row, self.value_tiles, n, e)] * part for e in range(2))
                pack(self.words, 0, low, high, self.op.dtype)
                column = 2 * self.place.q + n * COLUMNS
                simt.store(self.output.address(T.int32(0), number, column), [self.words[0]])
        simt.warp_barrier()
        rows = self.scores.key_range.first_row + first

        def write(row: Expr, column: Expr) -> None:
            is_there = rows + row < self.scores.key_range.q_length
            # Columns of padding are in shared memory only.
            if padded(self.shape.v_head_dim) > self.shape.v_head_dim:
                is_there = T.And(is_there, column < self.shape.v_head_dim)
            with T.If(is_there), T.Then():
                simt.load(self.words, 0, 4, self.output.address(T.int32(0), first + row, column))
                simt.store(
                    T.address_of(self.operands[3](rows + row, column)), [self.words[i] for i in range(4)], "global"
                )

        self.output.each_chunk(self.place.lane, simt.WARP, write, share)

"""What a warpgroup that computes does: 64 rows of queries of one item after the other, against all keys that they see.

    S = Q K_0^T;  P = 2^(S - m)
    for each further tile j of keys:
        begin  S = Q K_j^T                both at once: the tensor cores work on the second
        begin  O = O + P V_(j-1)          while this warpgroup takes the exponentials of the first
        m' = max(m, max S);  P' = 2^(S - m');  l = 2^(m - m') l + sum P'
        O = 2^(m - m') O                  when O is there
    O = O + P V_last
    Y = O / l, and zeros where nothing was visible (l = 0)

The warpgroups of a block hand a token around: who has it begins its products, so that one multiplies while another
takes exponentials. Source: FlashAttention-3, Shah et al. 2024 (arXiv:2407.08608), its algorithm 2 and section 3.2.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.block_sparsity import WORD
from mhsa_compile.kernels.cuda.attention.key_range import KeyTiles, hides_values
from mhsa_compile.kernels.cuda.attention.nonfinite_values import SharedNonFiniteRepair
from mhsa_compile.kernels.cuda.attention.online_softmax import Softmax
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores
from mhsa_compile.kernels.cuda.attention_hopper.shared_memory import AttentionSharedMemory, HopperBlockShape
from mhsa_compile.kernels.cuda.primitives import hopper_ptx, simt
from mhsa_compile.kernels.cuda.primitives.hopper_tma import Tensor
from mhsa_compile.kernels.cuda.primitives.simt import COLUMNS, DEPTH, cell, materialize, pack, registers, set_register
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import padded
from mhsa_compile.kernels.interface.ops import AttentionOp

_TOKEN, _ALL, _GROUP = 1, 4, 5  # the first number of each kind of named barrier; 0 is the block's

_WIDEST_IN_TURN = 128
"""The widest heads for which warpgroups take turns. Beyond, products take so much longer than exponentials that the
order does not matter, and registers do."""


class AttentionConsumer:
    """Emits what the threads of a warpgroup do; `place` counts them from the first that computes."""

    def __init__(
        self,
        op: AttentionOp,
        shape: HopperBlockShape,
        place: simt.ThreadIndex,
        memory: AttentionSharedMemory,
        output: Tensor,
    ) -> None:
        self.op, self.shape, self.place, self.memory, self.output = op, shape, place, memory, output
        self.group = materialize(hopper_ptx.same_for_warp(T.truncdiv(place.thread, T.int32(hopper_ptx.WARPGROUP))))
        self.key_tiles, self.value_tiles = shape.keys // COLUMNS, padded(shape.v_head_dim) // COLUMNS
        self.probs = registers(shape.keys // 4, "uint32")  # P in 16 bits: four words for 16 keys
        self.words = registers(1, "uint32")
        self.items, self.tiles = registers(1, "int32"), registers(1, "int32")  # how many came before

    def begin(self) -> None:
        set_register(self.items, 0, T.int32(0))
        set_register(self.tiles, 0, T.int32(0))
        # As if the last one had just had its turn: the first may begin.
        with T.If(self.group == self.shape.consumers - 1), T.Then():
            self._pass_token()

    def end(self) -> None:
        """Takes the last token, so that no barrier is left half full."""
        with T.If(self.group == 0), T.Then():
            self._take_token()

    def next_item(self) -> tuple[Expr, Expr]:
        """(head, tile) of the item that the next queries are of, which are waited for; head -1 where there is none."""
        self.memory.queries.wait_full(self.items[0])
        return self.this_item()

    def this_item(self) -> tuple[Expr, Expr]:
        """(head, tile) of the item whose queries are there."""
        return self.memory.item(self.items[0])

    def item(self, scores: ThreadScores, place: Callable[[], tuple[Expr, Expr, Expr]]) -> None:
        """Computes an item, whose queries are there. `place` says (its first row, batch entry, head) when O is written:
        kept until then, they would take registers that tiles need."""
        tiles = KeyTiles(scores.key_range, self.shape.keys)
        before, item = materialize(self.tiles[0]), materialize(self.items[0])
        self.softmax = Softmax(2, self.key_tiles, self.value_tiles, scores)
        self.acc_s, self.acc = self.softmax.acc_s, self.softmax.acc
        self.softmax.begin()
        with T.If(tiles.count > 0), T.Then():
            # 1. The first tile of keys.
            self._take_token()
            self._multiply_keys(before)
            self._pass_token()
            self._wait_keys(0, before)
            self._tile(tiles, scores, T.int32(0), before, None)
            # 2. The others, each with the values of the one before.
            with T.serial(tiles.count - 1) as number:
                turn = materialize(number + 1)
                self._take_token()
                self._multiply_keys(before + turn)
                self._multiply_values(before + number)
                self._pass_token()
                # All but the group begun last, that of the values.
                self._wait_keys(1, before + turn)
                self._tile(tiles, scores, turn, before + turn, before + number)
            # 3. The last values.
            last = materialize(before + tiles.count - 1)
            self._multiply_values(last)
            self._wait_values(last)
        # 4. O / l.
        self._write(*place())
        set_register(self.tiles, 0, before + tiles.count)
        set_register(self.items, 0, item + 1)

    def _query_slot(self) -> Expr:
        """Where the queries lie: computed anew wherever it is asked for, as kept it would take a register."""
        queries = self.memory.queries
        return queries.slot(hopper_ptx.fresh(self.items[0])) if queries.count > 1 else T.int32(0)

    # The token.

    def _take_token(self) -> None:
        if self.shape.head_dim > _WIDEST_IN_TURN:
            return
        # One warpgroup waits here and the one before announces: together they are two.
        hopper_ptx.meet(T.cast(self.group + _TOKEN, "uint32"), 2 * hopper_ptx.WARPGROUP)

    def _pass_token(self) -> None:
        if self.shape.head_dim > _WIDEST_IN_TURN:
            return
        following = T.Select(self.group == self.shape.consumers - 1, T.int32(0), self.group + 1)
        hopper_ptx.announce(T.cast(following + _TOKEN, "uint32"), 2 * hopper_ptx.WARPGROUP)

    # Products.

    def _multiply_keys(self, use: Expr) -> None:
        """Begins S = Q K^T."""
        keys, queries = self.memory.keys, self.memory.queries.tiles
        keys.wait_full(use)
        left = queries.by_rows(self._query_slot(), self.group * hopper_ptx.ROWS)
        right = keys.tiles.by_rows(keys.slot(use))
        hopper_ptx.pin(self.acc_s, self.shape.keys // 2)
        hopper_ptx.products_begin()
        for step in range(padded(self.shape.head_dim) // DEPTH):
            a, b = left + T.uint64(queries.row_step(step)), right + T.uint64(keys.tiles.row_step(step))
            hopper_ptx.multiply_shared(self.acc_s, self.shape.keys, a, b, step > 0, self.op.dtype)
        hopper_ptx.products_end()

    def _multiply_values(self, use: Expr) -> None:
        """Begins O = O + P V, of values that are there."""
        values = self.memory.values
        right = values.tiles.by_columns(values.slot(use))
        self._pin_sums()
        # P must be complete in its registers before the tensor cores read them.
        hopper_ptx.pin(self.probs, self.shape.keys // 4, "uint32")
        hopper_ptx.products_begin()
        for step in range(self.shape.keys // DEPTH):
            b = right + T.uint64(values.tiles.column_step(step))
            hopper_ptx.multiply_registers(self.acc, 8 * self.value_tiles, self.probs, 4 * step, b, self.op.dtype)
        hopper_ptx.products_end()

    def _pin_sums(self) -> None:
        hopper_ptx.pin(self.acc, 4 * self.value_tiles)

    def _wait_keys(self, pending: int, use: Expr) -> None:
        hopper_ptx.products_wait(pending)
        hopper_ptx.pin(self.acc_s, self.shape.keys // 2)
        self.memory.keys.release(use, self.place.lane)

    def _wait_values(self, use: Expr) -> None:
        hopper_ptx.products_wait(0)
        self._pin_sums()
        self.memory.values.release(use, self.place.lane)

    # The softmax.

    def _tile(self, tiles: KeyTiles, scores: ThreadScores, turn: Expr, use: Expr, values: Expr | None) -> None:
        """Scores become probs; `values` is what O is waited for, if it is under way."""
        first_key = tiles.first_key(turn)
        bits_row, hides = tiles.hides(turn, first_key)
        # 1. P and l by the new maximum.
        scores.convert(self.acc_s, self.key_tiles, first_key)
        with T.If(hides), T.Then():
            scores.hide(self.acc_s, self.key_tiles, first_key, bits_row)
        grows = self.softmax.update_max()
        self.softmax.softmax_step()
        # 2. O by it. The values are of use in a moment; that somebody may have to wait for them here keeps the compiler
        #    from waiting for O any earlier, which it would do before the exponentials.
        self.memory.values.wait_full(use)
        if values is not None:
            self._wait_values(values)
            with T.If(grows), T.Then():
                self.softmax.rescale_acc()
        # 3. P as the left operand.
        for step in range(self.shape.keys // DEPTH):
            for i in range(4):
                at = 4 * (2 * step + i // 2) + 2 * (i % 2)
                pack(self.probs, 4 * step + i, self.acc_s[at], self.acc_s[at + 1], self.op.dtype)
        # 4. A prob of zero makes NaN of what is not finite.
        if hides_values(self.op, copied_to_length=False):
            with T.If(hides), T.Then():
                self._look_after_values(scores, first_key, bits_row, use)

    def _look_after_values(self, scores: ThreadScores, first_key: Expr, bits_row: Expr | None, use: Expr) -> None:
        values, threads = self.memory.values, self.shape.consumer_threads
        repair = SharedNonFiniteRepair(values.tiles, self.place.thread, threads, _ALL, self.op.dtype)
        slot = values.slot(use)

        def hide(cells: Expr, tiles: int, part: Expr) -> None:
            scores.hide(cells, tiles, materialize(first_key + part * WORD), bits_row, part)

        with T.If(repair.look_together(slot)), T.Then():
            repair.resolve_together(slot, self.acc, self.shape.keys, hide)

    def _write(self, first_row: Expr, b: Expr, h: Expr) -> None:
        """Writes the rows of O, each divided by its sum, by way of the queries' place in shared memory."""
        hopper_ptx.meet(T.cast(self.group + _GROUP, "uint32"), hopper_ptx.WARPGROUP)  # all are done with their queries
        first = materialize(self.place.warp * simt.ROWS)
        # The addresses below are computed anew for each item: kept, they would take registers that O needs.
        g, q = hopper_ptx.fresh(self.place.g), hopper_ptx.fresh(self.place.q)
        tiles, slot = self.memory.output, self._query_slot()
        for row in range(2):
            part = self.softmax.inverse_row_sum(row)
            number = first + g + 8 * row
            start = materialize(tiles.row_start(slot, number) + T.cast(4 * q, "uint32"), "uint32")
            for n in range(self.value_tiles):
                low, high = (self.acc[cell(row, self.value_tiles, n, e)] * part for e in range(2))
                pack(self.words, 0, low, high, self.op.dtype)
                simt.store(start + tiles.chunk_in_row(n, g), [self.words[0]])
        # First each lane's own writes, then all of the warp's: one lane stores for all.
        hopper_ptx.fence_for_engines()
        simt.warp_barrier()
        with T.If(self.place.lane == 0), T.Then():
            tiles.store(slot, first, self.output, first_row + first, h, b)
            hopper_ptx.wait_stores()
        # By lane 0, which has waited for the store: the place takes the next queries.
        self.memory.queries.release(self.items[0], self.place.lane)

"""One block of decode: a share of all keys, a part of a head after another.

    for each part, its K and V copied ahead through a ring of each warp's own:
        each warp, for every so manieth tile of its keys:   S = Q K^T;  m, l, O as in `results`
        the warps' results are put together
        a whole head:  Y = O / l, zeros where nothing was visible (l = 0);  else m, l and O go to the workspace

The warps of a block wait for each other at the end of a part only, and each lane only for its own copies: as many bytes
are under way as the rings hold.
"""

from __future__ import annotations

from typing import Any

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.key_range import BlockKeyRange
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores, thread_parts
from mhsa_compile.kernels.cuda.decode.block_shape import WORD, DecodeBlockShape
from mhsa_compile.kernels.cuda.decode.results import CHUNK, Area, DecodeArrays
from mhsa_compile.kernels.cuda.decode.split_kv import CudaSplitKv, SplitPart
from mhsa_compile.kernels.cuda.decode.warp_fp32 import SimtWarp
from mhsa_compile.kernels.cuda.decode.warp_mma import TensorWarp
from mhsa_compile.kernels.cuda.primitives import smem_pipeline
from mhsa_compile.kernels.cuda.primitives.simt import ThreadIndex, barrier, materialize, store, warp_barrier
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import Element, SharedTiles


class DecodeBlock:
    """Emits one block, number `share`."""

    def __init__(
        self, shape: DecodeBlockShape, place: ThreadIndex, share: Expr, shares: CudaSplitKv, arrays: DecodeArrays
    ) -> None:
        self.shape, self.place, self.share, self.shares, self.arrays = shape, place, share, shares, arrays
        op = self.op = arrays.op
        self.ratio = op.num_heads // op.num_kv_heads
        # Of the one dtype that all its views have: TVM gives the whole another one's, and leaves its count as it was.
        self.element_bytes = shape.key_form.size
        self.pool = T.alloc_buffer((shape.shared_bytes // self.element_bytes,), op.dtype, scope="shared.dyn")
        slots = shape.warps * shape.stages
        self.keys = SharedTiles(self.pool, 0, slots, shape.keys, shape.key_form)
        self.values = SharedTiles(self.pool, self.keys.end, slots, shape.keys, shape.value_form)
        queries = None
        if shape.shares_queries:
            queries = SharedTiles(self.pool, shape.queries_byte, 1, shape.query_rows, shape.query_form)
        warp: Any = SimtWarp if shape.is_wide else TensorWarp
        self.warp = warp(shape, place, self.keys, self.values, queries)
        self.area = Area(shape, self._word, place.warp)

    def emit(self) -> None:
        self.shares.each_part(self.share, self._attend)

    def _attend(self, part: SplitPart) -> None:
        shape = self.shape
        op = self.op
        sources = (
            self.arrays.element(op.key, op.head_dim, part.b, part.g),
            self.arrays.element(op.value, op.v_head_dim, part.b, part.g),
        )
        scores = self._scores(part)
        count = materialize(part.end - part.first)
        # 1. The rings full but for one tile, and Q.
        for turn in range(shape.stages - 1):
            self._copy(part, sources, T.int32(turn), count)
        self.warp.begin(self._queries(part), scores)
        if shape.shares_queries:
            barrier()
        # 2. One tile of the warp's after the other.
        with T.serial(count) as turn:
            slot, first_key = self._slot(turn), materialize(self._first_key(part, turn))
            hides = materialize(T.Not(scores.key_range.visible_to_all(first_key, shape.keys)), "bool")
            # One group of copies a turn; those of the tiles behind this one may still be under way.
            smem_pipeline.wait(shape.stages - 2)
            if shape.hides_values:
                with T.If(hides), T.Then():
                    self.warp.look(slot)
            warp_barrier()  # all lanes' copies of this tile have arrived, and all are done with the tile before
            self._copy(part, sources, turn + (shape.stages - 1), count)
            self.warp.visit(slot, first_key, hides, scores)
        # 3. The results of all warps, where their tiles were.
        barrier()
        # Behind a barrier: the results take the place of tiles that other warps may still read.
        self.warp.hand_over(self.area)
        barrier()
        self._write(part)
        barrier()

    def _scores(self, part: SplitPart) -> ThreadScores:
        """The scores of the rows of this thread: row r is query r / ratio of head r % ratio."""
        assert isinstance(self.op.q_length, int)
        L = self.op.q_length
        queries, heads = zip(*(self._row(part, row) for row in self.warp.rows), strict=True)
        b = T.cast(part.b, "int64")
        cells = self.warp.cells(T.And(self.place.warp == 0, part.begins))
        parts = thread_parts(self.arrays.arguments, b, heads)
        key_range = BlockKeyRange(self.op, T.int32(0), L, T.int32(L), part.entry.kv_length, None)
        return ThreadScores(key_range, cells, queries, parts)

    def _row(self, part: SplitPart, row: Expr) -> tuple[Expr, Expr]:
        """(query, head) of a row."""
        ratio = T.int32(self.ratio)
        query, head = T.truncdiv(row, ratio), part.g * self.ratio + T.truncmod(row, ratio)
        return materialize(query), materialize(T.cast(head, "int64"), "int64")

    def _queries(self, part: SplitPart) -> Element:
        """Elements of Q by row."""
        op = self.op

        def element(row: Expr, column: Expr) -> Expr:
            query, head = self._row(part, row)
            return self.arrays.element(op.query, op.head_dim, part.b, head)(query, column)

        return element

    # Copies.

    def _first_key(self, part: SplitPart, turn: Expr) -> Expr:
        tile = (part.first + turn) * self.shape.warps + self.place.warp
        return part.entry.first_key + tile * self.shape.keys

    def _slot(self, turn: Expr) -> Expr:
        stages = self.shape.stages
        return materialize(self.place.warp * stages + T.truncmod(turn, T.int32(stages)))

    def _copy(self, part: SplitPart, sources: tuple[Element, Element], turn: Expr, count: Expr) -> None:
        """Begins to copy the warp's tile of this turn, if there is one."""
        with T.If(turn < count), T.Then():
            slot, first = self._slot(turn), materialize(self._first_key(part, turn))
            for tiles, source in zip((self.keys, self.values), sources, strict=True):
                tiles.copy(slot, source, first, part.entry.end_key, self.place.lane, 32)
        # Outside of the branch: an empty group counts too, so `wait` means the same in every turn.
        smem_pipeline.commit()

    # Results.

    def _word(self, word: Expr) -> Expr:
        """The address of a word of the memory that the rings had."""
        return T.address_of(self.pool[word * (WORD // self.element_bytes)])

    def _write(self, part: SplitPart) -> None:
        """Writes a part's rows, each thread some chunks of them: Y, or what `results.combine` makes Y of."""
        chunks = self.shape.v_head_dim // CHUNK
        total, threads = self.shape.rows * chunks, self.shape.threads
        # Two results of a share at most: of a head that another one began, and of one that it begins.
        slot = materialize(2 * self.share + T.Select(part.begins, T.int32(1), T.int32(0)))
        whole = materialize(T.And(part.begins, part.ends), "bool")
        with T.serial(T.int32(-(-total // threads))) as turn:
            number = materialize(self.place.thread + turn * threads)
            with T.If(number < total), T.Then():
                row = materialize(T.truncdiv(number, T.int32(chunks)))
                column = materialize(T.truncmod(number, T.int32(chunks)) * CHUNK)
                row_max, row_sum, sums = self.area.merge(row, column, CHUNK)
                with T.If(whole):
                    with T.Then():
                        query, head = self._row(part, row)
                        self.arrays.write(part.b, head, query, column, row_sum, sums)
                    with T.Else():
                        at = [T.cast(slot, "int64"), T.cast(row, "int64")]
                        place = self.arrays.workspace[(*at, T.cast(column, "int64"))]
                        store(T.address_of(place), sums, "global")
                        with T.If(column == 0), T.Then():
                            place = self.arrays.workspace[(*at, T.int64(self.shape.v_head_dim))]
                            store(T.address_of(place), [row_max, row_sum], "global")

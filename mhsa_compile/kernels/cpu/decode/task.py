"""The arithmetic of one decode task: the few queries that share a key/value head, against a stretch of its keys.

    for each block of keys:   s = q K^T;  m' = max(m, s);  p = 2^(s - m');  l = l 2^(m - m') + sum p
                              o = o 2^(m - m') + p V
    out: o / l, or o, m and l for others to combine

Every key and value is read from memory once for all queries, in long runs that the processor's own prefetching
follows: blocks are as large as the L2 cache allows. A block that all queries see wholly takes a path without masks.
Sources: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); splitting the keys, Dao et al., Flash-Decoding,
2023 (pytorch.org/blog/flash-decoding).
"""

from __future__ import annotations

import math
import operator
from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.common.score_scale import score_factor
from mhsa_compile.kernels.cpu.decode.output_accumulator import MASKED, ValueSums
from mhsa_compile.kernels.cpu.decode.query_key import PackedQueries, ScoreLayout
from mhsa_compile.kernels.cpu.decode.row_scales import RowScales
from mhsa_compile.kernels.cpu.decode.tile_scores import TileQueries
from mhsa_compile.kernels.cpu.decode.work import Heads, Span
from mhsa_compile.kernels.cpu.formats.choice import prefetch_row
from mhsa_compile.kernels.cpu.score_parts import FadingPart, row_parts
from mhsa_compile.kernels.cpu.simd import vector_math
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, constant, let, load, materialize, splat, store
from mhsa_compile.kernels.interface import score_step
from mhsa_compile.kernels.interface.kernel import Config

LONGEST_SUM_OF_WEIGHTS = 16
"""Vectors of probs that one float32 sum takes one after another. Of a row of equal probs each addition is rounded
the same way: of 197 the error of such rows was four times PyTorch's."""


class DecodeTask:
    """One decode task. Scratch is allocated where the task is constructed: inside the loop over tasks, so per
    thread."""

    def __init__(
        self,
        arguments: AttentionArguments,
        config: Config,
        layout: ScoreLayout,
        kv_length: Expr,
        span: Span,
        heads: Heads,
    ) -> None:
        op = arguments.op
        assert isinstance(op.q_length, int)
        self.op, self.config, self.lanes = op, config, layout.lanes
        self.kv_length, self.span, self.heads = kv_length, span, heads
        self.ratio = op.num_heads // op.num_kv_heads
        self.rows = op.q_length * self.ratio
        self.layout = layout
        # Whole groups, so that only the last block of a part can need clamps.
        self.keys = layout.whole_groups(config["keys"])
        self.parts = row_parts(arguments, heads.entry, heads.first_head, layout, kv_length)

        queries = TileQueries if layout.tiles else PackedQueries
        self.queries = queries(layout, op.head_dim, score_factor(op))
        self.key_scales = RowScales(heads.key, layout, self.keys)
        self.value_scales = RowScales(heads.value, layout, self.keys)
        self.scores = T.alloc_buffer((self.keys * layout.padded_rows,), "float32")  # then the probs
        for part in self.parts:
            part.allocate(self.keys)
        self.fading = next((part for part in self.parts if isinstance(part, FadingPart)), None)
        self.row_max = T.alloc_buffer((layout.padded_rows * layout.keys_per_vector,), "float32")
        self.row_sum = T.alloc_buffer((layout.padded_rows * layout.keys_per_vector,), "float32")
        self.rescale = T.alloc_buffer((layout.padded_rows * layout.keys_per_vector,), "float32")
        self.values = ValueSums(op, config, layout, heads, self.scores, self.rescale)
        self.blind = any(part.masked for part in self.parts)
        self.masks = self.blind or op.any_step("counts_keys") or op.window is not None or not self._divides_into_groups
        self.bounds: tuple[Expr, Expr] | None = None

    @property
    def _divides_into_groups(self) -> bool:
        return isinstance(self.op.kv_length, int) and self.op.kv_length % self.layout.group == 0

    def attend(self, first: Expr, end: Expr, begins: Expr) -> None:
        """Keys `first` to before `end`: fills accumulator, row_max and row_sum. The part of a head's keys that `begins`
        takes the scores of no key."""
        self._pack_queries()
        for part in self.parts:
            part.prepare()
        self._clear()
        self._begin_with_no_keys(begins)
        self.values.end = end
        if len(self.span.low) > 1:
            self._write_bounds()
        low, high = self.span.visible_to_all
        with T.serial(materialize(ceil_div(T.max(T.int64(0), end - first), self.keys))) as block:
            begin = materialize(first + block * self.keys)
            count = materialize(T.min(T.int64(self.keys), end - begin))
            if not self.masks:
                self._visit(begin, count, masked=False)
            elif self.blind:
                self._visit(begin, count, masked=True)
            else:
                whole = T.And(begin >= low, begin + count <= high)
                # Without masks no row is clamped either: a last group that is not whole would read too far.
                is_grouped = T.truncmod(count, T.int64(self.layout.group)) == 0
                with T.If(T.And(whole, is_grouped)):
                    with T.Then():
                        self._visit(begin, count, masked=False)
                    with T.Else():
                        self._visit(begin, count, masked=True)
        # Until now each lane summed its own keys; from here on all lanes of a row have its sum.
        for vector in range(self.layout.row_vectors):
            at = [T.int64(vector * self.lanes)]
            store(self.row_sum, at, self.layout.over_keys(load(self.row_sum, at, self.lanes), operator.add), self.lanes)

    def _pack_queries(self) -> None:
        with T.serial(T.int64(self.rows)) as row:
            query, head = self.query_and_head(row)
            self.queries.pack(row, self.heads.query(head), query)

    def query_and_head(self, row: Expr) -> tuple[Expr, Expr]:
        """(the query, the query head within the group) of a row."""
        return materialize(T.truncdiv(row, T.int64(self.ratio))), materialize(T.truncmod(row, T.int64(self.ratio)))

    def _clear(self) -> None:
        for vector in range(self.layout.row_vectors):
            at = [T.int64(vector * self.lanes)]
            store(self.row_max, at, constant(-math.inf, self.lanes), self.lanes)
            store(self.row_sum, at, constant(0.0, self.lanes), self.lanes)
        self.values.clear()

    def _begin_with_no_keys(self, begins: Expr) -> None:
        """Begins rows with their scores of no key, where there are any: a maximum with a sum of 1, in one part of a
        head only."""
        if (no_key_of := score_step.first(part.no_keys() for part in self.parts)) is None:
            return
        with T.serial(T.int64(self.layout.rows)) as row:
            score = no_key_of(materialize(T.truncmod(row, T.int64(self.ratio))))
            score = materialize(T.Select(begins, score, T.float32(-math.inf)), "float32")
            for key in range(self.layout.keys_per_vector):
                T.buffer_store(self.row_max, score, [row + key * self.layout.padded_rows])
            T.buffer_store(self.row_sum, T.float32(1), [row])  # 2^-inf of any other maximum where there is none

    def _write_bounds(self) -> None:
        """The interval of each lane's row, as int32."""
        size = self.layout.padded_rows * self.layout.keys_per_vector
        self.bounds = (T.alloc_buffer((size,), "int32"), T.alloc_buffer((size,), "int32"))
        for lane in range(size):
            # Rows of padding repeat the last query's bounds.
            query = min(lane % self.layout.padded_rows // self.ratio, len(self.span.low) - 1)
            for buffer, ends in zip(self.bounds, (self.span.low, self.span.high), strict=True):
                T.buffer_store(buffer, T.cast(ends[query], "int32"), [T.int64(lane)])

    def _visit(self, begin: Expr, count: Expr, masked: bool) -> None:
        """One block; `count` is a whole number of groups unless `masked`."""
        if masked:
            for part in self.parts:
                part.read_block(begin, count)
        self.key_scales.read(begin, count)
        self.value_scales.read(begin, count)
        self._score(begin, count, masked)
        self._weigh(begin, count, masked)
        self.values.add(begin, count, partial(self._unmask_visible, begin, count) if masked else None)

    def _score(self, begin: Expr, count: Expr, masked: bool) -> None:
        """scores = q K^T, and rescale (for now) their maximum over the block in each lane. (Of a bias that moves only
        the maximum knows.)"""
        layout, lanes = self.layout, self.lanes
        largest, fading = RegisterTile(layout.row_vectors, [(0, lanes)]), self.fading
        distances = None if fading is None else fading.distances()
        largest.fill(-math.inf)
        with T.serial(ceil_div(count, layout.group)) as group:
            base = materialize(group * layout.group)
            rows = [begin + base + i for i in range(layout.group)]
            if masked:  # beyond the last key the last one is read again; what it gives is masked
                rows = [materialize(T.min(row, self.kv_length - 1)) for row in rows]
            number = layout.asked_for(group, self.keys // layout.group)
            self._prefetch_values(materialize(begin + number * layout.group))
            for vector in range(layout.row_vectors):
                for i, score in enumerate(self.queries.scores(rows, self.heads.key, vector, apart=masked)):
                    key = base + i * layout.keys_per_vector
                    score = self.key_scales.scaled(score, key)
                    for part in self.parts:
                        score = part.score(score, begin + key, vector)
                    if masked:
                        score = let(self._mask_score(score, begin, key, vector))
                    store(self.scores, [layout.place(key, vector)], score, lanes)
                    if fading is None or distances is None:
                        largest.set(vector, 0, T.max(largest.get(vector, 0), score))
                    else:
                        fading.keep_larger(largest, distances, score, begin + key, vector)
        for vector in range(layout.row_vectors):
            store(self.rescale, [T.int64(vector * lanes)], largest.get(vector, 0), lanes)
        if fading is not None and distances is not None:
            fading.keep_distances(distances)

    def _prefetch_values(self, first: Expr) -> None:
        """Asks for the values of a group of keys, which are multiplied once all scores of the block are there: memory
        would have a rest until then."""
        value = self.heads.value
        for row in range(self.layout.group):
            prefetch_row(value, first + row, T.int64(0), self.op.v_head_dim, soon=False)

    def _mask_score(self, score: Expr, begin: Expr, key: Expr, vector: int) -> Expr:
        """-inf where a lane's row does not see its key: a select, so that NaN cannot pass."""
        lanes, minus_infinity = self.lanes, constant(-math.inf, self.lanes)
        for part in self.parts:
            score = part.hide(score, begin, key, vector)
        keys = splat(T.cast(begin + key, "int32"), lanes) + self.layout.key_of_lane()
        if self.bounds is None:
            return T.Select(keys < splat(T.cast(self.span.stop, "int32"), lanes), score, minus_infinity)
        low, high = (load(buffer, [T.int64(vector * lanes)], lanes) for buffer in self.bounds)
        return T.Select(T.And(keys >= low, keys < high), score, minus_infinity)

    def _weigh(self, begin: Expr, count: Expr, masked: bool) -> None:
        """scores become p = 2^(s - m); row_max, row_sum and rescale = 2^(old m - m) follow the new maximum."""
        layout, lanes = self.layout, self.lanes
        for vector in range(layout.row_vectors):
            at = [T.int64(vector * lanes)]
            old = let(load(self.row_max, at, lanes))
            in_lanes = load(self.rescale, at, lanes)
            top = layout.over_keys(in_lanes, T.max)
            loss = None if self.fading is None else self.fading.move(old, in_lanes, top, vector)
            largest = let(T.max(old, top) if loss is None else T.Select(top > old, top - loss, old))
            store(self.row_max, at, largest, lanes)
            if masked:
                # Without masks every row has seen a key.
                largest = let(zero_if_unseen(largest, lanes))
            factor = let(vector_math.exp2(old - largest if loss is None else old - largest - loss, lanes))
            # In the place of the block's maxima, which are of no more use.
            store(self.rescale, at, factor, lanes)
            store(self.row_sum, at, load(self.row_sum, at, lanes) * factor, lanes)
            groups = materialize(layout.group // layout.keys_per_vector * ceil_div(count, layout.group))
            with T.serial(ceil_div(groups, LONGEST_SUM_OF_WEIGHTS)) as part:
                start = materialize(part * LONGEST_SUM_OF_WEIGHTS)
                total = RegisterTile(1, [(0, lanes)])
                total.fill(0.0)
                with T.serial(start, materialize(T.min(groups, start + LONGEST_SUM_OF_WEIGHTS))) as index:
                    total.set(0, 0, total.get(0, 0) + self._prob(begin, index, vector, largest, masked))
                store(self.row_sum, at, load(self.row_sum, at, lanes) + total.get(0, 0), lanes)

    def _prob(self, begin: Expr, index: Expr, vector: int, largest: Expr, masked: bool) -> Expr:
        """Vector `index` of the block's scores becomes probs, which are returned; in their place lie what rows of V are
        multiplied by, with the scales of these."""
        layout, lanes = self.layout, self.lanes
        key = index * layout.keys_per_vector
        place = [layout.place(key, vector)]
        score = let(load(self.scores, place, lanes))
        logit = score if self.fading is None else self.fading.biased(score, begin + key, vector)
        prob = vector_math.exp2(logit - largest, lanes)
        factor = self.value_scales.scaled(let(prob), key)
        if masked:
            # By the score: a prob of 0 may also be one that underflowed, whose NaN counts.
            hidden = score == constant(-math.inf, lanes)
            prob, factor = (T.Select(hidden, constant(MASKED, lanes), value) for value in (prob, factor))
        store(self.scores, place, let(factor), lanes)
        return let(prob)

    def _unmask_visible(self, begin: Expr, count: Expr) -> None:
        """Probs of keys whose scores are -inf by what Q and K hold, which no mask hides, count: as 0, not MASKED."""
        layout, lanes = self.layout, self.lanes
        for vector in range(layout.row_vectors):
            with T.serial(materialize(layout.group // layout.keys_per_vector * ceil_div(count, layout.group))) as index:
                key = materialize(index * layout.keys_per_vector)
                score, place = constant(0.0, lanes), [layout.place(key, vector)]
                for part in self.parts:
                    score = part.score(score, begin + key, vector)
                hidden = let(self._mask_score(score, begin, key, vector)) == constant(-math.inf, lanes)
                prob, zero = let(load(self.scores, place, lanes)), constant(0.0, lanes)
                store(self.scores, place, T.Select(T.Or(hidden, prob != zero), prob, zero), lanes)


def zero_if_unseen(largest: Expr, lanes: int) -> Expr:
    """The maximum of a row, 0 where it has seen nothing: -inf - -inf is not a number."""
    return T.Select(largest == constant(-math.inf, lanes), constant(0.0, lanes), largest)

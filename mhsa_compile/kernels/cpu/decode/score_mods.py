"""What decode's scores are besides products, row by row: the softcap, ALiBi's share of the distance, and the sinks.

As in `attention/score_mods`, the distances of a row are counted from its origin, which begins at its place and moves
with its maximum: to the very key, once a block of scores is known. So scores wait without their bias until they are
weighed.
"""

from __future__ import annotations

import math

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.attention.inputs import capped, place_of
from mhsa_compile.kernels.cpu.decode.query_key import ScoreLayout
from mhsa_compile.kernels.cpu.decode.work import Heads
from mhsa_compile.kernels.cpu.simd.vectors import (
    Expr,
    RegisterTile,
    constant,
    let,
    load,
    materialize,
    splat,
    store,
)
from mhsa_compile.kernels.interface.ops import AttentionOp


class RowTerms:
    """What is added to the scores of the rows of one task. A row is (query, query head within the group)."""

    def __init__(self, op: AttentionOp, layout: ScoreLayout, kv_length: Expr, heads: Heads) -> None:
        self.op, self.layout, self.kv_length, self.heads = op, layout, kv_length, heads
        self.lanes, self.ratio = layout.lanes, op.num_heads // op.num_kv_heads
        self.size = layout.padded_rows * layout.keys_per_vector  # the lanes of a key, or of a vector of keys
        # distance = first key of the vector + offset; and the distance of the largest score of a block in each lane
        self.slopes, self.offsets, self.largest = (
            T.alloc_buffer((self.size,), "float32") if op.slopes else None for _ in range(3)
        )

    def prepare(self) -> None:
        """Reads the slopes of the rows."""
        if self.slopes is None:
            return
        for first in range(0, self.size, self.lanes):
            for buffer in (self.slopes, self.offsets):  # rows of padding have none
                store(buffer, [T.int64(first)], constant(0.0, self.lanes), self.lanes)
        assert isinstance(self.op.q_length, int)
        first_place = T.cast(place_of(self.op, T.int64(0), self.op.q_length, self.kv_length), "int32")
        with T.serial(T.int64(self.layout.rows)) as row:
            place = materialize(first_place + T.cast(T.truncdiv(row, T.int64(self.ratio)), "int32"), "int32")
            slope = self.heads.slope(self._head(row))
            # The distance of a vector's lanes differs by their own key's place in it.
            for key in range(self.layout.keys_per_vector):
                at = [row + key * self.layout.padded_rows]
                T.buffer_store(self.slopes, slope, at)
                T.buffer_store(self.offsets, T.cast(key - place, "float32"), at)

    def capped(self, score: Expr) -> Expr:
        """A vector of products as scores in units of log2, without their bias."""
        score = capped(self.op, score, self.lanes)
        return score if self.slopes is None else let(score)

    def largest_distances(self) -> RegisterTile | None:
        """The distances that `keep_larger` replaces, zeros at the begin of a block; None where there are no slopes."""
        if self.slopes is None:
            return None
        distances = RegisterTile(self.layout.row_vectors, [(0, self.lanes)])
        distances.fill(0.0)
        return distances

    def keep_larger(
        self, largest: RegisterTile, distances: RegisterTile | None, score: Expr, key: Expr, vector: int
    ) -> None:
        """largest = max(largest, score with its bias), and `distances` of the keys they belong to. `key` is the first
        key of the vector among all."""
        if distances is None:
            return largest.set(vector, 0, T.max(largest.get(vector, 0), score))
        distance, so_far = let(self._distance(key, vector)), let(largest.get(vector, 0))
        score = let(score + self._slope(vector) * distance)
        distances.set(vector, 0, T.Select(score > so_far, distance, distances.get(vector, 0)))
        largest.set(vector, 0, T.max(so_far, score))

    def keep_distances(self, distances: RegisterTile | None) -> None:
        if distances is not None:
            for vector in range(self.layout.row_vectors):
                store(self.largest, self._at(vector), distances.get(vector, 0), self.lanes)

    def move(self, old: Expr, in_lanes: Expr, top: Expr, vector: int) -> Expr | None:
        """Moves the origin of a row to the key of a block's maximum `top`, where the row's maximum `old` is less;
        `in_lanes` are the block's maxima lane by lane. Gives what the scores of each row lose by it, None where nothing
        moves."""
        if self.slopes is None:
            return None
        at, lanes = self._at(vector), self.lanes
        distance = T.Select(in_lanes == top, load(self.largest, at, lanes), constant(-math.inf, lanes))
        distance = self.layout.over_keys(materialize(distance, "float32", lanes), T.max)
        distance = materialize(T.Select(top > old, distance, constant(0.0, lanes)), "float32", lanes)
        store(self.offsets, at, load(self.offsets, at, lanes) - distance, lanes)
        return materialize(self._slope(vector) * distance, "float32", lanes)

    def biased(self, score: Expr, key: Expr, vector: int) -> Expr:
        """A vector of scores with their bias; `key` is its first key among all."""
        return score if self.slopes is None else score + self._slope(vector) * self._distance(key, vector)

    def origin(self, row: Expr) -> Expr:
        """The key from which a row's distances are counted, where there are slopes."""
        assert self.offsets is not None
        return T.float32(0) - self.offsets[row]

    def begin(self, row_max: Expr, row_sum: Expr, whether: Expr) -> None:
        """Begins rows with their sinks, where there are any, a maximum with a sum of 1; in one part of a head only."""
        if not self.op.sinks:
            return
        with T.serial(T.int64(self.layout.rows)) as row:
            sink = materialize(T.Select(whether, self.heads.sink(self._head(row)), T.float32(-math.inf)), "float32")
            for key in range(self.layout.keys_per_vector):
                T.buffer_store(row_max, sink, [row + key * self.layout.padded_rows])
            T.buffer_store(row_sum, T.float32(1), [row])  # 2^-inf of any other maximum where there is none

    def _at(self, vector: int) -> list[Expr]:
        return [T.int64(vector * self.lanes)]

    def _slope(self, vector: int) -> Expr:
        return load(self.slopes, self._at(vector), self.lanes)

    def _distance(self, key: Expr, vector: int) -> Expr:
        number = splat(materialize(T.cast(key, "float32"), "float32"), self.lanes)
        return number + load(self.offsets, self._at(vector), self.lanes)

    def _head(self, row: Expr) -> Expr:
        return materialize(T.truncmod(row, T.int64(self.ratio)))

"""What decode's scores are besides products, row by row: the softcap, ALiBi's share of the distance, and the sinks."""

from __future__ import annotations

import math

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.decode_scores import ScoreLayout
from mhsa_compile.kernels.cpu.decode_work import Heads
from mhsa_compile.kernels.cpu.operands import capped, last_seen, place_of
from mhsa_compile.kernels.cpu.vectors import Expr, bind, constant, load, settle, splat, store
from mhsa_compile.kernels.operations import AttentionOp


class RowTerms:
    """Of the rows of one task. A row is (query, query head within the group)."""

    def __init__(self, op: AttentionOp, layout: ScoreLayout, kv_length: Expr, heads: Heads) -> None:
        self.op, self.layout, self.kv_length, self.heads = op, layout, kv_length, heads
        self.lanes, self.ratio = layout.lanes, op.num_heads // op.num_kv_heads
        self.size = layout.padded_rows * layout.keys_per_vector  # the lanes of a key, or of a vector of keys
        # slope * distance = slope * (first key of the vector + offset), counted as in `attention_scores`; and what the
        # scores of a row lack for that
        self.slopes, self.offsets, self.shifts = (
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
            place = settle(first_place + T.cast(T.truncdiv(row, T.int64(self.ratio)), "int32"), "int32")
            origin = settle(last_seen(self.op, place, T.cast(self.kv_length, "int32"), 1), "int32")
            slope = self.heads.slope(self._head(row))
            T.buffer_store(self.shifts, slope * T.cast(origin - place, "float32"), [row])
            for key in range(self.layout.keys_per_vector):
                at = [row + key * self.layout.padded_rows]
                T.buffer_store(self.slopes, slope, at)
                T.buffer_store(self.offsets, T.cast(key - origin, "float32"), at)

    def finish(self, score: Expr, key: Expr, vector: int) -> Expr:
        """A vector of products, its first key number `key` of all, as scores in units of log2."""
        score = capped(self.op, score, self.lanes)
        if self.slopes is None:
            return score
        slopes, offsets = (load(b, [T.int64(vector * self.lanes)], self.lanes) for b in (self.slopes, self.offsets))
        return score + slopes * (splat(bind(T.cast(key, "float32")), self.lanes) + offsets)

    def begin(self, row_max: Expr, row_sum: Expr, whether: Expr) -> None:
        """Where there are sinks, rows begin with theirs, a maximum with a sum of 1; in one part of a head only."""
        if not self.op.sinks:
            return
        with T.serial(T.int64(self.layout.rows)) as row:
            sink = self.heads.sink(self._head(row))
            if self.shifts is not None:
                sink = sink - self.shifts[row]
            sink = settle(T.Select(whether, sink, T.float32(-math.inf)), "float32")
            for key in range(self.layout.keys_per_vector):
                T.buffer_store(row_max, sink, [row + key * self.layout.padded_rows])
            T.buffer_store(row_sum, T.float32(1), [row])  # 2^-inf of any other maximum where there is none

    def _head(self, row: Expr) -> Expr:
        return settle(T.truncmod(row, T.int64(self.ratio)))

"""The two products of an attention task, S^T = K Q^T and P V, and the scratch in which their operands wait.

The scores are computed transposed. Q^T is packed once per task, so rows of K are read as scalars to broadcast; the
queries lie along the vector lanes, so that statistics are plain vertical operations; and P^T comes out just as P V
wants it: as scalars again, against rows of V.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.base import AttentionOp
from mhsa_compile.kernels.cpu import vectors
from mhsa_compile.kernels.cpu.vectors import (
    DTYPE_BYTES,
    Chunk,
    Expr,
    RegisterTile,
    bind,
    constant,
    load,
    prefetch,
    settle,
    store,
)

CACHE_LINE = 64  # bytes, on every machine here


@dataclass(frozen=True)
class HeadView:
    """One head of one operand, read in place: `buffer[at(row, column)]` is an element."""

    buffer: Expr
    at: Callable[[Expr, Expr], list[Expr]]


@dataclass(frozen=True)
class Operands:
    """Q, K and V of one task: `queries` rows of Q from `first_query` on, the last one repeated beyond the end."""

    op: AttentionOp
    query: HeadView
    key: HeadView
    value: HeadView
    first_query: Expr
    q_length: Expr
    kv_length: Expr

    def query_rows(self, first: int, count: int) -> list[Expr]:
        """Rows first .. first + count of the tile, each clamped to the last; those beyond are never written out."""
        last = self.q_length - 1
        return [settle(T.min(self.first_query + (first + i), last)) for i in range(count)]

    def _prefetch_row(self, view: HeadView, width: int, row: Expr) -> None:
        for column in range(0, width, CACHE_LINE // DTYPE_BYTES[self.op.dtype]):
            prefetch(view.buffer, view.at(row, T.int64(column)))

    def prefetch(self, keys: list[Expr]) -> None:
        """Asks for the rows of K that come after `keys`, and for the rows of V that P V will want of them.

        Where heads lie side by side, every row is in a page of its own, which no hardware prefetcher foresees.
        """
        for row in keys:
            self._prefetch_row(self.key, self.op.head_dim, row + len(keys))
            self._prefetch_row(self.value, self.op.v_head_dim, row)


class Float32Products:
    """Both products in float32, K and V read in place.

    q_t (E, queries) is Q^T times `scale`; weights (keys, queries) is P^T.
    """

    keys_a_step = 1
    """Keys that one step of P V takes."""
    scales_queries = True
    """Whether the scores come out scaled."""

    def __init__(self, operands: Operands, queries: int, keys: int, lanes: int, scale: float) -> None:
        self.operands, self.queries, self.lanes, self.scale = operands, queries, lanes, scale
        self.query_columns = vectors.chunks(queries, lanes)
        self.q_t = T.alloc_buffer((operands.op.head_dim, queries), "float32")
        self.weights = T.alloc_buffer((keys, queries), "float32")

    def pack_queries(self) -> None:
        """q_t[e, i] = Q[i, e] * scale, a square of lanes x lanes at a time."""
        query, head_dim = self.operands.query, self.operands.op.head_dim
        for first_lane, lanes in self.query_columns:
            rows = self.operands.query_rows(first_lane, lanes)
            whole = head_dim // lanes * lanes
            with T.serial(T.int64(whole // lanes)) as square:
                columns = [load(query.buffer, query.at(row, square * lanes), lanes) for row in rows]
                scaled = [bind(column * constant(self.scale, lanes)) for column in columns]
                for e, column in enumerate(vectors.transpose(scaled)):
                    store(self.q_t, [square * lanes + e, T.int64(first_lane)], column, lanes)
            for e in range(whole, head_dim):
                for i, row in enumerate(rows):
                    element = load(query.buffer, query.at(row, T.int64(e)), 1) * T.float32(self.scale)
                    store(self.q_t, [T.int64(e), T.int64(first_lane + i)], element, 1)

    def score(self, tile: RegisterTile, keys: list[Expr]) -> None:
        """tile[r, c] = K[keys[r]] Q^T, over the tile's own columns of queries."""
        key = self.operands.key
        self.operands.prefetch(keys)
        tile.fill(0.0)
        with T.serial(T.int64(self.operands.op.head_dim)) as e:
            tile.outer_product(
                lambda r: load(key.buffer, key.at(keys[r], e), 1),
                lambda c: load(self.q_t, [e, T.int64(tile.columns[c][0])], tile.columns[c][1]),
            )

    def keep_weights(self, base: Expr, column: Chunk, weights: list[Expr]) -> None:
        """Keeps the weights of keys base, base + 1, ... of the block, for the queries of one column."""
        first, lanes = column
        for r, weight in enumerate(weights):
            store(self.weights, [base + r, T.int64(first)], weight, lanes)

    def weight(self, key: Expr, query: Expr) -> Expr:
        """One weight that was kept."""
        return self.weights[key, query]

    def rescale_weights(self, count: Expr, factors: Expr) -> None:
        """Multiplies the weights of the block's first `count` keys by the factor of each query."""
        with T.serial(count) as j:
            for first, lanes in self.query_columns:
                at = [j, T.int64(first)]
                factor = load(factors, [T.int64(first)], lanes)
                store(self.weights, at, load(self.weights, at, lanes) * factor, lanes)

    def take_values(self, first_key: Expr, count: Expr) -> None:
        """Makes the block's rows of V ready for `add_values`: here they are."""

    def add_values(
        self, tile: RegisterTile, base: Expr, group: list[Chunk], first_key: Expr, first: Expr, end: Expr
    ) -> None:
        """tile[r, c] += P[base + r, first:end] V[first_key + first : first_key + end, group[c]]."""
        value = self.operands.value
        with T.serial(first, end) as j:
            tile.outer_product(
                lambda r: load(self.weights, [j, base + r], 1),
                lambda c: load(value.buffer, value.at(first_key + j, T.int64(group[c][0])), group[c][1]),
            )

    def value(self, first_key: Expr, key: Expr, column: Chunk) -> Expr:
        """A vector of V's row `key` of the block."""
        view = self.operands.value
        return load(view.buffer, view.at(first_key + key, T.int64(column[0])), column[1])

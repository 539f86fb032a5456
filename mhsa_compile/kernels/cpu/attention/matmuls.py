"""The two products of an attention task, S^T = K Q^T and P V, and the scratch in which their operands wait.

The scores are computed transposed. Q^T is packed once per task, so rows of K are read as scalars to broadcast; the
queries lie along the vector lanes, so that statistics are plain vertical operations; and P^T comes out just as P V
wants it: as scalars again, against rows of V.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import DTYPE_BYTES
from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.common.score_scale import score_factor
from mhsa_compile.kernels.cpu.simd import vector_math, vectors
from mhsa_compile.kernels.cpu.simd.dtypes import load_wide
from mhsa_compile.kernels.cpu.simd.vectors import (
    Chunk,
    Expr,
    RegisterTile,
    constant,
    elements,
    load,
    materialize,
    prefetch,
    scratch,
    store,
)
from mhsa_compile.kernels.interface.kernel import CACHE_LINE
from mhsa_compile.kernels.interface.ops import AttentionOp


@dataclass(frozen=True)
class TaskOperands:
    """Q, K and V of one task: rows of Q from `first_query` on, the last one repeated beyond the end, and `kv_length`
    keys; and the head and the first row of Q of the task after it."""

    op: AttentionOp
    query: HeadView
    key: HeadView
    value: HeadView
    first_query: Expr
    q_length: Expr
    kv_length: Expr
    next_query: tuple[HeadView, Expr]

    def query_rows(self, first: Expr, count: int) -> list[Expr]:
        """Rows first .. first + count of the tile, each clamped to the last; those beyond are never written out."""
        last = self.q_length - 1
        return [materialize(T.min(self.first_query + (first + i), last)) for i in range(count)]

    def value_row(self, key: Expr, column: Chunk) -> Expr:
        """A vector of V's row `key`, as float32."""
        return load_wide(self.value.buffer, self.value.at(key, T.int64(column[0])), column[1])

    def prefetch(self, keys: list[Expr]) -> None:
        """Asks for the rows of K that come after `keys`, and for the rows of V that P V will want of them.

        Where heads lie side by side, every row is in a page of its own, which no hardware prefetcher foresees.
        """
        for row in keys:
            self._prefetch_row(self.key, self.op.head_dim, row + len(keys))
            self._prefetch_row(self.value, self.op.v_head_dim, row)

    def prefetch_next(self, queries: int) -> None:
        """Asks for the rows of Q that the next task will begin with, which it would wait for otherwise."""
        view, first = self.next_query
        with T.serial(T.int64(queries)) as i:
            self._prefetch_row(view, self.op.head_dim, first + i, soon=False)

    def _prefetch_row(self, view: HeadView, width: int, row: Expr, *, soon: bool = True) -> None:
        for column in range(0, width, CACHE_LINE // DTYPE_BYTES[self.op.dtype]):
            prefetch(view.buffer, view.at(row, T.int64(column)), soon=soon)


class Products(Protocol):
    """S^T = K Q^T for a few keys at a time, the probs that come of it, and P V, for one task."""

    operands: TaskOperands
    exp2_coefficients: Sequence[float]
    """Coefficients of the polynomial of exp2, as exact as the probs are kept."""
    keys_a_step: int
    """Keys whose probs are kept together, and that one step of P V takes."""
    rows_at_once: int
    """Rows that one instruction multiplies."""

    def pack_queries(self) -> None:
        """Brings the tile's Q^T into scratch."""
        ...

    def score(self, tile: RegisterTile, keys: list[Expr], between: Callable[[int], None] | None = None) -> None:
        """tile[r, c] = K[keys[r]] Q^T * score_factor, over the tile's own columns of queries.

        With `between` the sum over E comes in parts, one for each step of keys, and after part i comes `between(i)`.
        """
        ...

    def keep_probs(self, base: Expr, column: Chunk, probs: list[Expr]) -> None:
        """Keeps the probs of keys base, base + 1, ... of the block, for the queries of one column.

        `base` may be as low as -key_tile: what is kept there, nobody reads.
        """
        ...

    def prob(self, key: Expr, query: Expr) -> Expr:
        """One prob that was kept, as float32."""
        ...

    def rescale_probs(self, count: Expr, factors: Expr) -> None:
        """Multiplies the probs of the block's first `count` keys by the factor of each query."""
        ...

    def take_values(self, first_key: Expr, count: Expr) -> None:
        """Makes the block's rows of V ready for `add_values`."""
        ...

    def add_values(self, tile: RegisterTile, base: Expr, group: list[Chunk], block: KeyBlock) -> None:
        """tile[r, c] += P[base + r] V[:, group[c]], over the keys of the block that these rows see."""
        ...


def parts(steps: int, count: int, run: int = 1) -> list[tuple[int, int]]:
    """`count` equal parts of a sum of `steps` terms, as (first, end), in whole runs; some are empty where there are
    fewer."""
    borders = [min(steps, -(-steps // run) * i // count * run) for i in range(count + 1)]
    return list(itertools.pairwise(borders))


@dataclass(frozen=True)
class KeyBlock:
    """Keys first_key + first .. first_key + end."""

    first_key: Expr
    first: Expr
    end: Expr


class Float32Products:
    """Both products in float32. K and V of 16 bits are widened on their way, a few rows at a time, into scratch.

    A `run` of elements of K, and of probs, is loaded at once where a machine multiplies by each of them in place.
    q_t (E, queries) is Q^T times score_factor; probs (key_tile + keys, queries) is P^T from row key_tile on.
    """

    exp2_coefficients: Sequence[float] = vector_math.EXP2_COEFFICIENTS
    keys_a_step = 1
    rows_at_once = 1

    def __init__(
        self, operands: TaskOperands, queries: int, keys: int, key_tile: int, lanes: int, *, run: int = 1
    ) -> None:
        op = operands.op
        self.operands, self.key_tile, self.lanes, self.run = operands, key_tile, lanes, run
        self.queries = queries
        # The rows in front take the probs of the group before a block's first, which nobody reads.
        self.probs = scratch((key_tile + keys, queries))
        shapes = [(op.head_dim, queries), (key_tile, op.head_dim), (keys, op.v_head_dim)]
        self.wide_keys: Expr | None = None
        self.wide_values: Expr | None = None
        if op.dtype == "float32":
            self.q_t = scratch(shapes[0])
        else:
            self.q_t, self.wide_keys, self.wide_values = vectors.side_by_side(shapes)

    def pack_queries(self) -> None:
        """q_t[e, i] = Q[i, e] * score_factor."""
        query, head_dim, scale = self.operands.query, self.operands.op.head_dim, score_factor(self.operands.op)

        def scaled(row: Expr, e: Expr, count: int) -> Expr:
            return load_wide(query.buffer, query.at(row, e), count) * constant(scale, count)

        vectors.pack_transposed(self.q_t, self.queries, head_dim, self.lanes, self.operands.query_rows, scaled)

    def score(self, tile: RegisterTile, keys: list[Expr], between: Callable[[int], None] | None = None) -> None:
        key, head_dim = self.operands.key, self.operands.op.head_dim
        self.operands.prefetch(keys)
        # Once for the whole head: in the loop below each element would be widened by itself.
        if self.wide_keys is not None:
            for r, row in enumerate(keys):
                for first, lanes in vectors.chunks(head_dim, self.lanes):
                    wide = load_wide(key.buffer, key.at(row, T.int64(first)), lanes)
                    store(self.wide_keys, [T.int64(r), T.int64(first)], wide, lanes)
        tile.fill(0.0)

        def key_elements(r: int, e: Expr, count: int) -> list[Expr]:
            if self.wide_keys is None:
                return elements(load(key.buffer, key.at(keys[r], e), count), count)
            return elements(load(self.wide_keys, [T.int64(r), e], count), count)

        def multiply(e: Expr, count: int) -> None:
            factors = [key_elements(r, e, count) for r in range(len(keys))]
            for i in range(count):
                tile.outer_product(
                    lambda r: factors[r][i],
                    lambda c: load(self.q_t, [e + i, T.int64(tile.columns[c][0])], tile.columns[c][1]),
                )

        for i, (first, end) in enumerate(parts(head_dim, len(keys) if between else 1, self.run)):
            vectors.each_run(T.int64(first), T.int64(end), self.run, multiply, at_once=self._runs_at_once(tile))
            if between:
                between(i)

    def keep_probs(self, base: Expr, column: Chunk, probs: list[Expr]) -> None:
        first, lanes = column
        for r, prob in enumerate(probs):
            store(self.probs, [base + (self.key_tile + r), T.int64(first)], prob, lanes)

    def prob(self, key: Expr, query: Expr) -> Expr:
        return self.probs[key + self.key_tile, query]

    def rescale_probs(self, count: Expr, factors: Expr) -> None:
        with T.serial(count) as j:
            for first, lanes in vectors.chunks(self.queries, self.lanes):
                at = [j + self.key_tile, T.int64(first)]
                factor = load(factors, [T.int64(first)], lanes)
                store(self.probs, at, load(self.probs, at, lanes) * factor, lanes)

    def take_values(self, first_key: Expr, count: Expr) -> None:
        if self.wide_values is None:
            return
        with T.serial(count) as j:
            for first, lanes in vectors.chunks(self.operands.op.v_head_dim, self.lanes):
                store(
                    self.wide_values, [j, T.int64(first)], self.operands.value_row(first_key + j, (first, lanes)), lanes
                )

    def add_values(self, tile: RegisterTile, base: Expr, group: list[Chunk], block: KeyBlock) -> None:
        def values(j: Expr, c: int) -> Expr:
            if self.wide_values is not None:
                return load(self.wide_values, [j, T.int64(group[c][0])], group[c][1])
            return self.operands.value_row(block.first_key + j, group[c])

        def multiply(first: Expr, keys: int) -> None:
            for j in (first + i for i in range(keys)):
                tile.outer_product(self._row_probs(j, base, tile.rows).__getitem__, lambda c: values(j, c))

        vectors.each_run(block.first, block.end, self.run, multiply, at_once=self._runs_at_once(tile))

    def _runs_at_once(self, tile: RegisterTile) -> int:
        return vectors.runs_at_once(tile.rows * len(tile.columns) * self.run)

    def _row_probs(self, j: Expr, base: Expr, rows: int) -> list[Expr]:
        """P of the block's key j for `rows` queries."""
        if self.run > 1:
            return elements(load(self.probs, [j + self.key_tile, base], rows), rows)
        return [self.probs[j + self.key_tile, base + r] for r in range(rows)]

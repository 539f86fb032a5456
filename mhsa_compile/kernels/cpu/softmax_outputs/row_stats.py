"""What is gathered of each row of a softmax while its scores go by: sums for lse and entropy, and the largest.

Scores s are in units of log2. With a reference m near their maximum, as in `attention/online_softmax`,

    Z = sum 2^(s - m),  U = sum 2^(s - m) (s - m)
    where m becomes m':  U = (U + (m - m') Z) 2^(m - m'),  Z = Z 2^(m - m')
    lse = m ln 2 + ln Z,  entropy = ln Z - ln 2 U / Z

U / Z is the mean distance from m: as m is near the maximum, no term is large where the result is small. With m move
the origins that a bias is counted from, as the step of scores that fades says: s and m become less by what it moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from operator import add

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.online_softmax import MovingReference, largest_of
from mhsa_compile.kernels.cpu.simd import vector_math, vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, constant, let, load, materialize, scratch, store
from mhsa_compile.kernels.cpu.softmax_outputs.score_loop import Taker

LN_2 = math.log(2.0)
RISE = 1.0
"""How far, in powers of two, a score may exceed its row's reference before that is raised. Less than in attention: far
below the maximum the two terms of an entropy are as large as that distance, and their difference may be small."""
LEAST = -127.0
"""2^LEAST is 0 for `vector_math.exp2`, and finite: 0 * -inf would not be a number."""


class TileRowStats(Taker):
    """m, Z and, `with_moments`, U of `queries` rows. Sums go by block, so that their rounding does not grow with S, and
    by group, as in `attention/online_softmax`: a row of equal weights rounds each addition to a long sum the same way.

    `lower` is told what the scores of a column of queries have lost whenever their origins move.
    """

    def __init__(
        self, visibility: TileMask, *, with_moments: bool, lower: Callable[[Chunk, Expr], None] | None = None
    ) -> None:
        self.visibility, self.columns, self._lower = visibility, visibility.columns, lower
        self.reference = MovingReference(visibility, RISE)
        shape = (visibility.queries,)
        self.total, self.block_total = scratch(shape), scratch(shape)
        self.moment, self.block_moment = (scratch(shape) if with_moments else None for _ in range(2))

    def clear(self) -> None:
        """Begins with rows that have seen nothing, or nothing but their score of no key."""
        for first, lanes in self.columns:
            at, total, zero = [T.int64(first)], constant(0.0, lanes), constant(0.0, lanes)
            if (no_key := self.reference.begin((first, lanes))) is not None:
                total = T.Select(no_key == constant(-math.inf, lanes), zero, constant(1.0, lanes))
            store(self.total, at, total, lanes)
            if self.moment is not None:
                store(self.moment, at, zero, lanes)

    def begin_block(self) -> None:
        for first, lanes in self.columns:
            for buffer in (self.block_total, self.block_moment):
                if buffer is not None:
                    store(buffer, [T.int64(first)], constant(0.0, lanes), lanes)

    def take(self, scores: RegisterTile, base: Expr, first_key: Expr) -> None:
        self._raise_where_exceeded(scores, first_key)
        for c, (first, lanes) in enumerate(self.columns):
            at = [T.int64(first)]
            reference = let(self.reference.load((first, lanes)))
            weights, moments = [], []
            for r in range(scores.rows):
                distance = materialize(scores.get(r, c) - reference, "float32", lanes)
                # The distance on the false side: a comparison with NaN is false, and NaN must come through.
                least = constant(LEAST, lanes)
                distance = materialize(T.Select(distance < least, least, distance), "float32", lanes)
                weights.append(let(vector_math.exp2(distance, lanes)))
                moments.append(weights[-1] * distance)
            for block, terms in ((self.block_total, weights), (self.block_moment, moments)):
                if block is not None:
                    store(block, at, load(block, at, lanes) + reduce(add, terms), lanes)

    def end_block(self, first_key: Expr, count: Expr) -> None:
        for first, lanes in self.columns:
            at = [T.int64(first)]
            for whole, part in ((self.total, self.block_total), (self.moment, self.block_moment)):
                if whole is not None:
                    store(whole, at, load(whole, at, lanes) + load(part, at, lanes), lanes)

    def _raise_where_exceeded(self, scores: RegisterTile, first_key: Expr) -> None:
        """Makes a score that is too far above its row's reference the new one, and brings all sums so far to its
        measure."""
        largest, above = self.reference.exceeding(scores)
        with T.If(above), T.Then():
            for column, top in zip(self.columns, largest, strict=True):
                self._raise_column(column, top, first_key)
            self.visibility.renew_bias(scores, first_key)

    def _raise_column(self, column: Chunk, top: Expr, key: Expr) -> None:
        at, lanes = [T.int64(column[0])], column[1]
        old, fall = self.reference.raise_column(column, top, key, self._lower)
        factor = materialize(vector_math.exp2(fall, lanes), "float32", lanes)
        shift = T.Select(old == constant(-math.inf, lanes), constant(0.0, lanes), fall)
        shift = materialize(shift, "float32", lanes)
        for total, moment in ((self.total, self.moment), (self.block_total, self.block_moment)):
            # Before it shrinks: the moment takes Z by the old reference.
            sum_so_far = materialize(load(total, at, lanes), "float32", lanes)
            if moment is not None:
                store(moment, at, (load(moment, at, lanes) + shift * sum_so_far) * factor, lanes)
            store(total, at, sum_so_far * factor, lanes)

    def _inverse(self, column: Chunk) -> Expr:
        """1 / Z, and 0 where a row saw nothing."""
        first, lanes = column
        total = materialize(load(self.total, [T.int64(first)], lanes), "float32", lanes)
        zero = constant(0.0, lanes)
        return T.Select(total == zero, zero, constant(1.0, lanes) / total)

    def prob(self, column: Chunk, score: Expr) -> Expr:
        """2^(s - m) / Z; NaN in all of a row that sees one."""
        power = vector_math.exp2(score - self.reference.load(column), column[1])
        return materialize(power * self._inverse(column), "float32", column[1])

    def lse(self, column: Chunk) -> Expr:
        first, lanes = column
        at = [T.int64(first)]
        total = materialize(load(self.total, at, lanes), "float32", lanes)
        reference = self.reference.load(column)
        if (lack := self.visibility.lack(column)) is not None:
            reference = reference + lack
        value = reference * constant(LN_2, lanes) + vector_math.natural_log(total, lanes)
        return T.Select(total == constant(0.0, lanes), constant(-math.inf, lanes), value)

    def entropy(self, column: Chunk) -> Expr:
        first, lanes = column
        at, zero = [T.int64(first)], constant(0.0, lanes)
        assert self.moment is not None
        total = materialize(load(self.total, at, lanes), "float32", lanes)
        moment = load(self.moment, at, lanes)
        value = vector_math.natural_log(total, lanes) - constant(LN_2, lanes) * (moment / total)
        value = materialize(value, "float32", lanes)
        # Rounding may leave less than nothing; and what saw nothing is 0 / 0.
        return T.Select(T.Or(total == zero, value < zero), zero, value)


class Candidates(Taker):
    """The k largest scores of each row and their keys, the largest first; -inf where there are not as many."""

    def __init__(self, k: int, visibility: TileMask) -> None:
        self.k, self.columns, queries = k, visibility.columns, visibility.queries
        self.scores, self.keys = scratch((k, queries)), scratch((k, queries), "int32")
        self.weights = scratch((k, queries))  # what becomes of the scores in the end
        self._score, self._key = scratch((queries,)), scratch((queries,), "int32")

    def clear(self) -> None:
        with T.serial(T.int64(self.k)) as i:
            for first, lanes in self.columns:
                store(self.scores, [i, T.int64(first)], constant(-math.inf, lanes), lanes)

    def lower(self, column: Chunk, loss: Expr) -> None:
        """All scores of some rows are less by what they have lost: in the same order."""
        first, lanes = column
        with T.serial(T.int64(self.k)) as i:
            at = [i, T.int64(first)]
            store(self.scores, at, load(self.scores, at, lanes) - loss, lanes)

    def is_empty(self, i: Expr, row: Expr) -> Expr:
        """Whether a row saw no more than i keys."""
        return self.scores[i, row] == T.float32(-math.inf)

    def take(self, scores: RegisterTile, base: Expr, first_key: Expr) -> None:
        for c, (first, lanes) in enumerate(self.columns):
            least = load(self.scores, [T.int64(self.k - 1), T.int64(first)], lanes)
            # Few groups have any, once the largest so far are large.
            with T.If(vectors.any_lane(largest_of(scores, c) > least, lanes)), T.Then():
                for r in range(scores.rows):
                    self._insert((first, lanes), scores.get(r, c), first_key + r)

    def _insert(self, column: Chunk, score: Expr, key: Expr) -> None:
        """Inserts a score and its key: from the place on where `score` is larger, each candidate moves down one; keys
        come in order, so of equals the first stays first."""
        first, lanes = column
        at = [T.int64(first)]
        # Through memory, since what is carried changes from place to place.
        store(self._score, at, score, lanes)
        store(self._key, at, vectors.splat(T.cast(key, "int32"), lanes), lanes)
        with T.serial(T.int64(self.k)) as i:
            for newcomer, entries in ((self._key, self.keys), (self._score, self.scores)):
                dtype = str(entries.dtype)
                there = materialize(load(entries, [i, *at], lanes), dtype, lanes)
                here = materialize(load(newcomer, at, lanes), dtype, lanes)
                is_larger = score > load(self.scores, [i, *at], lanes)
                # The scores come last: what is compared with must still be there.
                store(newcomer, at, T.Select(is_larger, there, here), lanes)
                store(entries, [i, *at], T.Select(is_larger, here, there), lanes)

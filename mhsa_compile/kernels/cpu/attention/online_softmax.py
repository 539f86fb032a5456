"""The probs of one task, P^T = 2^(S^T - m), and the statistics of its rows: an online softmax whose reference m
hardly ever moves.

m need not be the maximum: a prob of 2^RISE is as exact as one of 1. Only where a score exceeds its row's reference by
more does the reference become that score, and what was summed up before shrinks by the power of two between them. With
it move the origins that a bias of scores is counted from; the step of scores that fades says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.attention.key_loop import KeyGroup
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products
from mhsa_compile.kernels.cpu.simd import vector_math, vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, constant, let, load, materialize, scratch, store

RISE = 8.0
"""How far, in powers of two, a score may exceed its row's reference before that is raised. Sums over S keys stay below
2^RISE * S times the largest value: no more of float32's range than 2^RISE times as many keys would take."""


class _Constants:
    """The constants of exp2 in memory, for machines whose multiply-add overwrites its summand: a load is free there,
    where a copy takes a slot of the units that multiply; and in registers they would push out sums of the products.

    LLVM must not find out: there are as many equal rows as vectors in a group, and which one a vector reads follows
    from the group's number.
    """

    def __init__(self, coefficients: Sequence[float], vectors_a_group: int, lanes: int) -> None:
        self.values = [*coefficients, vector_math.EXP2_SHIFT, vector_math.EXP2_FLOOR]
        # A power of two, so that a row is found by a mask, without a division.
        self.rows, self.lanes = 1 << (vectors_a_group - 1).bit_length(), lanes
        self.table = scratch((self.rows, len(self.values) * lanes))

    def write(self) -> None:
        with T.serial(T.int64(self.rows)) as row:
            for i, value in enumerate(self.values):
                store(self.table, [row, T.int64(i * self.lanes)], constant(value, self.lanes), self.lanes)

    def of(self, group: Expr, number: int) -> Callable[[float, int], Expr]:
        """`constant` for vector `number` of a group."""
        row = materialize((group + number) & T.int64(self.rows - 1))
        return lambda value, lanes: load(self.table, [row, T.int64(self.values.index(value) * self.lanes)], lanes)


class MovingReference:
    """What the scores of each row are counted from: a score near their maximum, which another one replaces where it
    exceeds it by more than `rise`, in powers of two."""

    def __init__(self, visibility: TileMask, rise: float) -> None:
        self.visibility, self.rise = visibility, rise
        self.values = scratch((visibility.queries,))  # 0 while a row has seen nothing,
        self.limit = scratch((visibility.queries,))  # and this -inf: else the reference + `rise`

    def begin(self, column: Chunk) -> Expr | None:
        """Begins with rows that have seen nothing, or nothing but their score of no key, which it gives."""
        at, lanes = [T.int64(column[0])], column[1]
        nothing, zero = constant(-math.inf, lanes), constant(0.0, lanes)
        limit, reference = nothing, zero
        if (no_key := self.visibility.no_key(column)) is not None:
            no_key = materialize(no_key, "float32", lanes)
            limit, reference = no_key + constant(self.rise, lanes), T.Select(no_key == nothing, zero, no_key)
        store(self.limit, at, limit, lanes)
        store(self.values, at, reference, lanes)
        return no_key

    def load(self, column: Chunk) -> Expr:
        return load(self.values, [T.int64(column[0])], column[1])

    def exceeding(self, tile: RegisterTile) -> tuple[list[Expr], Expr]:
        """(the largest score of each query, whether any exceeds its row's reference by so much)."""
        largest = [let(largest_of(tile, c)) for c in range(len(tile.columns))]
        above = None
        for (lane, lanes), top in zip(tile.columns, largest, strict=True):
            beyond = top > load(self.limit, [T.int64(lane)], lanes)
            above = beyond if above is None else T.Or(above, beyond)
        # One branch for all rows, which is hardly ever taken.
        return largest, vectors.any_lane(above, tile.columns[0][1])

    def raise_column(
        self, column: Chunk, top: Expr, key: Expr, lower: Callable[[Chunk, Expr], None] | None = None
    ) -> tuple[Expr, Expr]:
        """(the old reference, -inf of a row that has seen nothing; how far scores fall by the new one). Where origins
        of a bias move with it to `key`, `lower` is told what scores lose by that."""
        at, lanes = [T.int64(column[0])], column[1]
        nothing = constant(-math.inf, lanes)  # what a row has seen that has seen nothing: -inf - -inf is not a number
        old = T.Select(load(self.limit, at, lanes) == nothing, nothing, load(self.values, at, lanes))
        old = materialize(old, "float32", lanes)
        loss = self.visibility.move(column, top > old, key)
        if loss is not None and lower is not None:
            lower(column, loss)
        new = materialize(T.Select(top > old, top if loss is None else top - loss, old), "float32", lanes)
        reference = materialize(T.Select(new == nothing, constant(0.0, lanes), new), "float32", lanes)
        store(self.limit, at, new + constant(self.rise, lanes), lanes)
        store(self.values, at, reference, lanes)
        return old, old - reference if loss is None else old - reference - loss


def largest_of(tile: RegisterTile, c: int) -> Expr:
    return reduce(T.max, [tile.get(r, c) for r in range(tile.rows)])


class OnlineSoftmax:
    """The softmax of a tile's rows, over the keys of one block at a time, `key_tile` keys a group.

    `rescale(factors)` is told the factor of each row whenever what was summed up shrinks. `interleaves` puts the
    exponentials of one group between the products of the next, where there are registers for both; else before them.
    """

    def __init__(
        self,
        products: Products,
        visibility: TileMask,
        rescale: Callable[[Expr], None],
        *,
        overwrites_summands: bool,
        interleaves: bool,
    ) -> None:
        self.products, self.visibility, self._rescale, self.interleaves = products, visibility, rescale, interleaves
        self.key_tile, self.query_columns, queries = products.key_tile, visibility.columns, visibility.queries
        visibility.listen(self.key_tile)
        self.reference = MovingReference(visibility, RISE)
        self.row_sum, self.block_sum, self.group_sum, self.factors = (scratch((queries,)) for _ in range(4))
        self.pending = scratch((self.key_tile, queries))  # scores of the group before
        count, coefficients = self.key_tile * len(self.query_columns), products.exp2_coefficients
        self.constants = _Constants(coefficients, count, products.lanes) if overwrites_summands else None

    def clear(self) -> None:
        """Begins with rows that have seen nothing, or nothing but their score of no key: a reference with a sum of
        1. (One of -inf is none: of any other reference its 1 is 2^-inf.)"""
        self.visibility.prepare()
        if self.constants is not None:
            self.constants.write()
        for first, lanes in self.query_columns:
            total = 0.0 if self.reference.begin((first, lanes)) is None else 1.0
            store(self.row_sum, [T.int64(first)], constant(total, lanes), lanes)

    def begin_block(self) -> None:
        """Begins a block, with nothing pending: scores of -inf, whose probs are zeros."""
        for lane, lanes in self.query_columns:
            store(self.block_sum, [T.int64(lane)], constant(0.0, lanes), lanes)
            for r in range(self.key_tile):
                store(self.pending, [T.int64(r), T.int64(lane)], constant(-math.inf, lanes), lanes)

    def add_group(self, group: KeyGroup) -> None:
        """Computes the scores of a group, and meanwhile the probs of the one before: they do not wait for each
        other."""
        base, keys, columns = group.base, group.rows, group.columns
        tile = RegisterTile(self.key_tile, columns)
        # At a block's first group what is pending are scores of -inf; their probs, zeros, go in front of the block.
        if self.interleaves:
            self.products.score(tile, keys, lambda step: self._weigh_pending(base - self.key_tile, step))
        else:
            self._weigh_all_pending(base - self.key_tile)
            self.products.score(tile, keys)
        self.visibility.score(tile, keys, base)
        if group.hides:
            tile.each(lambda r, c: self.visibility.hide(tile.get(r, c), base + r, group.first_key + r, columns[c]))
        # After hiding, so that the tile which is kept for `renew_bias` has -inf where it is hidden.
        self.visibility.add_bias(tile, keys[0])
        self._raise_where_exceeded(base, tile, keys[0])
        for r in range(self.key_tile):
            for lane, lanes in self.query_columns:
                places = [c for c, column in enumerate(columns) if column[0] == lane]
                # Columns that were left out see nothing of this group.
                score = tile.get(r, places[0]) if places else constant(-math.inf, lanes)
                store(self.pending, [T.int64(r), T.int64(lane)], score, lanes)

    def end_block(self, groups: Expr) -> None:
        """Computes the probs of the last group, and adds the block's sum of probs to the row's."""
        # Nothing is multiplied meanwhile: there is no group after it.
        self._weigh_all_pending(materialize((groups - 1) * self.key_tile))
        for lane, lanes in self.query_columns:
            at = [T.int64(lane)]
            store(self.row_sum, at, load(self.row_sum, at, lanes) + load(self.block_sum, at, lanes), lanes)

    def _weigh_all_pending(self, base: Expr) -> None:
        for step in range(self.key_tile // self.products.unit.group):
            self._weigh_pending(base, step)

    def _weigh_pending(self, base: Expr, step: int) -> None:
        """P^T = 2^(S^T - m) for some keys of the group that begins at `base`.

        A group has a sum of its own: of a row of equal probs each addition to a long sum is rounded the same way.
        """
        size = self.products.unit.group
        first, last = step == 0, (step + 1) * size == self.key_tile
        # One more than the group's number, which is -1 for what is pending at first.
        group = None if self.constants is None else materialize(T.truncdiv(base, T.int64(self.key_tile)) + 1)
        for c, (lane, lanes) in enumerate(self.query_columns):
            at = [T.int64(lane)]
            reference = let(self.reference.load((lane, lanes)))
            probs = []
            for r in range(step * size, (step + 1) * size):
                score = load(self.pending, [T.int64(r), *at], lanes)
                probs.append(let(self._exp2(score - reference, lanes, group, r * len(self.query_columns) + c)))
            self.products.keep_probs(base + step * size, (lane, lanes), probs)
            total = reduce(add, probs if first else [load(self.group_sum, at, lanes), *probs])
            if last:
                store(self.block_sum, at, load(self.block_sum, at, lanes) + total, lanes)
            else:
                store(self.group_sum, at, total, lanes)

    def _exp2(self, x: Expr, lanes: int, group: Expr | None, number: int) -> Expr:
        """2^x of vector `number` of a group."""
        coefficients = self.products.exp2_coefficients
        if self.constants is None:
            return vector_math.exp2(x, lanes, coefficients)
        return vector_math.exp2(x, lanes, coefficients, self.constants.of(group, number), vector_math.maximum)

    def _raise_where_exceeded(self, base: Expr, tile: RegisterTile, key: Expr) -> None:
        """Makes a score that is too far above its row's reference the new one, and brings all sums so far to its
        measure. `key` is the tile's first key."""
        largest, above = self.reference.exceeding(tile)
        with T.If(above), T.Then():
            for lane, lanes in self.query_columns:
                store(self.factors, [T.int64(lane)], constant(1.0, lanes), lanes)
            for column, top in zip(tile.columns, largest, strict=True):
                self._raise_column(column, top, key)
            self.visibility.renew_bias(tile, key)
            # The block's probs so far wait for P V, which comes at the block's end.
            self.products.rescale_probs(base, self.factors)
            self._rescale(self.factors)

    def _raise_column(self, column: Chunk, top: Expr, key: Expr) -> None:
        at, lanes = [T.int64(column[0])], column[1]
        _, fall = self.reference.raise_column(column, top, key)
        factor = materialize(vector_math.exp2(fall, lanes), "float32", lanes)
        store(self.factors, at, factor, lanes)
        # `group_sum` is not among them: the group before is in `block_sum` by now.
        for total in (self.row_sum, self.block_sum):
            store(total, at, load(total, at, lanes) * factor, lanes)

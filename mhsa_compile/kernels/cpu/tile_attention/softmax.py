"""The online softmax of a strip's tiles of queries, a chunk of keys after the other.

    P^T = 2^(S^T - m), l += sum P^T      vectors, down the columns: queries are lanes
    where a sum shows that m is too low: m = the maximum, and what was summed up before shrinks

Nothing looks for a maximum unless the sum of a chunk exceeds LIMIT: a prob of 2^8 is as exact as one of 1. A row that
has seen nothing has m = -inf, and whatever it sees then shows.

A chunk's probs are due when its scores are there, and come among the products of the chunk after it, which may be the
first of another block, or of another tile of queries. So a block waits for its products, and a tile leaves its sums,
when the last chunk's probs are there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import (
    RegisterTile,
    constant,
    let,
    load,
    materialize,
    scratch,
    splat,
    store,
)
from mhsa_compile.kernels.cpu.tile_attention import powers
from mhsa_compile.kernels.cpu.tile_attention.output import TileOutput
from mhsa_compile.kernels.cpu.tile_attention.powers import LANES
from mhsa_compile.kernels.cpu.tile_attention.state import StripState
from mhsa_compile.kernels.cpu.units import tiles

LIMIT = float(1 << 8)
WIDEST = 64
"""Features of values up to which a block's last probs wait for the products of the next block: of more features the
products take longer than all probs, and nothing is gained."""
_FRESH, _IS_DUE, _PLACE, _TURN, _ENDS_BLOCK, _ROW, _COUNT, _ENDS_TILE, _ROWS, _ENTRY, _HEAD, _QUERY = range(12)
"""Cells of the state: whether the rows have seen nothing, whether a chunk is due, its place in its block, where the
next scores go; whether the chunk ends a block, where that lies in the values, its chunks; whether it ends a tile too,
which of the two in `reference` that is, and what it is of."""


class TileSoftmax:
    """m and l of the rows of a strip's tiles, and the chunk whose probs are due. Scratch is allocated where it is
    constructed.

    scores (2 columns, 2 * 256)          those of two chunks, a tile a row
    reference, row_sum (2, queries)      m and l, of the tile whose probs are computed, and of the one behind it
    chunk_sum (queries,)
    """

    def __init__(self, output: TileOutput, *, is_alone: bool) -> None:
        self.output, self.is_alone, self.begins_with_sums = output, is_alone, False
        """Whether no tile comes before or behind; whether rows begin with a score of no key."""
        self.unit, self.terms = output.values.unit, output.values.terms
        self.columns = vectors.chunks(output.queries, LANES)
        self.cuts = self.terms == 1 and self.unit is tiles.BFLOAT16
        self.measure = powers.BEFORE_CUT if self.cuts else 1.0
        """Probs of this measure are summed up, for what is cut off on the way to tiles."""
        self.waits = output.op.v_head_dim <= WIDEST
        """Whether what is due at the end of a block waits for the next one."""
        self.scores = scratch((2 * len(self.columns), 2 * 256))
        self.reference, self.row_sum = scratch((2, output.queries)), scratch((2, output.queries))
        self.chunk_sum = scratch((output.queries,))
        self.state, self.factors = StripState(12), T.alloc_buffer((2,), "float32")

    def start(self) -> None:
        """Nothing is due."""
        for cell in (_IS_DUE, _TURN, _ENDS_BLOCK, _ENDS_TILE, _ROWS):
            self.state.set(cell, 0)
        self.state.set(_FRESH, 1)

    # ---- Chunks, blocks, tiles

    @property
    def is_due(self) -> Expr:
        """Whether a chunk's scores are there, and its probs are not."""
        return self.state.holds(_IS_DUE)

    @property
    def place(self) -> Expr:
        """Which chunk of its block is due."""
        return self.state.get(_PLACE)

    @property
    def turn(self) -> Expr:
        """Where scores of the next chunk go; those of the one that is due are at the other place."""
        return self.state.get(_TURN)

    def at(self, turn: Expr, row: Expr | int, r: int, c: int) -> list[Expr]:
        """Where the scores of key 16 r + row are, for a column of queries."""
        return [T.int64(2 * c + r), turn * 256 + row * LANES]

    def begin_tile(self, no_keys: Sequence[Expr | None]) -> None:
        """The rows of a tile have seen nothing, or nothing but their scores of no key, one of each column."""
        self.begins_with_sums = any(no_key is not None for no_key in no_keys)
        rows = materialize(T.Select(self.is_due, T.int64(1) - self.state.get(_ROWS), self.state.get(_ROWS)))
        for (first, lanes), no_key in zip(self.columns, no_keys, strict=True):
            at, nothing = [rows, T.int64(first)], constant(-math.inf, lanes)
            total = reference = None
            if no_key is not None:
                reference = materialize(no_key, "float32", lanes)
                total = T.Select(reference == nothing, constant(0.0, lanes), constant(self.measure, lanes))
            store(self.reference, at, nothing if reference is None else reference, lanes)
            store(self.row_sum, at, constant(0.0, lanes) if total is None else total, lanes)

    def set_factor(self, factor: float) -> None:
        """What the next chunk's scores are to be multiplied by, in units of log2."""
        store(self.factors, [self.turn], T.float32(factor), 1)

    def make_due(self, place: Expr) -> None:
        """The scores of the next chunk, at a place of its block, are there."""
        self.state.set(_PLACE, place)
        self.state.set(_TURN, T.int64(1) - self.turn)
        self.state.set(_IS_DUE, 1)

    def end_block(self, row: Expr, count: Expr) -> None:
        """The chunk that is due is the last one of a block: so many chunks from `row` of the values on."""
        for cell, value in ((_ROW, row), (_COUNT, count), (_ENDS_BLOCK, 1)):
            self.state.set(cell, value)

    def end_tile(self, place: tuple[Expr, Expr, Expr]) -> None:
        """So is the tile of (entry, head, first query). Nothing is due where it has seen no block, or one whose values
        were added up in another way; then it leaves at once, as does one behind which no other comes."""
        if self.is_alone:
            self.flush()
            return self._leave(place)
        with T.If(T.And(self.is_due, T.Not(self.state.holds(_ENDS_TILE)))):
            with T.Then():
                self.state.set(_ENDS_TILE, 1)
                for cell, value in zip((_ENTRY, _HEAD, _QUERY), place, strict=True):
                    self.state.set(cell, value)
            with T.Else():
                self.flush()
                self.output.write(waits=True)
                self._leave(place)

    def _leave(self, place: Sequence[Expr]) -> None:
        """Y will be O / l, and zeros where a row saw nothing."""
        rows = materialize(self.state.get(_ROWS))

        def inverse(c: int) -> Expr:
            total, zero = let(load(self.row_sum, [rows, T.int64(c * LANES)], LANES)), constant(0.0, LANES)
            return T.Select(total == zero, zero, constant(self.measure, LANES) / total)

        self.output.leave((place[0], place[1], place[2]), inverse)
        self.state.set(_ROWS, T.int64(1) - rows)
        self.state.set(_ENDS_TILE, 0)
        self.state.set(_FRESH, 1)

    def settle(self) -> None:
        """After the probs of the chunk that was due: the block that it ends waits, the tile leaves its sums."""
        self.state.set(_IS_DUE, 0)
        with T.If(self.state.holds(_ENDS_BLOCK)), T.Then():
            rest = (self.place + 1) * self.output.share
            self.output.add_waiting(rest, T.int64(self.output.features))
            self.output.write()
            self.output.wait(self.state.get(_ROW), self.state.get(_COUNT))
            self.state.set(_ENDS_BLOCK, 0)
            with T.If(self.state.holds(_ENDS_TILE)), T.Then():
                self._leave([self.state.get(cell) for cell in (_ENTRY, _HEAD, _QUERY)])

    def flush(self) -> None:
        """Nothing is due any more."""
        if not self.waits:
            return  # nothing ever is at the end of a block
        with T.If(self.is_due), T.Then():
            self.add_share()
            self.add_probs()
            self.settle()

    def flush_beside_values(self) -> None:
        """The same, of the last chunk of a block: its probs come among the products of the block before."""
        first = materialize(self.place * self.output.share)
        with T.If(T.And(self.output.fits(first), T.Not(self.state.holds(_FRESH)))):
            with T.Then():
                self.weigh(self.output.steps(first))
                self.check()
            with T.Else():
                self.add_share()
                self.add_probs()
        self.settle()

    # ---- Probs of the chunk that is due

    @property
    def features(self) -> tuple[Expr, Expr]:
        """Tiles of features (first, end) that the block which waits is multiplied for, beside these probs."""
        first, count = self.place * self.output.share, T.int64(self.output.features)
        return materialize(T.min(first, count)), materialize(T.min(first + self.output.share, count))

    def add_share(self) -> None:
        self.output.add_waiting(*self.features)

    def add_probs(self) -> None:
        """Probs and their sums."""
        self.set_first_reference()
        self.weigh()
        self.check()

    def set_first_reference(self) -> None:
        """Gives rows that have seen nothing their first reference."""
        with T.If(self.state.holds(_FRESH)), T.Then():
            self._lift(fresh=True)
            self.state.set(_FRESH, 0)

    def check(self) -> None:
        """Adds up the sums of the chunk, whose probs are computed anew if they exceed what they may."""
        with T.If(self._exceeds()), T.Then():
            self._raise()
        self._add_sums()

    def _add_sums(self) -> None:
        for first, lanes in self.columns:
            at = [self.state.get(_ROWS), T.int64(first)]
            store(self.row_sum, at, load(self.row_sum, at, lanes) + load(self.chunk_sum, at[1:], lanes), lanes)

    def _scores(self, turn: Expr, row: Expr, r: int, c: int, factor: Expr) -> Expr:
        """In units of log2, each rounded before a reference is taken from it: of scores from 2^24 on the rest of a
        fused product is a power of two by itself."""
        product = load(self.scores, self.at(turn, row, r, c), LANES) * factor
        return T.call_llvm_pure_intrin("float32x16", "llvm.arithmetic.fence", product)

    def _due(self) -> tuple[Expr, Expr]:
        """Where the scores are, and what they are multiplied by."""
        turn = materialize(T.int64(1) - self.turn)
        return turn, let(splat(self.factors[turn], LANES))

    def weigh(self, among: Sequence[Callable[[], None]] = ()) -> None:
        """P^T = 2^(S^T - m), and their sums; `among` come between them."""
        turn, factor = self._due()
        side, place, rows = (materialize(e) for e in (T.int64(1) - self.output.side, self.place, self.state.get(_ROWS)))
        references = [let(load(self.reference, [rows, T.int64(first)], lanes)) for first, lanes in self.columns]

        def weigh(r: int, part: Expr | int, pair: int, c: int) -> Expr:
            probs = []
            for half in range(2):
                score = self._scores(turn, part * 4 + (2 * pair + half), r, c, factor)
                probs.append(let(powers.exp2(let(score - references[c]), self.terms, self.measure)))
            for term, words in enumerate([tiles.upper_halves(*probs)] if self.cuts else self._words(probs)):
                at = [side, place, T.int64(term), T.int64(c), part * (2 * LANES) + (8 * r + pair) * LANES]
                store(self.output.probs, at, words, LANES)
            return probs[0] + probs[1]

        columns = range(len(self.columns))
        if among:
            # Each sum is a value of its own: a buffer's storage may become that of others, and then stays in memory.
            totals = [constant(0.0, LANES) for _ in columns]
            places = list(itertools.product(range(2), range(4), range(2)))
            for number, (r, part, pair) in enumerate(places):
                for c in columns:
                    totals[c] = let(powers.add_in_order(totals[c], weigh(r, T.int64(part), pair, c)))
                borders = (len(among) * n // len(places) for n in (number, number + 1))
                for step in among[slice(*borders)]:
                    step()
        else:
            sums = RegisterTile(1, self.columns)
            sums.fill(0.0)
            for r in range(2):
                with T.serial(T.int64(tiles.ROWS // 4)) as part:
                    for pair, c in itertools.product(range(2), columns):
                        sums.set(0, c, sums.get(0, c) + weigh(r, part, pair, c))
            totals = [sums.get(0, c) for c in columns]
        for (first, lanes), total in zip(self.columns, totals, strict=True):
            store(self.chunk_sum, [T.int64(first)], total, lanes)

    def _exceeds(self) -> Expr:
        """Whether the chunk's sum of any row is too large, or NaN."""
        beyond = None
        for first, lanes in self.columns:
            # By their bits, of which those of NaN are the largest: TVM takes not (x <= y) to be x > y.
            total = T.reinterpret(vectors.vector_type("uint32", lanes), load(self.chunk_sum, [T.int64(first)], lanes))
            own = total > splat(T.uint32(int(np.float32(LIMIT).view(np.uint32))), lanes)
            beyond = own if beyond is None else T.Or(beyond, own)
        return vectors.any_lane(beyond, LANES)

    def _raise(self) -> None:
        """Lifts the references of rows, and weighs the chunk anew."""
        self._lift(fresh=False)
        # A row that has still seen nothing has scores of -inf alone: of any finite reference its probs are zeros.
        rows, references = materialize(self.state.get(_ROWS)), RegisterTile(1, self.columns)
        for c, (first, lanes) in enumerate(self.columns):
            reference = let(load(self.reference, [rows, T.int64(first)], lanes))
            references.set(0, c, reference)
            value = T.Select(reference == constant(-math.inf, lanes), constant(0.0, lanes), reference)
            store(self.reference, [rows, T.int64(first)], value, lanes)
        self.weigh()
        for c, (first, lanes) in enumerate(self.columns):
            store(self.reference, [rows, T.int64(first)], references.get(0, c), lanes)

    def _lift(self, *, fresh: bool) -> None:
        """Makes the largest score of each row that exceeds its reference the new one, and brings all sums so far to its
        measure."""
        output, (turn, factor) = self.output, self._due()
        side, own, rows = output.side, output.own(), materialize(self.state.get(_ROWS))
        for c, (first, lanes) in enumerate(self.columns):
            at = [rows, T.int64(first)]
            top = RegisterTile(1, [(0, lanes)])
            top.fill(-math.inf)
            for r in range(2):
                with T.serial(T.int64(tiles.ROWS)) as row:
                    score = let(self._scores(turn, row, r, c, factor))
                    top.set(0, 0, T.Select(score > top.get(0, 0), score, top.get(0, 0)))
            largest = let(top.get(0, 0))
            old = materialize(load(self.reference, at, lanes), "float32", lanes)
            new = materialize(T.Select(largest > old, largest, old), "float32", lanes)
            store(self.reference, at, new, lanes)
            if fresh and not self.begins_with_sums:
                continue  # nothing was summed up
            unset = T.Or(old == new, old == constant(-math.inf, lanes))
            fall = T.Select(unset, constant(1.0, lanes), powers.exp2(let(old - new), self.terms))
            shrink = materialize(fall, "float32", lanes)
            store(self.row_sum, at, load(self.row_sum, at, lanes) * shrink, lanes)
            if fresh:
                continue
            with T.serial(own * output.features) as feature, T.serial(T.int64(tiles.ROWS)) as row:
                place = [feature, T.int64(c), row * LANES]
                for sums in output.sums:
                    store(sums, place, load(sums, place, LANES) * shrink, LANES)
            for number, count in ((side, own * output.count), (T.int64(1) - side, self.place)):
                with T.serial(count) as earlier, T.serial(T.int64(tiles.ROWS)) as row:
                    probs = [let(half * shrink) for half in self.probs(number, earlier, c, row)]
                    for term, words in enumerate(self._words(probs)):
                        at = [number, earlier, T.int64(term), T.int64(c), row * LANES]
                        store(output.probs, at, words, LANES)

    def _words(self, probs: Sequence[Expr]) -> list[Expr]:
        """Two vectors of probs as `p` has them, a word of each term."""
        if self.unit is tiles.FLOAT16:
            return [powers.pairs(*probs, dtype=self.unit.dtype)]
        return powers.words_of_terms(probs, self.terms)

    def probs(self, side: Expr, chunk: Expr, c: int, pair: Expr) -> list[Expr]:
        """Those of two neighbouring keys of a chunk, for a column of queries."""
        sums: list[Expr] = []
        for term in reversed(range(self.terms)):
            words = let(load(self.output.probs, [side, chunk, T.int64(term), T.int64(c), pair * LANES], LANES))
            halves = powers.halves(words, self.unit.dtype)
            sums = [half + total for half, total in zip(halves, sums, strict=True)] if sums else halves
        return [let(total) for total in sums]

"""One task of attention on tiles: a head's 16 or 32 queries against all keys that they see, 32 keys a chunk.

    for each block of keys, for each chunk of it:
        S^T = K Q^T                          tiles, to scratch that is too small to be waited for
        O^T += V^T P^T of the block before   a share of its features
        P^T = 2^(S^T - m), l += sum P^T      vectors, down the columns: queries are lanes
        where a sum shows that m is too low: m = the maximum, and what was summed up before shrinks

Nothing looks for a maximum unless the sum of a chunk exceeds LIMIT: a prob of 2^8 is as exact as one of 1. A row that
has seen nothing has m = -inf, and whatever it sees then shows.

Factors of float32 are multiplied by terms, those of the spec's word, of which two neighbours in the order share one. Of
bf16x6 a block's sums begin anew, in `part`, and vectors add them to O^T when the next block's are due: no chain of sums
is longer than a block. Chunks of which K or V, and tasks of which Q, holds what terms do not carry are computed in
float32, plainly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.common.score_scale import score_factor
from mhsa_compile.kernels.cpu.attention.key_loop import KeyGroup, VisitedBlock
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import TaskOperands
from mhsa_compile.kernels.cpu.formats.choice import FORMATS, load_wide, prefetch_rows
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
from mhsa_compile.kernels.cpu.tile_attention import powers, terms
from mhsa_compile.kernels.cpu.tile_attention.powers import LANES
from mhsa_compile.kernels.cpu.tile_attention.terms import Magnitudes, term_pairs
from mhsa_compile.kernels.cpu.tile_attention.values import (
    KEYS,
    NO_TERMS,
    NO_TERMS_OF_KEYS,
    NON_FINITE,
    KeyValueTiles,
)
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.cpu.units.float32_terms import LARGE
from mhsa_compile.kernels.cpu.units.tiles import Tiles
from mhsa_compile.spec.float32_products import is_coarse

LIMIT = float(1 << 8)
_GROUP = 4  # rows of scores that are changed in registers
_COUNT, _FIRST, _SIDE, _FRESH, _LARGE = range(5)


class TileAttentionTask:
    """Scratch is allocated where it is constructed: inside the loop over tasks, so per thread.

    s (2 columns, 2 * 256)                scores of two chunks, a tile a row
    p (2, chunks, terms, columns, 256)    words of probs, of this block and of the one before
    o (F / 16, columns, 256)              O^T in float32
    part (F / 16, columns, 256)           what a block adds to it, if that is a sum of its own
    wide (E, queries)                     Q^T in float32
    """

    def __init__(
        self,
        operands: TaskOperands,
        visibility: TileMask,
        values: KeyValueTiles,
        first_row: Expr,
        unit: Tiles,
        keys: int,
    ) -> None:
        op = operands.op
        self.operands, self.op, self.visibility, self.values, self.unit = operands, op, visibility, values, unit
        self.queries, self.columns = visibility.queries, len(visibility.columns)
        self.first_row, self.chunks, self.features = first_row, keys // KEYS, op.v_head_dim // tiles.ROWS
        self.share = -(-self.features // self.chunks)
        self.pairs, self.terms = term_pairs(op), values.terms
        self.q_t = [scratch((op.head_dim // 2, self.queries), "int32") for _ in range(self.terms)]
        self.s = scratch((2 * self.columns, 2 * 256))
        self.p = scratch((2, self.chunks, self.terms, self.columns, 256), "int32")
        self.o = scratch((self.features, self.columns, 256))
        is_exact = self.terms > 1 and not is_coarse(op.float32_products)
        self.part = scratch((self.features, self.columns, 256)) if is_exact else None
        self.wide = scratch((op.head_dim, self.queries)) if self.terms > 1 else None
        self.k = scratch((KEYS, op.head_dim), "uint16") if values.keys is None else None
        self.reference, self.row_sum, self.chunk_sum = (scratch((self.queries,)) for _ in range(3))
        self.state, self.factors = T.alloc_buffer((5,), "int64"), T.alloc_buffer((2,), "float32")
        self.factor = score_factor(op)
        self.cuts = self.terms == 1 and unit is tiles.BFLOAT16
        self.measure = powers.BEFORE_CUT if self.cuts else 1.0
        """Probs of this measure are summed up, for what is cut off on the way to tiles."""
        self.changes = any(step.elementwise or step.cpu_tile is not None for step in op.scores)
        """Whether scores are brought to units of log2, and changed, before they become probs."""

    def _get(self, cell: int) -> Expr:
        return self.state[T.int64(cell)]

    def _set(self, cell: int, value: Expr) -> None:
        store(self.state, [T.int64(cell)], value, 1)

    # ---- The task

    def begin(self, output: HeadView) -> None:
        """Packs Q^T; rows have seen nothing, or nothing but their score of no key. Asks for the lines that Y goes to,
        and for the next task's queries."""
        prefetch_rows(output, self.operands.first_query, self.queries, self.op.v_head_dim, write=True)
        for cell, value in ((_COUNT, 0), (_FIRST, 0), (_SIDE, 0), (_FRESH, 1), (_LARGE, 0)):
            self._set(cell, T.int64(value))
        self._pack_queries()
        self.operands.prefetch_next(self.queries)
        self.visibility.prepare()
        for first, lanes in self.visibility.columns:
            at = [T.int64(first)]
            nothing = constant(-math.inf, lanes)
            total = reference = None
            if (no_key := self.visibility.no_key((first, lanes))) is not None:
                reference = materialize(no_key, "float32", lanes)
                total = T.Select(reference == nothing, constant(0.0, lanes), constant(self.measure, lanes))
            store(self.reference, at, nothing if reference is None else reference, lanes)
            store(self.row_sum, at, constant(0.0, lanes) if total is None else total, lanes)
        with T.serial(T.int64(self.features)) as feature:
            for c in range(self.columns):
                with T.serial(T.int64(tiles.ROWS)) as row:
                    for sums in self._sums():
                        store(sums, [feature, T.int64(c), row * LANES], constant(0.0, LANES), LANES)

    def _pack_queries(self) -> None:
        op, query, rows = self.op, self.operands.query, self.operands.query_rows
        if self.wide is None:

            def bits(row: Expr, step: Expr, _: int) -> Expr:
                return T.reinterpret("int32x16", terms.narrow_row(query.buffer, query.at(row, step * 2)))

            return vectors.pack_transposed(self.q_t[0], self.queries, op.head_dim // 2, LANES, rows, bits)

        def numbers(row: Expr, first: Expr, count: int) -> Expr:
            return load(query.buffer, query.at(row, first), count)

        vectors.pack_transposed(self.wide, self.queries, op.head_dim, LANES, rows, numbers)
        magnitudes = Magnitudes.of_none()
        with T.serial(T.int64(op.head_dim // 2)) as step:
            for first, lanes in self.visibility.columns:
                pair = [let(load(self.wide, [step * 2 + i, T.int64(first)], lanes)) for i in range(2)]
                magnitudes.add(pair)
                for term, words in enumerate(powers.words_of_terms(pair, self.terms)):
                    store(self.q_t[term], [step, T.int64(first)], words, lanes)
        with T.If(magnitudes.reach(LARGE)), T.Then():
            self._set(_LARGE, T.int64(1))

    def _sums(self) -> list[Expr]:
        """What sums of values are in."""
        return [self.o] if self.part is None else [self.o, self.part]

    def end(self, output: HeadView) -> None:
        """Y = O / l, and zeros where a row saw nothing."""
        self._add_pending(T.int64(0), T.int64(self.features))
        if self.part is not None:
            with T.serial(T.int64(self.features)) as feature:
                self._add_part(feature)
        count = materialize(T.min(T.int64(self.queries), self.visibility.q_length - self.visibility.first_query))
        for c, (first, lanes) in enumerate(self.visibility.columns):
            total = let(load(self.row_sum, [T.int64(first)], lanes))
            zero = constant(0.0, lanes)
            inverse = let(T.Select(total == zero, zero, constant(self.measure, lanes) / total))
            # So many features are a vector of the output, which becomes a square.
            together = 1 if self.op.dtype == "float32" else 2
            with T.serial(T.int64(self.features // together)) as part:

                def row(number: int) -> Expr:
                    at = [part * together + number // LANES, T.int64(c), T.int64(number % LANES * LANES)]
                    return load(self.o, at, LANES) * inverse

                rows = [row(number) for number in range(LANES * together)]
                dtype = self.op.dtype
                words = rows
                if together > 1:
                    words = [powers.pairs(*rows[i : i + 2], dtype=dtype) for i in range(0, 2 * LANES, 2)]
                for lane, line in enumerate(vectors.transpose([let(word) for word in words])):
                    with T.If(first + lane < count), T.Then():
                        at = output.at(self.visibility.first_query + first + lane, part * (LANES * together))
                        line = line if together == 1 else T.reinterpret(f"{dtype}x32", line)
                        store(output.buffer, at, line, LANES * together)

    # ---- The visitor of keys

    def begin_block(self) -> None:
        pass

    def add_group(self, group: KeyGroup) -> None:
        """A chunk: its scores, and meanwhile the probs of the one before and a share of the block before."""
        chunk = materialize(T.truncdiv(group.base, T.int64(KEYS)))
        first = materialize((chunk - 1) * self.share)
        changed = self.changes or group.hides
        store(self.factors, [chunk & T.int64(1)], T.float32(1.0 if changed else self.factor), 1)

        def apart() -> None:
            self._multiply_keys(group, chunk)
            if changed:
                self._change(group, chunk)
            with T.If(chunk > 0), T.Then():
                self._add_pending(first, materialize(T.min(first + self.share, T.int64(self.features))))
                self._add_probs(materialize(chunk - 1))

        if group.hides:
            return apart()

        def together(values: Sequence[Callable[[], None]]) -> None:
            # Scores first: they are waited for at the next chunk.
            self._weigh(materialize(chunk - 1), [*self._key_steps(group, chunk), *values])
            if changed:
                self._change(group, chunk)
            self._check(materialize(chunk - 1))

        ready = T.And(chunk > 0, self._get(_FRESH) == T.int64(0))
        if self.terms > 1:
            ready = T.And(ready, T.Not(self._is_extraordinary(group)))
        with T.If(ready):
            with T.Then(), T.If(self._fits(first)):
                with T.Then():
                    together(self._value_steps(first))
                with T.Else():
                    self._add_pending(first, materialize(T.min(first + self.share, T.int64(self.features))))
                    together([])
            with T.Else():
                apart()

    def end_block(self, block: VisitedBlock) -> None:
        """What is left of the block before; this one waits in its place."""
        last = materialize(block.groups - 1)
        first = materialize(T.min(last * self.share, T.int64(self.features)))
        with T.If(self._fits(first)):
            with T.Then():
                self._weigh(last, self._value_steps(first))
                self._check(last)
                self._add_pending(materialize(first + self.share), T.int64(self.features))
            with T.Else():
                self._add_probs(last)
                self._add_pending(first, T.int64(self.features))
        row = materialize(self.first_row + T.truncdiv(block.first_key, T.int64(KEYS)))
        self._set(_COUNT, block.groups)
        self._set(_FIRST, row)
        self._set(_SIDE, T.int64(1) - self._get(_SIDE))
        if block.hides is None and self.terms == 1:
            return
        flags = self._flags(row, block.groups)
        with T.If(flags & T.int32(NON_FINITE | NO_TERMS) != T.int32(0)), T.Then():
            if block.hides is not None:
                with T.If(T.And(block.hides, flags & T.int32(NON_FINITE) != T.int32(0))), T.Then():
                    self._add_visible(block)
                    self._set(_COUNT, T.int64(0))
            if self.terms > 1:
                with T.If(self._get(_COUNT) > 0), T.Then():
                    self._add_plainly(block)
                    self._set(_COUNT, T.int64(0))

    def _fits(self, first: Expr) -> Expr:
        """Whether the block before is a full one, with a whole share of features from `first` on, and no row is new."""
        full = T.And(self._get(_COUNT) == T.int64(self.chunks), self._get(_FRESH) == T.int64(0))
        return T.And(full, first + self.share <= T.int64(self.features))

    def _add_probs(self, chunk: Expr) -> None:
        """The probs of a chunk whose scores are there, and their sums."""
        fresh = self._get(_FRESH) != T.int64(0)
        with T.If(fresh):
            with T.Then():
                self._raise(chunk, fresh=True)
                self._set(_FRESH, T.int64(0))
                self._add_sums()
            with T.Else():
                self._weigh(chunk)
                self._check(chunk)

    def _check(self, chunk: Expr) -> None:
        """Adds up the sums of a chunk, whose probs are computed anew if they exceed what they may."""
        with T.If(self._exceeds()), T.Then():
            self._raise(chunk, fresh=False)
        self._add_sums()

    def _add_sums(self) -> None:
        for first, lanes in self.visibility.columns:
            at = [T.int64(first)]
            store(self.row_sum, at, load(self.row_sum, at, lanes) + load(self.chunk_sum, at, lanes), lanes)

    # ---- Products

    def _multiply_keys(self, group: KeyGroup, chunk: Expr) -> None:
        """Scores of a chunk, in units of the products."""
        op, key = self.op, self.operands.key
        if group.hides and self.k is not None:
            # Rows that are not there are the last one again.
            for r, row in enumerate(group.rows):
                with T.serial(T.int64(op.head_dim // KEYS)) as part:
                    elements = load(key.buffer, key.at(row, part * KEYS), KEYS)
                    store(self.k, [T.int64(r), part * KEYS], T.reinterpret("uint16x32", elements), KEYS)

        def multiply() -> None:
            for step in self._key_steps(group, chunk):
                step()

        if self.terms == 1:
            return multiply()
        with T.If(self._is_extraordinary(group)):
            with T.Then():
                self._multiply_keys_plainly(group, chunk)
            with T.Else():
                multiply()

    def _key_steps(self, group: KeyGroup, chunk: Expr) -> list[Callable[[], None]]:
        """S^T += K Q^T, a pair of terms each."""
        op, key, held = self.op, self.operands.key, HeldTiles()
        pitch, row = key.buffer.shape[-1], self._row(group)

        def left(r: int, step: int, term: int) -> None:
            column = T.int64(step * self.unit.depth)
            if self.values.keys is not None:
                at = self.values.key_place(row, step, term, tiles.ROWS * r)
                tiles.load_tile(tiles.LEFT, self.values.keys, at, KEYS)
            elif group.hides:
                tiles.load_tile(tiles.LEFT, self.k, [T.int64(tiles.ROWS * r), column], op.head_dim)
            else:
                tiles.load_tile(tiles.LEFT, key.buffer, key.at(group.rows[tiles.ROWS * r], column), pitch)

        def right(step: int, term: int, c: int) -> None:
            at = [T.int64(step * tiles.WORDS), T.int64(LANES * c)]
            tiles.load_tile(tiles.RIGHT, self.q_t[term], at, self.queries)

        def multiply(r: int, step: int, pair: int) -> None:
            if step == pair == 0:
                for c in range(self.columns):
                    tiles.zero(c)
            self._multiply_pair(held, pair, partial(left, r, step), partial(right, step), (r, step))
            if step == steps - 1 and pair == len(self.pairs) - 1:
                for c in range(self.columns):
                    tiles.store_tile(c, self.s, self._score(chunk, T.int64(0), r, c), LANES)

        steps = op.head_dim // self.unit.depth
        places = itertools.product(range(2), range(steps), range(len(self.pairs)))
        return [partial(multiply, *place) for place in places]

    def _value_steps(self, first: Expr) -> list[Callable[[], None]]:
        """O^T += V^T P^T of a full block that waits, for a share of the features; a pair of terms of a chunk each."""
        row, side, held = materialize(self._get(_FIRST)), materialize(self._get(_SIDE)), HeldTiles()

        def multiply(number: int, step: int, pair: int) -> None:
            if step == pair == 0:
                self._begin_sums(first + number)
            self._multiply_values(held, pair, first + number, row, side, T.int64(step), (number, step))
            if step == self.chunks - 1 and pair == len(self.pairs) - 1:
                self._end_sums(first + number)

        places = itertools.product(range(self.share), range(self.chunks), range(len(self.pairs)))
        return [partial(multiply, *place) for place in places]

    def _add_pending(self, first: Expr, end: Expr) -> None:
        """O^T += V^T P^T of the block that waits, for features first .. end, in tiles of them."""
        count, row, side = (materialize(self._get(cell)) for cell in (_COUNT, _FIRST, _SIDE))
        with T.If(count > 0), T.Then(), T.serial(first, end) as feature:
            self._begin_sums(feature)
            with T.serial(count) as step:
                held = HeldTiles()
                for pair in range(len(self.pairs)):
                    self._multiply_values(held, pair, feature, row, side, step, ())
            self._end_sums(feature)

    def _begin_sums(self, feature: Expr) -> None:
        """Tiles of sums of a tile of features, one for each column of queries."""
        if self.part is not None:
            self._add_part(feature)
        for c in range(self.columns):
            if self.part is None:
                tiles.load_tile(c, self.o, [feature, T.int64(c), T.int64(0)], LANES)
            else:
                tiles.zero(c)

    def _end_sums(self, feature: Expr) -> None:
        for c in range(self.columns):
            tiles.store_tile(c, self._sums()[-1], [feature, T.int64(c), T.int64(0)], LANES)

    def _add_part(self, feature: Expr) -> None:
        """O^T += what the block before the one that waits has given."""
        for c in range(self.columns):
            with T.serial(T.int64(tiles.ROWS)) as row:
                at = [feature, T.int64(c), row * LANES]
                store(self.o, at, load(self.o, at, LANES) + load(self.part, at, LANES), LANES)

    def _multiply_values(
        self, held: HeldTiles, pair: int, feature: Expr, row: Expr, side: Expr, step: Expr, place: tuple[int, ...]
    ) -> None:
        """The tiles of O^T += those of V^T and P^T, of a pair of terms and of chunk `step` of a block."""

        def left(term: int) -> None:
            load_tile = tiles.stream_tile if self.terms == 1 else tiles.load_tile
            load_tile(tiles.LEFT, self.values.tiles, self.values.value_place(row + step, feature, term), KEYS)

        def right(term: int, c: int) -> None:
            tiles.load_tile(tiles.RIGHT, self.p, [side, step, T.int64(term), T.int64(c), T.int64(0)], LANES)

        self._multiply_pair(held, pair, left, right, place)

    def _multiply_pair(
        self,
        held: HeldTiles,
        pair: int,
        left: Callable[[int], None],
        right: Callable[[int, int], None],
        place: tuple[int, ...],
    ) -> None:
        """Sums of all columns += products of a pair of terms, of factors at a place."""
        i, j = self.pairs[pair]
        held.load(tiles.LEFT, (*place, i), partial(left, i))
        columns = list(range(self.columns))
        if held.has(tiles.RIGHT, (*place, j, columns[-1])):
            columns.reverse()
        for c in columns:
            held.load(tiles.RIGHT, (*place, j, c), partial(right, j, c))
            self.unit.product(c, tiles.LEFT, tiles.RIGHT)

    # ---- Scores and probs

    def _score(self, chunk: Expr, row: Expr, r: int, c: int) -> list[Expr]:
        """Where the scores of key 16 r + row are, for a column of queries."""
        return [T.int64(2 * c + r), (chunk & T.int64(1)) * 256 + row * LANES]

    def _change(self, group: KeyGroup, chunk: Expr) -> None:
        """Scores in units of log2, after all steps."""
        for r in range(2):
            with T.serial(T.int64(tiles.ROWS // _GROUP)) as part:
                rows = [materialize(part * _GROUP + i) for i in range(_GROUP)]
                tile = RegisterTile(_GROUP, self.visibility.columns)
                tile.each(
                    lambda i, c: load(self.s, self._score(chunk, rows[i], r, c), LANES) * constant(self.factor, LANES)
                )
                keys = [
                    materialize(T.min(group.first_key + 16 * r + row, self.visibility.kv_length - 1)) for row in rows
                ]
                base = group.base + 16 * r
                self.visibility.score(tile, keys, materialize(base + rows[0]))
                if group.hides:
                    tile.each(
                        lambda i, c: self.visibility.hide(
                            tile.get(i, c), base + rows[i], group.first_key + 16 * r + rows[i], tile.columns[c]
                        )
                    )
                for i in range(_GROUP):
                    for c in range(self.columns):
                        store(self.s, self._score(chunk, rows[i], r, c), tile.get(i, c), LANES)

    def _scores(self, chunk: Expr, row: Expr, r: int, c: int, factor: Expr) -> Expr:
        """In units of log2, each rounded before a reference is taken from it: of scores from 2^24 on the rest of a
        fused product is a power of two by itself."""
        product = load(self.s, self._score(chunk, row, r, c), LANES) * factor
        return T.call_llvm_pure_intrin("float32x16", "llvm.arithmetic.fence", product)

    def _factor(self, chunk: Expr) -> Expr:
        return let(splat(self.factors[chunk & T.int64(1)], LANES))

    def _weigh(self, chunk: Expr, among: Sequence[Callable[[], None]] = ()) -> None:
        """P^T = 2^(S^T - m) of a chunk, and its sums; `among` come between them."""
        factor = self._factor(chunk)
        sums = RegisterTile(1, self.visibility.columns)
        sums.fill(0.0)
        references = [let(load(self.reference, [T.int64(first)], lanes)) for first, lanes in self.visibility.columns]
        side = materialize(T.int64(1) - self._get(_SIDE))

        def add(c: int, value: Expr) -> None:
            sums.set(0, c, sums.get(0, c) + value)

        def add_in_memory(c: int, value: Expr) -> None:
            at = [T.int64(self.visibility.columns[c][0])]
            store(self.chunk_sum, at, load(self.chunk_sum, at, LANES) + value, LANES)

        def weigh(r: int, part: Expr | int, pair: int, c: int, add: Callable[[int, Expr], None] = add) -> None:
            probs = []
            for half in range(2):
                score = self._scores(chunk, part * 4 + (2 * pair + half), r, c, factor)
                probs.append(let(powers.exp2(let(score - references[c]), self.terms, self.measure)))
            add(c, probs[0] + probs[1])
            for term, words in enumerate([powers.upper_halves(probs)] if self.cuts else self._words(probs)):
                at = [side, chunk, T.int64(term), T.int64(c), part * (2 * LANES) + (8 * r + pair) * LANES]
                store(self.p, at, words, LANES)

        if among:
            # LLVM would leave all additions to the end, and keep the probs on the stack for them.
            for first, lanes in self.visibility.columns:
                store(self.chunk_sum, [T.int64(first)], constant(0.0, lanes), lanes)
            places = list(itertools.product(range(2), range(4), range(2)))
            for number, (r, part, pair) in enumerate(places):
                for c in range(self.columns):
                    weigh(r, T.int64(part), pair, c, add_in_memory)
                borders = (len(among) * n // len(places) for n in (number, number + 1))
                for step in among[slice(*borders)]:
                    step()
            return
        for r in range(2):
            with T.serial(T.int64(tiles.ROWS // 4)) as part:
                for pair, c in itertools.product(range(2), range(self.columns)):
                    weigh(r, part, pair, c)
        for c, (first, lanes) in enumerate(self.visibility.columns):
            store(self.chunk_sum, [T.int64(first)], sums.get(0, c), lanes)

    def _exceeds(self) -> Expr:
        """Whether the chunk's sum of any row is too large, or NaN."""
        beyond = None
        for first, lanes in self.visibility.columns:
            # By their bits, of which those of NaN are the largest: TVM takes not (x <= y) to be x > y.
            total = T.reinterpret(vectors.vector_type("uint32", lanes), load(self.chunk_sum, [T.int64(first)], lanes))
            own = total > splat(T.uint32(int(np.float32(LIMIT).view(np.uint32))), lanes)
            beyond = own if beyond is None else T.Or(beyond, own)
        return vectors.any_lane(beyond, LANES)

    def _raise(self, chunk: Expr, *, fresh: bool) -> None:
        """Makes the largest score of each row that exceeds its reference the new one, brings all sums so far to its
        measure, and weighs the chunk anew."""
        side, factor = self._get(_SIDE), self._factor(chunk)
        for c, (first, lanes) in enumerate(self.visibility.columns):
            at = [T.int64(first)]
            top = RegisterTile(1, [(0, lanes)])
            top.fill(-math.inf)
            for r in range(2):
                with T.serial(T.int64(tiles.ROWS)) as row:
                    score = let(self._scores(chunk, row, r, c, factor))
                    top.set(0, 0, T.Select(score > top.get(0, 0), score, top.get(0, 0)))
            largest = let(top.get(0, 0))
            old = materialize(load(self.reference, at, lanes), "float32", lanes)
            new = materialize(T.Select(largest > old, largest, old), "float32", lanes)
            store(self.reference, at, new, lanes)
            if fresh and self.visibility.no_key((first, lanes)) is None:
                continue  # nothing was summed up
            unset = T.Or(old == new, old == constant(-math.inf, lanes))
            fall = T.Select(unset, constant(1.0, lanes), powers.exp2(let(old - new), self.terms))
            shrink = materialize(fall, "float32", lanes)
            store(self.row_sum, at, load(self.row_sum, at, lanes) * shrink, lanes)
            with T.serial(T.int64(self.features)) as feature, T.serial(T.int64(tiles.ROWS)) as row:
                place = [feature, T.int64(c), row * LANES]
                for sums in self._sums():
                    store(sums, place, load(sums, place, LANES) * shrink, LANES)
            for number, count in ((side, self._get(_COUNT)), (T.int64(1) - side, chunk)):
                with T.serial(count) as earlier, T.serial(T.int64(tiles.ROWS)) as row:
                    probs = [let(half * shrink) for half in self._probs(number, earlier, c, row)]
                    for term, words in enumerate(self._words(probs)):
                        store(self.p, [number, earlier, T.int64(term), T.int64(c), row * LANES], words, LANES)
        # A row that has still seen nothing has scores of -inf alone: of any finite reference its probs are zeros.
        references = RegisterTile(1, self.visibility.columns)
        for c, (first, lanes) in enumerate(self.visibility.columns):
            reference = let(load(self.reference, [T.int64(first)], lanes))
            references.set(0, c, reference)
            value = T.Select(reference == constant(-math.inf, lanes), constant(0.0, lanes), reference)
            store(self.reference, [T.int64(first)], value, lanes)
        self._weigh(chunk)
        for c, (first, lanes) in enumerate(self.visibility.columns):
            store(self.reference, [T.int64(first)], references.get(0, c), lanes)

    def _words(self, probs: Sequence[Expr]) -> list[Expr]:
        """Two vectors of probs as `p` has them, a word of each term."""
        if self.unit is tiles.FLOAT16:
            return [powers.pairs(*probs, dtype=self.unit.dtype)]
        return powers.words_of_terms(probs, self.terms)

    def _probs(self, side: Expr, chunk: Expr, c: int, pair: Expr) -> list[Expr]:
        """Those of two neighbouring keys of a chunk, for a column of queries."""
        sums: list[Expr] = []
        for term in reversed(range(self.terms)):
            words = let(load(self.p, [side, chunk, T.int64(term), T.int64(c), pair * LANES], LANES))
            halves = powers.halves(words, self.unit.dtype)
            sums = [half + total for half, total in zip(halves, sums, strict=True)] if sums else halves
        return [let(total) for total in sums]

    # ---- What is no number for tiles: rare, so plain

    def _flags(self, first: Expr, count: Expr) -> Expr:
        """Those of some chunks together."""
        cell = T.alloc_buffer((1,), "int32")
        store(cell, [T.int64(0)], T.int32(0), 1)
        with T.serial(count) as i:
            store(cell, [T.int64(0)], cell[0] | self.values.flags[first + i], 1)
        return let(cell[0])

    def _is_extraordinary(self, group: KeyGroup) -> Expr:
        """Whether Q, or K of a chunk, holds what terms do not carry."""
        flags = self.values.flags[self._row(group)]
        return T.Or(self._get(_LARGE) != T.int64(0), flags & T.int32(NO_TERMS_OF_KEYS) != T.int32(0))

    def _row(self, group: KeyGroup) -> Expr:
        """That of a chunk in `values`."""
        return materialize(self.first_row + T.truncdiv(group.first_key, T.int64(KEYS)))

    def _multiply_keys_plainly(self, group: KeyGroup, chunk: Expr) -> None:
        """Scores of a chunk, of float32 products."""
        op, key = self.op, self.operands.key
        for r in range(2):
            with T.serial(T.int64(tiles.ROWS)) as row:
                number = materialize(T.min(group.first_key + 16 * r + row, self.visibility.kv_length - 1))
                tile = RegisterTile(1, self.visibility.columns)
                tile.fill(0.0)
                with T.serial(T.int64(op.head_dim)) as e:
                    element = let(key.buffer[tuple(key.at(number, e))])
                    for c, (first, lanes) in enumerate(self.visibility.columns):
                        product = splat(element, lanes) * load(self.wide, [e, T.int64(first)], lanes)
                        tile.set(0, c, tile.get(0, c) + product)
                for c in range(self.columns):
                    store(self.s, self._score(chunk, row, r, c), tile.get(0, c), LANES)

    def _add_plainly(self, block: VisitedBlock) -> None:
        """O^T += V^T P^T, of float32 products; no key is hidden whose value is not finite."""
        side, value = materialize(self._get(_SIDE)), self.operands.value
        pairs = materialize(T.truncdiv(block.count + 1, T.int64(2)))
        with T.serial(pairs) as pair:
            chunk, row = T.truncdiv(pair, T.int64(tiles.ROWS)), T.truncmod(pair, T.int64(tiles.ROWS))
            for c in range(self.columns):
                for i, probs in enumerate(self._probs(side, materialize(chunk), c, materialize(row))):
                    key = materialize(block.first_key + pair * 2 + i)
                    with T.If(pair * 2 + i < block.count), T.Then():
                        with T.serial(T.int64(self.features)) as feature, T.serial(T.int64(tiles.ROWS)) as f:
                            at = [feature, T.int64(c), f * LANES]
                            element = value.buffer[tuple(value.at(key, feature * tiles.ROWS + f))]
                            store(self.o, at, load(self.o, at, LANES) + probs * splat(element, LANES), LANES)

    def _add_visible(self, block: VisitedBlock) -> None:
        """O^T += V^T P^T of the keys that each row sees: what the others hold must not matter."""
        side = materialize(self._get(_SIDE))
        with T.serial(T.int64(self.queries)) as lane, T.serial(block.count) as row:
            c, q = materialize(T.truncdiv(lane, T.int64(LANES))), materialize(T.truncmod(lane, T.int64(LANES)))
            with T.If(self.visibility.sees(lane, row, block.first_key + row)), T.Then():
                pair = T.truncdiv(T.truncmod(row, T.int64(KEYS)), T.int64(2))
                prob = None
                for term in reversed(range(self.terms)):
                    word = self.p[side, T.truncdiv(row, T.int64(KEYS)), T.int64(term), c, pair * LANES + q]
                    own = word >> T.cast(T.truncmod(row, T.int64(2)) * 16, "int32")
                    number = T.reinterpret(self.unit.dtype, T.cast(own, "uint16"))
                    element = FORMATS[self.unit.dtype].widened(number, 1)
                    prob = let(element if prob is None else element + prob)
                value = self.operands.value
                with T.serial(T.int64(self.features)) as feature, T.serial(T.int64(tiles.ROWS)) as f:
                    at = [feature, c, f * LANES + q]
                    element = load_wide(value.buffer, value.at(block.first_key + row, feature * tiles.ROWS + f), 1)
                    store(self.o, at, self.o[tuple(at)] + prob * element, 1)


class HeldTiles:
    """What registers hold in a straight piece of code, by number."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, ...]] = {}

    def has(self, tile: int, what: tuple[int, ...]) -> bool:
        return self._held.get(tile) == what

    def load(self, tile: int, what: tuple[int, ...], load: Callable[[], None]) -> None:
        """Loads it, unless it is there."""
        if not self.has(tile, what):
            load()
        self._held[tile] = what

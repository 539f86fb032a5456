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

from mhsa_compile.kernels.common.score_scale import score_factor
from mhsa_compile.kernels.cpu.attention.key_loop import KeyGroup, VisitedBlock
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import TaskOperands
from mhsa_compile.kernels.cpu.formats.choice import FORMATS, load_wide
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
from mhsa_compile.kernels.cpu.tile_attention.output import TileOutput
from mhsa_compile.kernels.cpu.tile_attention.powers import LANES
from mhsa_compile.kernels.cpu.tile_attention.products import HeldTiles
from mhsa_compile.kernels.cpu.tile_attention.terms import Magnitudes, term_count
from mhsa_compile.kernels.cpu.tile_attention.values import (
    KEYS,
    NO_TERMS,
    NO_TERMS_OF_KEYS,
    NON_FINITE,
)
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.cpu.units.float32_terms import LARGE
from mhsa_compile.kernels.interface.ops import AttentionOp

LIMIT = float(1 << 8)
_GROUP = 4  # rows of scores that are changed in registers
_FRESH, _LARGE = range(2)


class TaskScratch:
    """What the tasks of a strip write and read, allocated where it is constructed.

    q_t (terms, E / 2, queries)           words of Q^T
    wide (E, queries)                     Q^T in float32, of float32 by several terms
    k (32, E)                             rows of K, the last one again and again, where K is read where it lies
    s (2 columns, 2 * 256)                scores of two chunks, a tile a row
    """

    def __init__(self, op: AttentionOp, queries: int) -> None:
        columns, count = queries // LANES, term_count(op)
        self.q_t = [scratch((op.head_dim // 2, queries), "int32") for _ in range(count)]
        self.wide = scratch((op.head_dim, queries)) if count > 1 else None
        self.k = None if op.dtype == "float32" else scratch((KEYS, op.head_dim), "uint16")
        self.s = scratch((2 * columns, 2 * 256))
        self.reference, self.row_sum, self.chunk_sum = (scratch((queries,)) for _ in range(3))
        self.state, self.factors = T.alloc_buffer((2,), "int64"), T.alloc_buffer((2,), "float32")


class TileAttentionTask:
    """A tile of queries of (entry, head, first query) at `place`, whose keys begin at row `first_row` of the values."""

    def __init__(
        self,
        memory: TaskScratch,
        output: TileOutput,
        operands: TaskOperands,
        visibility: TileMask,
        place: tuple[Expr, Expr, Expr],
        first_row: Expr,
    ) -> None:
        op, self.memory, self.output, self.place = operands.op, memory, output, place
        self.operands, self.op, self.visibility, self.values = operands, op, visibility, output.values
        self.unit, self.products = output.values.unit, output.products
        self.queries, self.columns, self.first_row = output.queries, output.columns, first_row
        self.terms = self.values.terms
        self.factor = score_factor(op)
        self.cuts = self.terms == 1 and self.unit is tiles.BFLOAT16
        self.measure = powers.BEFORE_CUT if self.cuts else 1.0
        """Probs of this measure are summed up, for what is cut off on the way to tiles."""
        self.changes = any(step.elementwise or step.cpu_tile is not None for step in op.scores)
        """Whether scores are brought to units of log2, and changed, before they become probs."""

    def _get(self, cell: int) -> Expr:
        return self.memory.state[T.int64(cell)]

    def _set(self, cell: int, value: Expr) -> None:
        store(self.memory.state, [T.int64(cell)], value, 1)

    # ---- The task

    def begin(self) -> None:
        """Packs Q^T, asks for the next task's queries; rows have seen nothing, or nothing but their score of no key."""
        for cell, value in ((_FRESH, 1), (_LARGE, 0)):
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
            store(self.memory.reference, at, nothing if reference is None else reference, lanes)
            store(self.memory.row_sum, at, constant(0.0, lanes) if total is None else total, lanes)

    def _pack_queries(self) -> None:
        op, query, rows = self.op, self.operands.query, self.operands.query_rows
        if self.memory.wide is None:

            def bits(row: Expr, step: Expr, _: int) -> Expr:
                return T.reinterpret("int32x16", terms.narrow_row(query.buffer, query.at(row, step * 2)))

            return vectors.pack_transposed(self.memory.q_t[0], self.queries, op.head_dim // 2, LANES, rows, bits)

        def numbers(row: Expr, first: Expr, count: int) -> Expr:
            return load(query.buffer, query.at(row, first), count)

        vectors.pack_transposed(self.memory.wide, self.queries, op.head_dim, LANES, rows, numbers)
        magnitudes = Magnitudes.of_none()
        with T.serial(T.int64(op.head_dim // 2)) as step:
            for first, lanes in self.visibility.columns:
                pair = [let(load(self.memory.wide, [step * 2 + i, T.int64(first)], lanes)) for i in range(2)]
                magnitudes.add(pair)
                for term, words in enumerate(powers.words_of_terms(pair, self.terms)):
                    store(self.memory.q_t[term], [step, T.int64(first)], words, lanes)
        with T.If(magnitudes.reach(LARGE)), T.Then():
            self._set(_LARGE, T.int64(1))

    def end(self) -> None:
        """Y will be O / l, and zeros where a row saw nothing."""

        def inverse(c: int) -> Expr:
            total, zero = let(load(self.memory.row_sum, [T.int64(c * LANES)], LANES)), constant(0.0, LANES)
            return T.Select(total == zero, zero, constant(self.measure, LANES) / total)

        self.output.write(waits=True)  # the tile before, where this one saw no block
        self.output.leave(self.place, inverse)

    # ---- The visitor of keys

    def begin_block(self) -> None:
        pass

    def add_group(self, group: KeyGroup) -> None:
        """A chunk: its scores, and meanwhile the probs of the one before and a share of the block before."""
        chunk, output = materialize(T.truncdiv(group.base, T.int64(KEYS))), self.output
        first = materialize((chunk - 1) * output.share)
        changed = self.changes or group.hides
        store(self.memory.factors, [chunk & T.int64(1)], T.float32(1.0 if changed else self.factor), 1)

        def add_share() -> None:
            output.add_waiting(first, materialize(T.min(first + output.share, T.int64(output.features))))

        def apart() -> None:
            self._multiply_keys(group, chunk)
            if changed:
                self._change(group, chunk)
            with T.If(chunk > 0), T.Then():
                add_share()
                self._add_probs(materialize(chunk - 1))

        if group.hides:
            return apart()

        def together(values: Sequence[Callable[[], None]]) -> None:
            # Scores first: they are waited for at the next chunk.
            self._weigh(materialize(chunk - 1), [*self._key_steps(group, chunk), *values])
            if changed:
                self._change(group, chunk)
            self._check(materialize(chunk - 1))

        ready = chunk > 0
        if self.terms > 1:
            ready = T.And(ready, T.Not(self._is_extraordinary(group)))
        with T.If(ready):
            with T.Then():
                with T.If(self._get(_FRESH) != T.int64(0)), T.Then():
                    self._lift(materialize(chunk - 1), fresh=True)
                    self._set(_FRESH, T.int64(0))
                with T.If(output.fits(first)):
                    with T.Then():
                        together(output.steps(first))
                    with T.Else():
                        add_share()
                        together([])
            with T.Else():
                apart()

    def end_block(self, block: VisitedBlock) -> None:
        """What is left of the block before; this one waits in its place."""
        last, output = materialize(block.groups - 1), self.output
        first = materialize(T.min(last * output.share, T.int64(output.features)))
        with T.If(T.And(output.fits(first), self._get(_FRESH) == T.int64(0))):
            with T.Then():
                self._weigh(last, output.steps(first))
                self._check(last)
                output.add_waiting(materialize(first + output.share), T.int64(output.features))
            with T.Else():
                self._add_probs(last)
                output.add_waiting(first, T.int64(output.features))
        output.write()
        row = materialize(self.first_row + T.truncdiv(block.first_key, T.int64(KEYS)))
        output.wait(row, block.groups)
        if block.hides is None and self.terms == 1:
            return
        flags = self._flags(row, block.groups)
        with T.If(flags & T.int32(NON_FINITE | NO_TERMS) != T.int32(0)), T.Then():
            if block.hides is not None:
                with T.If(T.And(block.hides, flags & T.int32(NON_FINITE) != T.int32(0))), T.Then():
                    self._add_visible(block)
                    output.forget()
            if self.terms > 1:
                with T.If(output.count > 0), T.Then():
                    self._add_plainly(block)
                    output.forget()

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
            store(
                self.memory.row_sum,
                at,
                load(self.memory.row_sum, at, lanes) + load(self.memory.chunk_sum, at, lanes),
                lanes,
            )

    # ---- Products

    def _multiply_keys(self, group: KeyGroup, chunk: Expr) -> None:
        """Scores of a chunk, in units of the products."""
        op, key = self.op, self.operands.key
        if group.hides and self.memory.k is not None:
            # Rows that are not there are the last one again.
            for r, row in enumerate(group.rows):
                with T.serial(T.int64(op.head_dim // KEYS)) as part:
                    elements = load(key.buffer, key.at(row, part * KEYS), KEYS)
                    store(self.memory.k, [T.int64(r), part * KEYS], T.reinterpret("uint16x32", elements), KEYS)

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
                tiles.load_tile(tiles.LEFT, self.memory.k, [T.int64(tiles.ROWS * r), column], op.head_dim)
            else:
                tiles.load_tile(tiles.LEFT, key.buffer, key.at(group.rows[tiles.ROWS * r], column), pitch)

        def right(step: int, term: int, c: int) -> None:
            at = [T.int64(step * tiles.WORDS), T.int64(LANES * c)]
            tiles.load_tile(tiles.RIGHT, self.memory.q_t[term], at, self.queries)

        def multiply(r: int, step: int, pair: int) -> None:
            if step == pair == 0:
                for c in range(self.columns):
                    tiles.zero(c)
            self.products.add(held, pair, partial(left, r, step), partial(right, step), (r, step))
            if step == steps - 1 and pair == pairs - 1:
                for c in range(self.columns):
                    tiles.store_tile(c, self.memory.s, self._score(chunk, T.int64(0), r, c), LANES)

        steps, pairs = op.head_dim // self.unit.depth, len(self.products.pairs)
        places = itertools.product(range(2), range(steps), range(pairs))
        return [partial(multiply, *place) for place in places]

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
                    lambda i, c: (
                        load(self.memory.s, self._score(chunk, rows[i], r, c), LANES) * constant(self.factor, LANES)
                    )
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
                        store(self.memory.s, self._score(chunk, rows[i], r, c), tile.get(i, c), LANES)

    def _scores(self, chunk: Expr, row: Expr, r: int, c: int, factor: Expr) -> Expr:
        """In units of log2, each rounded before a reference is taken from it: of scores from 2^24 on the rest of a
        fused product is a power of two by itself."""
        product = load(self.memory.s, self._score(chunk, row, r, c), LANES) * factor
        return T.call_llvm_pure_intrin("float32x16", "llvm.arithmetic.fence", product)

    def _factor(self, chunk: Expr) -> Expr:
        return let(splat(self.memory.factors[chunk & T.int64(1)], LANES))

    def _weigh(self, chunk: Expr, among: Sequence[Callable[[], None]] = ()) -> None:
        """P^T = 2^(S^T - m) of a chunk, and its sums; `among` come between them."""
        factor = self._factor(chunk)
        sums = RegisterTile(1, self.visibility.columns)
        sums.fill(0.0)
        references = [
            let(load(self.memory.reference, [T.int64(first)], lanes)) for first, lanes in self.visibility.columns
        ]
        side = materialize(T.int64(1) - self.output.side)

        def add(c: int, value: Expr) -> None:
            sums.set(0, c, sums.get(0, c) + value)

        def add_in_order(c: int, value: Expr) -> None:
            sums.set(0, c, powers.add_in_order(sums.get(0, c), value))

        def weigh(r: int, part: Expr | int, pair: int, c: int, add: Callable[[int, Expr], None] = add) -> None:
            probs = []
            for half in range(2):
                score = self._scores(chunk, part * 4 + (2 * pair + half), r, c, factor)
                probs.append(let(powers.exp2(let(score - references[c]), self.terms, self.measure)))
            add(c, probs[0] + probs[1])
            for term, words in enumerate([tiles.upper_halves(*probs)] if self.cuts else self._words(probs)):
                at = [side, chunk, T.int64(term), T.int64(c), part * (2 * LANES) + (8 * r + pair) * LANES]
                store(self.output.probs, at, words, LANES)

        if among:
            places = list(itertools.product(range(2), range(4), range(2)))
            for number, (r, part, pair) in enumerate(places):
                for c in range(self.columns):
                    weigh(r, T.int64(part), pair, c, add_in_order)
                borders = (len(among) * n // len(places) for n in (number, number + 1))
                for step in among[slice(*borders)]:
                    step()
        else:
            for r in range(2):
                with T.serial(T.int64(tiles.ROWS // 4)) as part:
                    for pair, c in itertools.product(range(2), range(self.columns)):
                        weigh(r, part, pair, c)
        for c, (first, lanes) in enumerate(self.visibility.columns):
            store(self.memory.chunk_sum, [T.int64(first)], sums.get(0, c), lanes)

    def _exceeds(self) -> Expr:
        """Whether the chunk's sum of any row is too large, or NaN."""
        beyond = None
        for first, lanes in self.visibility.columns:
            # By their bits, of which those of NaN are the largest: TVM takes not (x <= y) to be x > y.
            total = T.reinterpret(
                vectors.vector_type("uint32", lanes), load(self.memory.chunk_sum, [T.int64(first)], lanes)
            )
            own = total > splat(T.uint32(int(np.float32(LIMIT).view(np.uint32))), lanes)
            beyond = own if beyond is None else T.Or(beyond, own)
        return vectors.any_lane(beyond, LANES)

    def _raise(self, chunk: Expr, *, fresh: bool) -> None:
        """Lifts the references of rows, and weighs the chunk anew."""
        self._lift(chunk, fresh=fresh)
        # A row that has still seen nothing has scores of -inf alone: of any finite reference its probs are zeros.
        references = RegisterTile(1, self.visibility.columns)
        for c, (first, lanes) in enumerate(self.visibility.columns):
            reference = let(load(self.memory.reference, [T.int64(first)], lanes))
            references.set(0, c, reference)
            value = T.Select(reference == constant(-math.inf, lanes), constant(0.0, lanes), reference)
            store(self.memory.reference, [T.int64(first)], value, lanes)
        self._weigh(chunk)
        for c, (first, lanes) in enumerate(self.visibility.columns):
            store(self.memory.reference, [T.int64(first)], references.get(0, c), lanes)

    def _lift(self, chunk: Expr, *, fresh: bool) -> None:
        """Makes the largest score of each row that exceeds its reference the new one, and brings all sums so far to its
        measure."""
        output, memory, factor = self.output, self.memory, self._factor(chunk)
        side, own = output.side, output.own()
        for c, (first, lanes) in enumerate(self.visibility.columns):
            at = [T.int64(first)]
            top = RegisterTile(1, [(0, lanes)])
            top.fill(-math.inf)
            for r in range(2):
                with T.serial(T.int64(tiles.ROWS)) as row:
                    score = let(self._scores(chunk, row, r, c, factor))
                    top.set(0, 0, T.Select(score > top.get(0, 0), score, top.get(0, 0)))
            largest = let(top.get(0, 0))
            old = materialize(load(memory.reference, at, lanes), "float32", lanes)
            new = materialize(T.Select(largest > old, largest, old), "float32", lanes)
            store(memory.reference, at, new, lanes)
            if fresh and self.visibility.no_key((first, lanes)) is None:
                continue  # nothing was summed up
            unset = T.Or(old == new, old == constant(-math.inf, lanes))
            fall = T.Select(unset, constant(1.0, lanes), powers.exp2(let(old - new), self.terms))
            shrink = materialize(fall, "float32", lanes)
            store(memory.row_sum, at, load(memory.row_sum, at, lanes) * shrink, lanes)
            if fresh:
                continue
            with T.serial(own * output.features) as feature, T.serial(T.int64(tiles.ROWS)) as row:
                place = [feature, T.int64(c), row * LANES]
                for sums in output.sums:
                    store(sums, place, load(sums, place, LANES) * shrink, LANES)
            for number, count in ((side, own * output.count), (T.int64(1) - side, chunk)):
                with T.serial(count) as earlier, T.serial(T.int64(tiles.ROWS)) as row:
                    probs = [let(half * shrink) for half in self._probs(number, earlier, c, row)]
                    for term, words in enumerate(self._words(probs)):
                        at = [number, earlier, T.int64(term), T.int64(c), row * LANES]
                        store(output.probs, at, words, LANES)

    def _words(self, probs: Sequence[Expr]) -> list[Expr]:
        """Two vectors of probs as `p` has them, a word of each term."""
        if self.unit is tiles.FLOAT16:
            return [powers.pairs(*probs, dtype=self.unit.dtype)]
        return powers.words_of_terms(probs, self.terms)

    def _probs(self, side: Expr, chunk: Expr, c: int, pair: Expr) -> list[Expr]:
        """Those of two neighbouring keys of a chunk, for a column of queries."""
        sums: list[Expr] = []
        for term in reversed(range(self.terms)):
            words = let(load(self.output.probs, [side, chunk, T.int64(term), T.int64(c), pair * LANES], LANES))
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
                        product = splat(element, lanes) * load(self.memory.wide, [e, T.int64(first)], lanes)
                        tile.set(0, c, tile.get(0, c) + product)
                for c in range(self.columns):
                    store(self.memory.s, self._score(chunk, row, r, c), tile.get(0, c), LANES)

    def _add_plainly(self, block: VisitedBlock) -> None:
        """O^T += V^T P^T, of float32 products; no key is hidden whose value is not finite."""
        side, value, o = materialize(self.output.side), self.operands.value, self.output.o
        pairs = materialize(T.truncdiv(block.count + 1, T.int64(2)))
        with T.serial(pairs) as pair:
            chunk, row = T.truncdiv(pair, T.int64(tiles.ROWS)), T.truncmod(pair, T.int64(tiles.ROWS))
            for c in range(self.columns):
                for i, probs in enumerate(self._probs(side, materialize(chunk), c, materialize(row))):
                    key = materialize(block.first_key + pair * 2 + i)
                    with T.If(pair * 2 + i < block.count), T.Then():
                        with T.serial(T.int64(self.output.features)) as feature, T.serial(T.int64(tiles.ROWS)) as f:
                            at = [feature, T.int64(c), f * LANES]
                            element = value.buffer[tuple(value.at(key, feature * tiles.ROWS + f))]
                            store(o, at, load(o, at, LANES) + probs * splat(element, LANES), LANES)

    def _add_visible(self, block: VisitedBlock) -> None:
        """O^T += V^T P^T of the keys that each row sees: what the others hold must not matter."""
        side = materialize(self.output.side)
        with T.serial(T.int64(self.queries)) as lane, T.serial(block.count) as row:
            c, q = materialize(T.truncdiv(lane, T.int64(LANES))), materialize(T.truncmod(lane, T.int64(LANES)))
            with T.If(self.visibility.sees(lane, row, block.first_key + row)), T.Then():
                pair = T.truncdiv(T.truncmod(row, T.int64(KEYS)), T.int64(2))
                prob = None
                for term in reversed(range(self.terms)):
                    word = self.output.probs[side, T.truncdiv(row, T.int64(KEYS)), T.int64(term), c, pair * LANES + q]
                    own = word >> T.cast(T.truncmod(row, T.int64(2)) * 16, "int32")
                    number = T.reinterpret(self.unit.dtype, T.cast(own, "uint16"))
                    element = FORMATS[self.unit.dtype].widened(number, 1)
                    prob = let(element if prob is None else element + prob)
                value = self.operands.value
                with T.serial(T.int64(self.output.features)) as feature, T.serial(T.int64(tiles.ROWS)) as f:
                    at = [feature, c, f * LANES + q]
                    element = load_wide(value.buffer, value.at(block.first_key + row, feature * tiles.ROWS + f), 1)
                    store(self.output.o, at, self.output.o[tuple(at)] + prob * element, 1)

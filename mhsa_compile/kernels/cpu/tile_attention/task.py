"""One task of attention on tiles: a head's 16 or 32 queries against all keys that they see, 32 keys a chunk.

    for each block of keys, for each chunk of it:
        S^T = K Q^T                          tiles, to scratch that is too small to be waited for
        O^T += V^T P^T of the block before   a share of its features
        P^T and its sums, of the chunk before (`softmax`)

Factors of float32 are multiplied by terms, those of the spec's word, of which two neighbours in the order share one. Of
bf16x6 a block's sums begin anew, in `part`, and vectors add them to O^T when the next block's are due: no chain of sums
is longer than a block. Chunks of which K or V, and tasks of which Q, holds what terms do not carry are computed in
float32, plainly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

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
from mhsa_compile.kernels.cpu.tile_attention.powers import LANES
from mhsa_compile.kernels.cpu.tile_attention.products import HeldTiles
from mhsa_compile.kernels.cpu.tile_attention.softmax import TileSoftmax
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

_GROUP = 4  # rows of scores that are changed in registers


class TaskScratch:
    """What the tasks of a strip write and read, allocated where it is constructed.

    q_t (terms, E / 2, queries)           words of Q^T
    wide (E, queries)                     Q^T in float32, of float32 by several terms
    k (32, E)                             rows of K, the last one again and again, where K is read where it lies
    is_large (1,)                         whether Q holds what terms do not carry
    """

    def __init__(self, op: AttentionOp, queries: int) -> None:
        count = term_count(op)
        self.q_t = [scratch((op.head_dim // 2, queries), "int32") for _ in range(count)]
        self.wide = scratch((op.head_dim, queries)) if count > 1 else None
        self.k = None if op.dtype == "float32" else scratch((KEYS, op.head_dim), "uint16")
        self.is_large = T.alloc_buffer((1,), "int32")


class TileAttentionTask:
    """A tile of queries of (entry, head, first query) at `place`, whose keys begin at row `first_row` of the values."""

    def __init__(
        self,
        memory: TaskScratch,
        softmax: TileSoftmax,
        operands: TaskOperands,
        visibility: TileMask,
        place: tuple[Expr, Expr, Expr],
        first_row: Expr,
    ) -> None:
        op, self.memory, self.softmax, self.output, self.place = operands.op, memory, softmax, softmax.output, place
        self.operands, self.op, self.visibility, self.values = operands, op, visibility, self.output.values
        self.unit, self.products = self.values.unit, self.output.products
        self.queries, self.columns, self.first_row = self.output.queries, self.output.columns, first_row
        self.terms = self.values.terms
        self.factor = score_factor(op)
        self.changes = any(step.elementwise or step.cpu_tile is not None for step in op.scores)
        """Whether scores are brought to units of log2, and changed, before they become probs."""

    # ---- The task

    def begin(self) -> None:
        """Packs Q^T, asks for the next task's queries."""
        store(self.memory.is_large, [T.int64(0)], T.int32(0), 1)
        self._pack_queries()
        self.operands.prefetch_next(self.queries)
        self.visibility.prepare()
        self.softmax.begin_tile([self.visibility.no_key(column) for column in self.visibility.columns])

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
            store(self.memory.is_large, [T.int64(0)], T.int32(1), 1)

    def end(self) -> None:
        self.softmax.end_tile(self.place)

    # ---- The visitor of keys

    def begin_block(self) -> None:
        pass

    def add_group(self, group: KeyGroup) -> None:
        """A chunk: its scores, and meanwhile the probs that are due and a share of the block before theirs."""
        softmax, output = self.softmax, self.output
        changed = self.changes or group.hides
        softmax.set_factor(1.0 if changed else self.factor)

        def apart(*, begins: bool) -> None:
            self._multiply_keys(group)
            if changed:
                self._change(group)
            if not begins:
                with T.If(softmax.is_due), T.Then():
                    softmax.add_share()
                    softmax.add_probs()

        def together(values: Sequence[Callable[[], None]]) -> None:
            # Scores first: they are waited for at the next chunk.
            softmax.weigh([*self._key_steps(group), *values])
            if changed:
                self._change(group)
            softmax.check()

        def beside() -> None:
            softmax.set_first_reference()
            first = materialize(softmax.place * output.share)
            with T.If(output.fits(first)):
                with T.Then():
                    together(output.steps(first))
                with T.Else():
                    softmax.add_share()
                    together([])

        if group.hides:
            apart(begins=False)
        else:
            ready = softmax.is_due
            if self.terms > 1:
                ready = T.And(ready, T.Not(self._is_extraordinary(group)))
            with T.If(ready):
                with T.Then():
                    beside()
                with T.Else():
                    apart(begins=self.terms == 1)
        softmax.settle()
        softmax.make_due(T.truncdiv(group.base, T.int64(KEYS)))

    def end_block(self, block: VisitedBlock) -> None:
        """The block ends with the chunk that is due; if products of tiles are not to add its values, they are added
        now."""
        softmax, output = self.softmax, self.output
        row = materialize(self.first_row + T.truncdiv(block.first_key, T.int64(KEYS)))
        softmax.end_block(row, block.groups)
        if not softmax.waits:
            softmax.flush_beside_values()
        if block.hides is None and self.terms == 1:
            return
        flags = self._flags(row, block.groups)
        unfit = flags & T.int32(NO_TERMS) != T.int32(0)
        hides = None
        if block.hides is not None:
            hides = let(T.And(block.hides, flags & T.int32(NON_FINITE) != T.int32(0)))
            unfit = T.Or(unfit, hides)
        with T.If(unfit), T.Then():
            softmax.flush()
            if hides is not None:
                with T.If(hides), T.Then():
                    self._add_visible(block)
                    output.forget()
            if self.terms > 1:
                with T.If(output.count > 0), T.Then():
                    self._add_plainly(block)
                    output.forget()

    # ---- Products

    def _multiply_keys(self, group: KeyGroup) -> None:
        """Scores of a chunk, in units of the products."""
        op, key = self.op, self.operands.key
        if group.hides and self.memory.k is not None:
            # Rows that are not there are the last one again.
            for r, row in enumerate(group.rows):
                with T.serial(T.int64(op.head_dim // KEYS)) as part:
                    elements = load(key.buffer, key.at(row, part * KEYS), KEYS)
                    store(self.memory.k, [T.int64(r), part * KEYS], T.reinterpret("uint16x32", elements), KEYS)

        def multiply() -> None:
            for step in self._key_steps(group):
                step()

        if self.terms == 1:
            return multiply()
        with T.If(self._is_extraordinary(group)):
            with T.Then():
                self._multiply_keys_plainly(group)
            with T.Else():
                multiply()

    def _key_steps(self, group: KeyGroup) -> list[Callable[[], None]]:
        """S^T += K Q^T, a pair of terms each."""
        op, key, held = self.op, self.operands.key, HeldTiles()
        pitch, row, turn = key.buffer.shape[-1], self._row(group), materialize(self.softmax.turn)

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
                    tiles.store_tile(c, self.softmax.scores, self.softmax.at(turn, T.int64(0), r, c), LANES)

        steps, pairs = op.head_dim // self.unit.depth, len(self.products.pairs)
        places = itertools.product(range(2), range(steps), range(pairs))
        return [partial(multiply, *place) for place in places]

    # ---- Scores

    def _change(self, group: KeyGroup) -> None:
        """Scores in units of log2, after all steps."""
        scores, turn = self.softmax.scores, materialize(self.softmax.turn)
        for r in range(2):
            with T.serial(T.int64(tiles.ROWS // _GROUP)) as part:
                rows = [materialize(part * _GROUP + i) for i in range(_GROUP)]
                tile = RegisterTile(_GROUP, self.visibility.columns)
                tile.each(
                    lambda i, c: (
                        load(scores, self.softmax.at(turn, rows[i], r, c), LANES) * constant(self.factor, LANES)
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
                        store(scores, self.softmax.at(turn, rows[i], r, c), tile.get(i, c), LANES)

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
        return T.Or(self.memory.is_large[0] != T.int32(0), flags & T.int32(NO_TERMS_OF_KEYS) != T.int32(0))

    def _row(self, group: KeyGroup) -> Expr:
        """That of a chunk in `values`."""
        return materialize(self.first_row + T.truncdiv(group.first_key, T.int64(KEYS)))

    def _multiply_keys_plainly(self, group: KeyGroup) -> None:
        """Scores of a chunk, of float32 products."""
        op, key, turn = self.op, self.operands.key, materialize(self.softmax.turn)
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
                    store(self.softmax.scores, self.softmax.at(turn, row, r, c), tile.get(0, c), LANES)

    def _add_plainly(self, block: VisitedBlock) -> None:
        """O^T += V^T P^T, of float32 products; no key is hidden whose value is not finite."""
        side, value, o = materialize(self.output.side), self.operands.value, self.output.o
        pairs = materialize(T.truncdiv(block.count + 1, T.int64(2)))
        with T.serial(pairs) as pair:
            chunk, row = T.truncdiv(pair, T.int64(tiles.ROWS)), T.truncmod(pair, T.int64(tiles.ROWS))
            for c in range(self.columns):
                for i, probs in enumerate(self.softmax.probs(side, materialize(chunk), c, materialize(row))):
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

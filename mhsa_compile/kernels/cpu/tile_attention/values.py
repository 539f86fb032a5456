"""K and V of all heads of a call as tiles take them, by chunks of 32 keys: V^T, 16 features by 32 keys a tile; K, where
it is not of 16 bits as it lies, 16 keys by 32 elements. Terms of the same numbers lie side by side. Zeros beyond the
last key.

A word of two rows of V, side by side, is what a tile of V^T has of two keys; sixteen such rows, transposed, are sixteen
features of it. What a chunk holds that is no number for tiles is kept beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.common.head_layout import HeadView, head_view
from mhsa_compile.kernels.cpu.formats.choice import prefetch_rows
from mhsa_compile.kernels.cpu.score_parts import keys_of
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import constant, let, load, materialize, splat, store
from mhsa_compile.kernels.cpu.tile_attention import terms
from mhsa_compile.kernels.cpu.tile_attention.powers import LANES
from mhsa_compile.kernels.cpu.tile_attention.terms import EXPONENTS, INFINITE, WIDTH, Magnitudes
from mhsa_compile.kernels.cpu.units import float32_terms, tiles
from mhsa_compile.kernels.cpu.units.float32_terms import LARGE

KEYS, FEATURES = 32, WIDTH
"""Of a square that is turned at once."""
NON_FINITE, NO_TERMS, NO_TERMS_OF_KEYS = 1, 2, 4
"""Flags of a chunk: V holds NaN or infinity, so that hidden keys must not count; V, or K, holds what terms do not
carry."""
_LOW = [8 * (i // 8) + i % 8 // 2 + 32 * (i % 2) for i in range(32)]
"""The lower four of each eight elements of two vectors, in turn: one instruction."""
_FEATURES = [[8 * (i // 4) + i % 4 + 4 * upper for i in range(16)] for upper in range(2)]
"""The features whose words that leaves, and those of the upper fours."""


@dataclass(frozen=True)
class KeyValueTiles:
    """K and V of all heads in one call, a row for each chunk of keys:

    tiles (n, F / 16 * terms * 16 * 32)    uint16, of V
    flags (n,)                             int32
    keys (n, E / 32 * terms * 32 * 32)     uint16, or None where K is read where it lies
    """

    terms: int
    unit: tiles.Tiles  # which multiplies them
    chunks: Expr  # of a head
    tiles: Expr
    flags: Expr
    keys: Expr | None

    @staticmethod
    def of(arguments: AttentionArguments) -> KeyValueTiles:
        """Allocates and writes them, in a loop of its own over heads and chunks."""
        op, own = arguments.op, terms.term_count(arguments.op)
        chunks, heads = ceil_div(arguments.kv_length, KEYS), T.int64(op.num_kv_heads)
        total = arguments.batch * heads * chunks

        def allocated(width: int) -> Expr:
            return T.alloc_buffer([total, T.int64(own * width * KEYS)], "uint16")

        values, flags = allocated(op.v_head_dim), T.alloc_buffer((total,), "int32")
        keys = None if op.dtype != "float32" else allocated(op.head_dim)
        chunks = materialize(chunks)
        both = KeyValueTiles(own, tiles.unit_of(op.dtype), chunks, values, flags, keys)
        with T.parallel(total) as row:
            chunk = materialize(T.truncmod(row, chunks))
            head = materialize(T.truncdiv(row, chunks))
            b, g = materialize(T.truncdiv(head, heads)), materialize(T.truncmod(head, heads))
            both._write(arguments, b, g, chunk, materialize(row))
        return both

    @property
    def exponent(self) -> Expr:
        """Its bits in two vectors of numbers."""
        return splat(T.uint16(EXPONENTS[self.unit.dtype]), FEATURES)

    def first_row(self, arguments: AttentionArguments, b: Expr, g: Expr) -> Expr:
        """That of a head's first chunk."""
        return materialize((b * T.int64(arguments.op.num_kv_heads) + g) * self.chunks)

    def value_place(self, row: Expr, feature: Expr, term: Expr | int) -> list[Expr]:
        """The place of a tile of 16 features."""
        return [row, (feature * self.terms + term) * (tiles.ROWS * KEYS)]

    def key_place(self, row: Expr, part: Expr | int, term: int, key: Expr | int) -> list[Expr]:
        """The place of a tile of keys, from `key` on, by 32 elements."""
        return [row, T.int64(0) + ((part * self.terms + term) * KEYS + key) * WIDTH]

    def _write(self, arguments: AttentionArguments, b: Expr, g: Expr, chunk: Expr, row: Expr) -> None:
        op = arguments.op
        view = head_view(arguments.inputs[op.value.buffer], op.value, op.v_head_dim, b, g)
        end, first = keys_of(arguments, b), materialize(chunk * KEYS)
        last = materialize(T.max(end - 1, T.int64(0)))
        store(self.flags, [row], T.int32(0), 1)
        # Where heads lie side by side, every row is in a page of its own, which no hardware prefetcher foresees.
        prefetch_rows(view, materialize(first + KEYS), KEYS, op.v_head_dim)

        def bits(view: HeadView, key: Expr | int, column: Expr, *, cut: bool) -> Expr:
            if not cut:
                return terms.narrow_row(view.buffer, view.at(first + key, column))
            bits = terms.narrow_row(view.buffer, view.at(T.min(first + key, last), column))
            return T.Select(splat(first + key < end, WIDTH), bits, splat(T.uint16(0), WIDTH))

        def halves(view: HeadView, key: Expr, column: Expr, *, cut: bool) -> list[Expr]:
            if not cut:
                return terms.wide_row(view.buffer, view.at(first + key, column))
            pair = terms.wide_row(view.buffer, view.at(T.min(first + key, last), column))
            return [let(T.Select(splat(first + key < end, LANES), half, constant(0.0, LANES))) for half in pair]

        def write(*, cut: bool) -> None:
            if self.terms == 1:
                self._turn_values(partial(bits, view, cut=cut), op.v_head_dim, row)
            else:
                self._split_values(partial(halves, view, cut=cut), op.v_head_dim, row)
            if self.keys is not None:
                keys = head_view(arguments.inputs[op.key.buffer], op.key, op.head_dim, b, g)
                self._split_keys(partial(halves, keys, cut=cut), op.head_dim, row)

        with T.If(first + KEYS <= end):
            with T.Then():
                write(cut=False)
            with T.Else():
                write(cut=True)

    def _flag(self, row: Expr, condition: Expr, flag: int) -> None:
        with T.If(condition), T.Then():
            store(self.flags, [row], self.flags[row] | T.int32(flag), 1)

    def _split_keys(self, halves: Callable[[Expr, Expr], list[Expr]], width: int, row: Expr) -> None:
        magnitudes = Magnitudes.of_none()
        with T.serial(T.int64(width // WIDTH)) as part, T.serial(T.int64(KEYS)) as key:
            pair = halves(key, part * WIDTH)
            if self.terms > 1:
                magnitudes.add(pair)
            for term, bits in enumerate(float32_terms.terms(pair, self.terms)):
                store(self.keys, self.key_place(row, part, term, key), bits, WIDTH)
        if self.terms > 1:
            self._flag(row, magnitudes.reach(LARGE), NO_TERMS_OF_KEYS)

    def _split_values(self, halves: Callable[[Expr, Expr], list[Expr]], width: int, row: Expr) -> None:
        magnitudes = Magnitudes.of_none()
        split = vectors.scratch((self.terms * KEYS, FEATURES), "uint16")
        with T.serial(T.int64(width // FEATURES)) as square:
            with T.serial(T.int64(KEYS)) as key:
                pair = halves(key, square * FEATURES)
                magnitudes.add(pair)
                for term, bits in enumerate(float32_terms.terms(pair, self.terms)):
                    store(split, [key + term * KEYS, T.int64(0)], bits, FEATURES)
            with T.serial(T.int64(self.terms)) as term:
                self._turn(lambda key: load(split, [term * KEYS + key, T.int64(0)], FEATURES), row, square, term)
        self._flag(row, magnitudes.reach(INFINITE), NON_FINITE)
        self._flag(row, magnitudes.reach(LARGE), NO_TERMS)
        with T.If(magnitudes.have_small_ones()), T.Then(), T.serial(T.int64(KEYS)) as key:
            of_key = Magnitudes.of_none()
            with T.serial(T.int64(width // FEATURES)) as square:
                of_key.add(halves(key, square * FEATURES))
            self._flag(row, of_key.are_small(), NO_TERMS)

    def _turn_values(self, bits: Callable[[int, Expr], Expr], width: int, row: Expr) -> None:
        infinite, exponents = self.exponent, T.alloc_buffer((FEATURES,), "uint16")
        store(exponents, [T.int64(0)], splat(T.uint16(0), FEATURES), FEATURES)
        with T.serial(T.int64(width // FEATURES)) as square:
            own = self._turn(lambda key: bits(key, square * FEATURES), row, square, T.int64(0))
            store(exponents, [T.int64(0)], T.max(load(exponents, [T.int64(0)], FEATURES), own), FEATURES)
        self._flag(row, vectors.any_lane(load(exponents, [T.int64(0)], FEATURES) == infinite, FEATURES), NON_FINITE)

    def _turn(self, bits: Callable[[int], Expr], row: Expr, square: Expr, term: Expr) -> Expr:
        """Writes a square of a term; the largest exponents of its features."""
        words: list[list[Expr]] = [[], []]
        largest = splat(T.uint16(0), FEATURES)
        for key in range(0, KEYS, 2):
            pair = [let(bits(key)), let(bits(key + 1))]
            for elements in pair:
                largest = let(T.max(largest, elements & self.exponent))
            for upper in range(2):
                turns = [T.int32(i + 4 * upper) for i in _LOW]
                words[upper].append(let(T.reinterpret("int32x16", T.Shuffle(pair, turns))))
        halves = [materialize(self.value_place(row, square * 2 + half, term)[1]) for half in range(2)]
        for upper in range(2):
            for feature, column in zip(_FEATURES[upper], vectors.transpose(words[upper]), strict=True):
                at = [row, halves[feature // 16] + feature % 16 * KEYS]
                store(self.tiles, at, T.reinterpret("uint16x32", column), KEYS)
        return largest

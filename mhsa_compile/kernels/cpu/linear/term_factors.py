"""Both factors of a linear as bfloat16 terms: rows of x, once a call, and a strip of the weights, once a task.

A tile of x has its lower terms behind it, and so has one of a strip, so that a step reads lines that lie side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.formats.choice import FORMATS, load_wide
from mhsa_compile.kernels.cpu.linear.activations import PackedRows
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import let, load, materialize, splat, store
from mhsa_compile.kernels.cpu.units import float32_terms, tiles
from mhsa_compile.kernels.cpu.units.float32_lanes import Float32Lanes
from mhsa_compile.kernels.cpu.units.float32_terms import CHAIN, LANES, OF_FLOAT16, ORDER
from mhsa_compile.kernels.interface.kernel import Config
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.spec.float32_products import Float32Products

COLUMNS = 2
"""Tiles of features that are multiplied together, a strip: a panel has one or two."""
PLAIN_ROWS = 4
"""Of a register tile where products are float32's."""
DEPTH = tiles.BFLOAT16.depth
TILE = tiles.ROWS * DEPTH
WORTH_SPLITTING: dict[Float32Products, int] = {"bf16x6": 48, "bf16x3": 32}
WORTH_SPLITTING_FLOAT16 = 24
"""Rows from which on splitting pays: fewer are multiplied in float32."""


@dataclass(frozen=True)
class TermLayout(PackedLayout):
    """A strip for a panel; weights are packed in panels of `strips`, as the kernel of float32 takes few rows."""

    strips: int = 1

    @staticmethod
    def of(op: LinearOp, profile: CpuProfile) -> TermLayout:
        """Panels of two strips, where that is no more padding."""
        count = -(-op.out_features // (COLUMNS * LANES))
        return TermLayout(op, FORMATS[op.dtype], Float32Lanes.of(profile), COLUMNS, 2 - count % 2)

    @property
    def panels_of_strips(self) -> PackedLayout:
        return PackedLayout(self.op, self.format, self.unit, self.strips * self.columns)

    @property
    def packed(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        return self.panels_of_strips.packed

    def place(self, strip: Expr, column: Expr | int) -> tuple[Expr, Expr]:
        """The panel, and the column in it, of a column of a strip."""
        first = T.truncmod(strip, T.int64(self.strips)) * self.panel
        return T.truncdiv(strip, T.int64(self.strips)), first + column

    def imported(self) -> AbstractContextManager[Any]:
        return tiles.BFLOAT16.imported()

    @property
    def tiles(self) -> int:
        """Those of K."""
        return -(-self.op.in_features // DEPTH)

    def passes(self, config: Config) -> int:
        """Parts of K whose terms of x are written at a time."""
        return -(-self.tiles // config["depth"])

    def depth(self, config: Config) -> int:
        """Tiles of K in a pass, at most."""
        return -(-self.tiles // self.passes(config))

    def height(self, config: Config, cores: int) -> int:
        """Tiles of rows whose terms are written at a time: as many blocks that cores share strips of them evenly."""
        return config["block"] * (cores // gcd(cores, self.panels))

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Terms of x and of the weights that are multiplied."""
        return OF_FLOAT16 if self.is_half else ORDER[self.op.float32_products]

    @property
    def is_half(self) -> bool:
        """Whether the numbers are float16."""
        return self.op.dtype == "float16"

    @property
    def worth_splitting(self) -> int:
        """Rows from which on products by terms take no longer than float32's."""
        return WORTH_SPLITTING_FLOAT16 if self.is_half else WORTH_SPLITTING[self.op.float32_products]

    @property
    def terms(self) -> int:
        return 1 + max(max(pair) for pair in self.pairs)


@dataclass(frozen=True)
class TileRange:
    """Tiles first .. end of K."""

    first: Expr
    end: Expr


@dataclass(frozen=True)
class TermRows(PackedRows):
    """`data` (tiles of rows, tiles of K, terms, 16 * 32), the bits of bfloat16, of some rows and a part of K of `x`
    (count, K), which is as it came; what rows behind the last hold nobody reads. `extraordinary` (tiles of rows,), 1
    where a row of the tile is, in that part. `size`, the number of all rows in terms of the arguments' dims."""

    x: Expr = None
    extraordinary: Expr = None
    count: Expr = None
    size: Expr = None

    @staticmethod
    def allocated(
        layout: PackedLayout, x: Expr, count: Expr, size: Expr, *, shape: tuple[int | None, int, int]
    ) -> TermRows:
        """For so many tiles of rows at a time, all if None, tiles of K, and terms."""
        height, depth, terms = shape
        tall = ceil_div(size, tiles.ROWS)
        tall = tall if height is None else T.min(tall, T.int64(height))
        data = T.alloc_buffer((tall, T.int64(depth), T.int64(terms), T.int64(TILE)), "uint16")
        return TermRows(layout, data, x=x, extraordinary=T.alloc_buffer((tall,), "int32"), count=count, size=size)

    def split(self, first: Expr, end: Expr, part: TileRange) -> None:
        """Writes the terms of a part of K of tiles first .. end of the rows, in parallel."""
        whole, rest = divmod(self.layout.op.in_features, DEPTH)
        with T.parallel(materialize(end - first)) as place:
            start = materialize((first + place) * tiles.ROWS)
            rows = materialize(T.min(T.int64(tiles.ROWS), self.count - start))
            largest = vectors.scratch((tiles.ROWS, LANES), "uint32")
            store(self.extraordinary, [place], T.int32(0), 1)
            with T.serial(rows) as i:
                store(largest, [i, T.int64(0)], splat(T.uint32(0), LANES), LANES)
            # Tile by tile, so that what is written lies side by side.
            with T.serial(part.first, T.min(part.end, T.int64(whole))) as tile, T.serial(rows) as i:
                at = [start + i, tile * DEPTH]
                halves = [let(load_wide(self.x, [at[0], at[1] + half], LANES)) for half in (0, LANES)]
                self._split([place, tile - part.first], i, halves, largest)
            if rest:
                with T.If(part.end > whole), T.Then():
                    self._split_last(place, rows, start, T.int64(whole) - part.first, largest)
            with T.serial(rows) as i:
                most = T.call_llvm_pure_intrin(
                    "uint32", "llvm.vector.reduce.umax", load(largest, [i, T.int64(0)], LANES)
                )
                with T.If(float32_terms.is_extraordinary(let(most))), T.Then():
                    store(self.extraordinary, [place], T.int32(1), 1)

    def _split_last(self, place: Expr, rows: Expr, start: Expr, tile: Expr, largest: Expr) -> None:
        """The last tile of K, which zeros fill."""
        whole, rest = divmod(self.layout.op.in_features, DEPTH)
        last = T.alloc_buffer((DEPTH,), "float32")
        store(last, [T.int64(0)], splat(T.float32(0), DEPTH), DEPTH)
        with T.serial(rows) as i:
            for offset, lanes in vectors.chunks(rest, LANES):
                at = [start + i, T.int64(whole * DEPTH + offset)]
                store(last, [T.int64(offset)], load_wide(self.x, at, lanes), lanes)
            halves = [let(load(last, [T.int64(half)], LANES)) for half in (0, LANES)]
            self._split([place, tile], i, halves, largest)

    def _split(self, at: list[Expr], i: Expr, halves: list[Expr], largest: Expr) -> None:
        """Writes the terms of 32 numbers of row i of a tile, and what they make of its largest magnitudes."""
        float32_terms.keep_largest(largest, [i, T.int64(0)], halves)
        for term, bits in enumerate(float32_terms.terms(halves, int(self.data.shape[2]))):
            store(self.data, [*at, T.int64(term), i * DEPTH], bits, DEPTH)


@dataclass(frozen=True)
class Pass(TileRange):
    """Those of pass `number`: y is the sum of all passes."""

    number: Expr


@dataclass(frozen=True)
class StripTerms:
    """`data` ((tiles of a part, terms, 16), strip): words of the terms of a strip's weights (panels, K, panel), a part
    of them at a time; `largest` (strip) the bits of the largest magnitude of each feature since it was last taken."""

    layout: TermLayout
    weights: Expr
    strip: Expr
    data: Expr
    largest: Expr

    @staticmethod
    def allocated(layout: TermLayout, weights: Expr, strip: Expr) -> StripTerms:
        data = vectors.scratch((CHAIN * layout.terms * tiles.WORDS, COLUMNS * LANES), "int32")
        terms = StripTerms(layout, weights, strip, data, vectors.scratch((COLUMNS, LANES), "uint32"))
        terms._forget()
        return terms

    @property
    def whole(self) -> int:
        """Whole tiles of K."""
        return self.layout.op.in_features // DEPTH

    def load(self, number: int, place: Expr, term: int, column: int) -> None:
        """Tile `number` = a term of a column, of a tile of K that is counted from the first one of the part."""
        tiles.load_tile(number, self.data, self._at(place, term, 0, column), self.layout.panel)

    def split(self, part: TileRange, begin: Expr | int = 0) -> None:
        """Writes the terms of a part, from tile `begin` of it on."""
        rest = self.layout.op.in_features % DEPTH
        with (
            T.serial(part.first + begin, T.min(part.end, T.int64(self.whole))) as tile,
            T.serial(T.int64(tiles.WORDS)) as word,
        ):
            self._split_words(tile, tile - part.first, word, 2)
        if rest:
            tile, pairs, odd = T.int64(self.whole), rest // 2, rest % 2
            place = materialize(tile - part.first)
            with T.If(part.end > self.whole), T.Then():
                with T.serial(T.int64(pairs)) as word:
                    self._split_words(tile, place, word, 2)
                if odd:
                    self._split_words(tile, place, T.int64(pairs), 1)
                with T.serial(T.int64(pairs + odd), T.int64(tiles.WORDS)) as word:
                    for term, column in itertools.product(range(self.layout.terms), range(COLUMNS)):
                        store(self.data, self._at(place, term, word, column), splat(T.int32(0), LANES), LANES)

    def splits(self, part: TileRange, place: Expr) -> list[Callable[[], None]]:
        """What splits a whole tile of a part, two rows of K of a column each."""
        tile, place = materialize(part.first + place), materialize(place)
        return [
            partial(self._split_word, tile, place, word, column, 2)
            for word, column in itertools.product(range(tiles.WORDS), range(COLUMNS))
        ]

    def take_extraordinary(self) -> Expr:
        """Whether one of the features is extraordinary in what was split since this was asked last."""
        flags = [
            vectors.any_lane(float32_terms.is_extraordinary(load(self.largest, at, LANES), LANES), LANES)
            for at in self._columns
        ]
        flag = materialize(T.cast(T.Or(*flags), "int32"), "int32")
        self._forget()
        return flag

    @property
    def _columns(self) -> list[list[Expr]]:
        """Where `largest` has those of each."""
        return [[T.int64(column), T.int64(0)] for column in range(COLUMNS)]

    def _forget(self) -> None:
        for at in self._columns:
            store(self.largest, at, splat(T.uint32(0), LANES), LANES)

    def _at(self, place: Expr, term: int, word: Expr | int, column: int) -> list[Expr]:
        """Where a word of a tile of the part is."""
        return [(place * self.layout.terms + term) * tiles.WORDS + word, T.int64(column * LANES)]

    def _split_words(self, tile: Expr, place: Expr, word: Expr, rows: int) -> None:
        for column in range(COLUMNS):
            self._split_word(tile, place, word, column, rows)

    def _split_word(self, tile: Expr, place: Expr, word: Expr | int, column: int, rows: int) -> None:
        """Writes the terms of two rows of K, or of the last one and zeros."""
        k = materialize(tile * DEPTH + word * 2)
        panel, first = self.layout.place(self.strip, column * LANES)
        halves = [let(load_wide(self.weights, [panel, k + i, first], LANES)) for i in range(rows)]
        float32_terms.keep_largest(self.largest, self._columns[column], halves)
        high = halves[1] if rows == 2 else splat(T.float32(0), LANES)
        for term, words in enumerate(float32_terms.pair_terms(halves[0], high, self.layout.terms)):
            store(self.data, self._at(place, term, word, column), words, LANES)

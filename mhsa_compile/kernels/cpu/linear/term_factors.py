"""Both factors of a linear as bfloat16 terms: rows of x, once a call, and a strip of the weights, once a task.

A tile of x has its lower terms behind it, and so has one of a strip, so that a step reads lines that lie side by side.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from mhsa_compile.kernels.cpu.units.float32_terms import CHAIN, COARSE_CHAIN, LANES, OF_FLOAT16, ORDER
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.spec.float32_products import Float32Products, is_coarse

COLUMNS = 2
"""Tiles of features that are multiplied together, a strip: a panel has one or two."""
PLAIN_ROWS = 4
"""Of a register tile where products are float32's."""
DEPTH = tiles.BFLOAT16.depth
TILE = tiles.ROWS * DEPTH
WORTH_SPLITTING: dict[Float32Products, int] = {"bf16x6": 64, "bf16x3": 32}
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

    @property
    def chain(self) -> int:
        return COARSE_CHAIN if self.is_half or is_coarse(self.op.float32_products) else CHAIN


@dataclass(frozen=True)
class TermRows(PackedRows):
    """`data` (tiles of rows, tiles of K, terms, 16 * 32), the bits of bfloat16; `x` as it came; `extraordinary` (tiles
    of rows,), 1 where a row of the tile is; `size`, the number of rows in terms of the arguments' dims."""

    x: Expr = None
    extraordinary: Expr = None
    size: Expr = None


def split_rows(layout: PackedLayout, x: Expr, count: Expr, size: Expr, *, terms: int, least: int) -> TermRows:
    """So many terms of x (count, K), after the loop that writes them where there are `least` rows. What rows behind the
    last hold nobody reads."""
    heights, width = ceil_div(size, tiles.ROWS), layout.op.in_features
    data = T.alloc_buffer((heights, T.int64(-(-width // DEPTH)), T.int64(terms), T.int64(TILE)), "uint16")
    flags = T.alloc_buffer((heights,), "int32")
    whole, rest = divmod(width, DEPTH)
    with (
        T.If(count >= least),
        T.Then(),
        T.parallel(materialize(ceil_div(count, tiles.ROWS))) as height,
    ):
        rows = materialize(T.min(T.int64(tiles.ROWS), count - height * tiles.ROWS))
        largest = vectors.scratch((tiles.ROWS, LANES), "uint32")
        store(flags, [height], T.int32(0), 1)
        with T.serial(rows) as i:
            store(largest, [i, T.int64(0)], splat(T.uint32(0), LANES), LANES)

        def split(tile: Expr, i: Expr, halves: list[Expr]) -> None:
            most = load(largest, [i, T.int64(0)], LANES)
            for half in halves:
                most = T.max(most, float32_terms.magnitude(half))
            store(largest, [i, T.int64(0)], most, LANES)
            for term, bits in enumerate(float32_terms.terms(halves, terms)):
                store(data, [height, tile, T.int64(term), i * DEPTH], bits, DEPTH)

        # Tile by tile, so that what is written lies side by side.
        with T.serial(T.int64(whole)) as tile, T.serial(rows) as i:
            at = [height * tiles.ROWS + i, tile * DEPTH]
            split(tile, i, [let(load_wide(x, [at[0], at[1] + start], LANES)) for start in (0, LANES)])
        if rest:
            last = T.alloc_buffer((DEPTH,), "float32")
            store(last, [T.int64(0)], splat(T.float32(0), DEPTH), DEPTH)
            with T.serial(rows) as i:
                for offset, lanes in vectors.chunks(rest, LANES):
                    at = [height * tiles.ROWS + i, T.int64(whole * DEPTH + offset)]
                    store(last, [T.int64(offset)], load_wide(x, at, lanes), lanes)
                split(T.int64(whole), i, [let(load(last, [T.int64(start)], LANES)) for start in (0, LANES)])
        with T.serial(rows) as i:
            most = T.call_llvm_pure_intrin("uint32", "llvm.vector.reduce.umax", load(largest, [i, T.int64(0)], LANES))
            with T.If(float32_terms.is_extraordinary(let(most))), T.Then():
                store(flags, [height], T.int32(1), 1)
    return TermRows(layout, data, x=x, extraordinary=flags, size=size)


@dataclass(frozen=True)
class Pass:
    """Tiles first .. end of K, of pass `number`: y is the sum of all passes."""

    number: Expr
    first: Expr
    end: Expr


@dataclass(frozen=True)
class StripTerms:
    """`data` ((tiles of a pass, terms, 16), strip): words of the terms of a strip's weights."""

    layout: TermLayout
    data: Expr

    @staticmethod
    def allocated(layout: TermLayout, deepest: int) -> StripTerms:
        return StripTerms(layout, vectors.scratch((deepest * layout.terms * tiles.WORDS, COLUMNS * LANES), "int32"))

    def at(self, tile: Expr, term: int = 0, word: Expr | int = 0, column: int = 0) -> list[Expr]:
        """Where a word of a tile, counted from the first of the pass, is."""
        return [(tile * self.layout.terms + term) * tiles.WORDS + word, T.int64(column * LANES)]

    def split(self, weights: Expr, strip: Expr, of: Pass) -> Expr:
        """Writes those of a strip in a pass. Whether one of its features there is extraordinary."""
        whole, rest = divmod(self.layout.op.in_features, DEPTH)
        largest = vectors.scratch((COLUMNS, LANES), "uint32")
        for column in range(COLUMNS):
            store(largest, [T.int64(column), T.int64(0)], splat(T.uint32(0), LANES), LANES)

        def pair(tile: Expr, word: Expr, numbers: int) -> None:
            for column in range(COLUMNS):
                k = materialize(tile * DEPTH + word * 2)
                p, first = self.layout.place(strip, column * LANES)
                halves = [let(load_wide(weights, [p, k + i, first], LANES)) for i in range(numbers)]
                place = [T.int64(column), T.int64(0)]
                most = load(largest, place, LANES)
                for half in halves:
                    most = T.max(most, float32_terms.magnitude(half))
                store(largest, place, most, LANES)
                high = halves[1] if numbers == 2 else splat(T.float32(0), LANES)
                for term, words in enumerate(float32_terms.pair_terms(halves[0], high, self.layout.terms)):
                    store(self.data, self.at(tile - of.first, term, word, column), words, LANES)

        with T.serial(of.first, T.min(of.end, T.int64(whole))) as tile, T.serial(T.int64(tiles.WORDS)) as word:
            pair(tile, word, 2)
        if rest:
            tile, pairs, odd = T.int64(whole), rest // 2, rest % 2
            with T.If(of.end > whole), T.Then():
                with T.serial(T.int64(pairs)) as word:
                    pair(tile, word, 2)
                if odd:
                    pair(tile, T.int64(pairs), 1)
                with T.serial(T.int64(pairs + odd), T.int64(tiles.WORDS)) as word:
                    for term, column in itertools.product(range(self.layout.terms), range(COLUMNS)):
                        zeros = splat(T.int32(0), LANES)
                        store(self.data, self.at(tile - of.first, term, word, column), zeros, LANES)
        flags = [
            vectors.any_lane(
                float32_terms.is_extraordinary(load(largest, [T.int64(column), T.int64(0)], LANES), LANES), LANES
            )
            for column in range(COLUMNS)
        ]
        return T.Or(*flags)

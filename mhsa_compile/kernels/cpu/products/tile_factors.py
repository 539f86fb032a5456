"""A factor of a product as matrix tiles take it: a row of A, or a column of B, is a line of K terms, and a tile has 16
lines by 32 terms.

    of A    line by line, 32 terms each
    of B    word by word: two neighbours along K of each line

A factor whose neighbours in memory are terms comes as A's tiles lie; one whose neighbours are lines, two of its rows
side by side, as B's do. Where it has to be the other, sixteen vectors of words are transposed. Lines and terms that are
not there are zeros, or numbers that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.products.kernel import Matrices
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import let, load, materialize, splat, store
from mhsa_compile.kernels.cpu.units import float32_terms, tiles
from mhsa_compile.kernels.interface.ops import ProductOp

LINES, DEPTH = tiles.ROWS, 32
"""Of a tile: lines, and terms of each."""
TILE = LINES * DEPTH


Flag = tuple[Expr, list[Expr]]
"""An element of a buffer."""


def is_along(op: ProductOp, *, of_left: bool) -> bool:
    """Whether neighbours of a factor in memory are terms of one line."""
    operand = op.left if of_left else op.right
    return (operand.columns if of_left else operand.rows) == len(operand.dims) - 1


class TileLines(NamedTuple):
    """`count` lines from `first` on, 16 at most, whose tiles are written to `place`; they are number `number` of those
    that are written together."""

    first: Expr
    count: Expr
    number: int
    place: list[Expr]


@dataclass(frozen=True)
class FactorScratch:
    """A task's own. `largest` has the bits of the largest magnitudes, for each 16 lines a vector of each, or one of
    all, the first; `turned` is to be transposed."""

    largest: Expr
    turned: Expr

    @staticmethod
    def allocated(terms: int, together: int) -> FactorScratch:
        """The scratch for `together` times 16 lines, in `terms` terms each."""
        turned = vectors.scratch((terms * LINES, DEPTH), "uint16")
        return FactorScratch(vectors.scratch((together * LINES, LINES), "uint32"), turned)


@dataclass(frozen=True)
class TileFactor:
    """`count` lines of `length` terms each, of one entry of the batch, as tiles of so many `terms` of bfloat16."""

    matrices: Matrices
    of_left: bool
    count: Expr
    length: Expr
    terms: int
    scratch: FactorScratch

    @property
    def buffer(self) -> Expr:
        return self.matrices.a if self.of_left else self.matrices.b

    @property
    def is_along(self) -> bool:
        return is_along(self.matrices.op, of_left=self.of_left)

    @property
    def is_split(self) -> bool:
        """Whether there are numbers of which terms would make something else."""
        return bool(self.buffer.dtype == "float32")

    def at(self, line: Expr, k: Expr) -> list[Expr]:
        return self.matrices.left(line, k) if self.of_left else self.matrices.right(k, line)

    def row(self, line: Expr, k: Expr) -> Expr:
        """The bits of 32 neighbours along K, where numbers have 16."""
        return first_of(self.buffer, self.at(line, k), self.length - k, DEPTH)

    def write(self, data: Expr, places: Sequence[list[Expr]], first: Expr, part: tuple[Expr, Expr], flag: Flag) -> None:
        """data[place, tile, term] = tiles of K, from one to another, of the lines from `first` on, 16 for each of the
        places; flag = 1 if one of them asks for float32, else 0."""
        groups = []
        for number, place in enumerate(places):
            line = materialize(first + LINES * number)
            count = materialize(T.max(T.int64(0), T.min(T.int64(LINES), self.count - line)))
            groups.append(TileLines(line, count, number, place))
        if self.is_split:
            with T.serial(T.int64(LINES * len(groups))) as i:
                store(self.scratch.largest, [i, T.int64(0)], splat(T.uint32(0), LINES), LINES)
        if self.is_along:
            for lines in groups:
                self._write_tiles(data, [lines], lines.count, part)
        else:  # neighbours of the one are those of the other
            self._write_tiles(data, groups, T.int64(LINES), part)
        if self.is_split:
            self._mark(flag, len(groups))

    def _write_tiles(self, data: Expr, groups: Sequence[TileLines], rows: Expr, part: tuple[Expr, Expr]) -> None:
        """Tile by tile, so that what is written lies side by side."""
        natural = self.is_along == self.of_left
        with T.serial(part[1] - part[0]) as own:
            tile = materialize(part[0] + own)
            if natural:
                with T.serial(rows) as i:
                    for lines in groups:
                        if self.is_split:  # scratch of the task before has left the caches
                            for term in range(self.terms):
                                vectors.prefetch(data, [*lines.place, own + 1, T.int64(term), i * DEPTH], write=True)
                        for term, bits in enumerate(self._bits(lines, tile, i)):
                            store(data, [*lines.place, own, T.int64(term), i * DEPTH], bits, DEPTH)
            else:
                for lines in groups:
                    with T.serial(rows) as i:
                        for term, bits in enumerate(self._bits(lines, tile, i)):
                            store(self.scratch.turned, [T.int64(term * LINES) + i, T.int64(0)], bits, DEPTH)
                    self._turn(data, [*lines.place, own])

    def _turn(self, data: Expr, place: Sequence[Expr]) -> None:
        """data[place, term] = what is to be transposed."""
        with T.serial(T.int64(self.terms)) as term:
            rows = [load(self.scratch.turned, [term * LINES + i, T.int64(0)], DEPTH) for i in range(LINES)]
            words = [let(T.reinterpret("int32x16", row)) for row in rows]
            for i, column in enumerate(vectors.transpose(words)):
                store(data, [*place, term, T.int64(i * DEPTH)], T.reinterpret("uint16x32", column), DEPTH)

    def _bits(self, lines: TileLines, tile: Expr, i: Expr) -> list[Expr]:
        """The terms of line i of a tile, or of word i of all lines."""
        first = materialize(tile * DEPTH)
        if self.is_along and not self.is_split:
            return [self.row(lines.first + i, first)]
        halves = self._halves(lines, first, i)
        if not self.is_split:
            return [_interleaved(halves)]
        row = [T.int64(lines.number * LINES) + (i if self.is_along else 0), T.int64(0)]
        float32_terms.keep_largest(self.scratch.largest, row, halves)
        terms = float32_terms.terms(halves, self.terms)
        return terms if self.is_along else [_interleaved([bits]) for bits in terms]

    def _halves(self, lines: TileLines, first: Expr, i: Expr) -> list[Expr]:
        """16 and 16 terms of a line, or two terms of each of 16 lines."""
        if self.is_along:
            places = [(lines.first + i, first + start) for start in (0, LINES)]
            counts = [self.length - k for _, k in places]
        else:
            places = [(lines.first, materialize(first + 2 * i + one)) for one in (0, 1)]
            inner = self.matrices.op.inner
            whole = isinstance(inner, int) and inner % DEPTH == 0
            counts = [lines.count if whole else T.Select(k < self.length, lines.count, T.int64(0)) for _, k in places]
        for line, k in places:
            vectors.prefetch(self.buffer, self.at(line, k + DEPTH))
        return [
            first_of(self.buffer, self.at(line, k), count, LINES)
            for (line, k), count in zip(places, counts, strict=True)
        ]

    def _mark(self, flag: Flag, groups: int) -> None:
        """Writes the flag, a buffer's element."""
        buffer, place = flag

        def check(most: Expr, end: str) -> None:
            bits = let(T.call_llvm_pure_intrin("uint32", f"llvm.vector.reduce.{end}", most))
            with T.If(float32_terms.is_extraordinary(bits)), T.Then():
                store(buffer, place, T.int32(1), 1)

        store(buffer, place, T.int32(0), 1)
        if self.is_along:
            with T.serial(T.int64(groups * LINES)) as i:
                check(load(self.scratch.largest, [i, T.int64(0)], LINES), "umax")
            return
        for group in range(groups):
            most = let(load(self.scratch.largest, [T.int64(group * LINES), T.int64(0)], LINES))
            # Lines of zeros are as ordinary as those of ones.
            zero, one = (splat(T.uint32(bits), LINES) for bits in (0, 0x3F800000))
            most = let(T.Select(most == zero, one, most))
            check(most, "umin")
            check(most, "umax")


def _interleaved(halves: Sequence[Expr]) -> Expr:
    """16 and 16 elements in turn."""
    return let(T.Shuffle(list(halves), [T.int32(i // 2 + LINES * (i % 2)) for i in range(DEPTH)]))


def first_of(buffer: Expr, index: Sequence[Expr], count: Expr, lanes: int) -> Expr:
    """`count` neighbours, the bits of narrow ones, and zeros behind them; what lies there is not read."""
    dtype, address, number = _lanes_at(buffer, index, count, lanes)
    return let(T.call_extern(f"{dtype}x{lanes}", f"mhsa_first_{dtype}_{lanes}", address, number))


def store_first(buffer: Expr, index: Sequence[Expr], value: Expr, count: Expr, lanes: int) -> None:
    """Stores the first `count` lanes, float32 or the bits of narrow ones."""
    dtype, address, number = _lanes_at(buffer, index, count, lanes)
    T.evaluate(T.call_extern("void", f"mhsa_store_first_{dtype}_{lanes}", address, value, number))


def _lanes_at(buffer: Expr, index: Sequence[Expr], count: Expr, lanes: int) -> tuple[str, Expr, Expr]:
    number = T.cast(T.max(T.min(count, T.int64(lanes)), 0), "int32")
    return "float32" if buffer.dtype == "float32" else "uint16", T.address_of(buffer[tuple(index)]), number


def _masked(dtype: str, element: str, short: str, lanes: int) -> str:
    vector, mask = f"<{lanes} x {element}>", f"<{lanes} x i1>"
    numbers = ", ".join(f"i32 {i}" for i in range(lanes))
    there = f"""
  %one = insertelement <{lanes} x i32> poison, i32 %n, i64 0
  %all = shufflevector <{lanes} x i32> %one, <{lanes} x i32> poison, <{lanes} x i32> zeroinitializer
  %m = icmp slt <{lanes} x i32> <{numbers}>, %all"""
    bytes_ = 4 if dtype == "float32" else 2
    return f"""
declare {vector} @llvm.masked.load.v{lanes}{short}.p0(ptr, i32 immarg, {mask}, {vector})
declare void @llvm.masked.store.v{lanes}{short}.p0({vector}, ptr, i32 immarg, {mask})
define {vector} @mhsa_first_{dtype}_{lanes}(ptr %p, i32 %n) alwaysinline nounwind {{{there}
  %r = call {vector} @llvm.masked.load.v{lanes}{short}.p0(ptr %p, i32 {bytes_}, {mask} %m, {vector} zeroinitializer)
  ret {vector} %r
}}
define void @mhsa_store_first_{dtype}_{lanes}(ptr %p, {vector} %x, i32 %n) alwaysinline nounwind {{{there}
  call void @llvm.masked.store.v{lanes}{short}.p0({vector} %x, ptr %p, i32 {bytes_}, {mask} %m)
  ret void
}}"""


TEXT = "".join(
    _masked(*words)
    for words in (("float32", "float", "f32", 16), ("uint16", "i16", "i16", 16), ("uint16", "i16", "i16", 32))
)
"""Loads and stores of the first lanes of a vector."""

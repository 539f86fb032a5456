"""Matrix products of two by two: one instruction multiplies two rows of A with two columns of B.

Groups of neighbours travel as one int64: four bfloat16, eight int8. A line's factor is two such words, of both rows;
four words of B, two registers, are a vector, whose sums are [a0 b0, a0 b1, a1 b0, a1 b1] for each two columns. Source:
Arm Architecture Reference Manual, DDI 0487.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.formats.floats import bfloat16_bits
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, let, load, materialize, splat, store, vector_type
from mhsa_compile.kernels.cpu.units.dot_products import AARCH64_PAIR, DotProducts
from mhsa_compile.kernels.cpu.units.unit import At, Strips


@dataclass(frozen=True)
class MatrixProducts(DotProducts):
    """The sums of both rows of a line lie in one tile of twice as many lanes. `pair` takes four vectors here."""

    def accumulate(self, sums: Expr, a: Expr, b: Expr) -> Expr:
        """`sums` (2 * lanes,) plus the products of the groups in `a`, a vector of two words, and in `b`."""
        return T.call_pure_extern(f"{self.sums}x{self.rows * self.lanes}", self.function, sums, a, b)

    def multiply(self, sums: RegisterTile, a: Sequence[Expr], b: Sequence[Expr], columns_first: bool) -> None:
        if columns_first:
            super().multiply(sums, a, b, columns_first)
            return
        factors = [let(factor) for factor in a]
        for c, column in enumerate(map(let, b)):
            for line, factor in enumerate(factors):
                sums.set(line, c, self.accumulate(sums.get(line, c), factor, column))

    def room(self, registers: int) -> int:
        """All: an instruction takes five cycles, on four units."""
        return registers

    def parted(self, sums: Expr) -> list[Expr]:
        sums = let(sums)
        # Pairs of lanes of one row and of the other in turn.
        places = [[4 * (i // 2) + 2 * row + i % 2 for i in range(self.lanes)] for row in range(2)]
        return [T.Shuffle([sums], [T.int32(i) for i in row]) for row in places]

    def steps(self, buffer: Expr, at: At, rows: Sequence[Expr], first: Expr, count: int) -> list[Expr]:
        """A vector of both rows' first words, one of both rows' second, and so on."""
        words = [let(self.words(buffer, at(row, first * self.group), count)) for row in rows]
        return [let(T.Shuffle(words, [T.int32(i), T.int32(count + i)])) for i in range(count)]

    def pack_columns(self, packed: Expr, strips: Strips, scale: float) -> None:
        def pack(first: Expr, count: int) -> None:
            rows = strips.numbers(first, count)
            with T.serial(T.int64(strips.width // self.group)) as step:
                for i, row in enumerate(rows):
                    word = self.words(strips.buffer, strips.at(row, step * self.group), 1)
                    store(packed, [step, first + i], word, 1)

        vectors.each_vector(strips.count, self.lanes, pack)

    def pack_rows(self, packed: Expr, columns: Sequence[Chunk], view: HeadView, first: Expr, count: Expr) -> None:
        """Step j is rows 4 j .. 4 j + 3 side by side."""
        group = self.group

        def pack(step: Expr, rows: Sequence[tuple[Expr, Expr | None]]) -> None:
            """Writes a step of rows, each as (its number, whether it is there; None where it must be)."""
            for column, lanes in columns:
                halves = []
                for row, is_there in rows:
                    half = T.reinterpret(f"uint16x{lanes}", load(view.buffer, view.at(row, T.int64(column)), lanes))
                    # A row that is not there was read as the last one; its elements must not be NaN.
                    zeros = splat(T.uint16(0), lanes)
                    halves.append(half if is_there is None else T.Select(splat(is_there, lanes), half, zeros))
                # In two rounds: pairs of rows first, then pairs of pairs.
                low, high = (_interleave(halves[i], halves[i + 1], "int32", lanes) for i in (0, 2))
                store(packed, [step, T.int64(column)], _interleave(low, high, "int64", lanes), lanes)

        whole = materialize(T.truncdiv(count, T.int64(group)))
        with T.serial(whole) as step:
            pack(step, [(materialize(first + (step * group + i)), None) for i in range(group)])
        with T.If(whole * group < count), T.Then():
            places = [materialize(whole * group + i) for i in range(group)]
            pack(whole, [(materialize(first + T.min(place, count - 1)), place < count) for place in places])

    def as_factors(self, sums: Sequence[Expr], lanes: int) -> Expr:
        return T.call_pure_extern(f"int64x{lanes}", self.pair, *sums)

    def element(self, word: Expr, place: Expr) -> Expr:
        return _element(word, place, 1)

    def rescaled(self, words: Expr, factor: Expr, lanes: int) -> Expr:
        word = materialize(words, "int64", lanes)
        new = splat(T.int64(0), lanes)
        for place in range(self.group):
            bits = bfloat16_bits(_element(word, T.int64(place), lanes) * factor, lanes)
            wide = T.cast(bits, vector_type("int64", lanes)) << splat(T.int64(16 * place), lanes)
            new = materialize(new | wide, "int64", lanes)
        return new


def _element(words: Expr, place: Expr, lanes: int) -> Expr:
    """The bfloat16 at one of the four places of each word, as float32."""
    low = T.cast(words >> splat(place * 16, lanes), vector_type("int32", lanes))
    return T.reinterpret(vector_type("float32", lanes), low << splat(T.int32(16), lanes))


def _interleave(low: Expr, high: Expr, dtype: str, lanes: int) -> Expr:
    """Elements of both in turn, as `lanes` of twice their width."""
    turns = [T.int32(i // 2 + lanes * (i % 2)) for i in range(2 * lanes)]
    return T.reinterpret(f"{dtype}x{lanes}", T.Shuffle([low, high], turns))


def _matrix(name: str, intrinsic: str, sum: str, narrow: str) -> str:
    sums, four = f"<8 x {sum}>", f"<4 x {sum}>"
    low, high = (", ".join(f"i32 {i}" for i in range(first, first + 4)) for first in (0, 4))
    return f"""
declare {four} {intrinsic}({four}, {narrow}, {narrow})
define {sums} @{name}({sums} %c, <2 x i64> %a, <4 x i64> %b) alwaysinline nounwind memory(none) {{
  %x = bitcast <2 x i64> %a to {narrow}
  %b0 = shufflevector <4 x i64> %b, <4 x i64> poison, <2 x i32> <i32 0, i32 1>
  %b1 = shufflevector <4 x i64> %b, <4 x i64> poison, <2 x i32> <i32 2, i32 3>
  %y0 = bitcast <2 x i64> %b0 to {narrow}
  %y1 = bitcast <2 x i64> %b1 to {narrow}
  %c0 = shufflevector {sums} %c, {sums} poison, <4 x i32> <{low}>
  %c1 = shufflevector {sums} %c, {sums} poison, <4 x i32> <{high}>
  %r0 = call {four} {intrinsic}({four} %c0, {narrow} %x, {narrow} %y0)
  %r1 = call {four} {intrinsic}({four} %c1, {narrow} %x, {narrow} %y1)
  %r = shufflevector {four} %r0, {four} %r1, <8 x i32> <{low}, {high}>
  ret {sums} %r
}}
"""


# Four vectors of float32 become one of words.
_WORDS = (
    AARCH64_PAIR
    + """
define <4 x i64> @mhsa_words_bfloat16(<4 x float> %a, <4 x float> %b, <4 x float> %c, <4 x float> %d)
    alwaysinline nounwind memory(none) {
  %low = call <4 x i32> @mhsa_pair_bfloat16_4(<4 x float> %a, <4 x float> %b)
  %high = call <4 x i32> @mhsa_pair_bfloat16_4(<4 x float> %c, <4 x float> %d)
  %both = shufflevector <4 x i32> %low, <4 x i32> %high,
    <8 x i32> <i32 0, i32 4, i32 1, i32 5, i32 2, i32 6, i32 3, i32 7>
  %words = bitcast <8 x i32> %both to <4 x i64>
  ret <4 x i64> %words
}
"""
)
# For each sum four products, two and two, rounded as BFDOT does; eight products of signed bytes.
_BFMMLA = _matrix("mhsa_matrix_bfloat16", "@llvm.aarch64.neon.bfmmla", "float", "<8 x bfloat>")
_SMMLA = _matrix("mhsa_matrix_int8", "@llvm.aarch64.neon.smmla.v4i32.v16i8", "i32", "<16 x i8>")

UNITS = (
    MatrixProducts(
        "bfloat16", "float32", 4, 4, rows=2, run=2, feature="bf16", function="mhsa_matrix_bfloat16",
        text=_BFMMLA + _WORDS, pair="mhsa_words_bfloat16",
    ),
    MatrixProducts(
        "int8", "int32", 4, 8, rows=2, run=2, feature="i8mm", function="mhsa_matrix_int8", text=_SMMLA,
    ),
)  # fmt: skip

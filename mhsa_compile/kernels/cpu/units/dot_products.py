"""Dot products: each lane of the sums takes the products of a group of neighbours at once.

TVM has no word for these instructions, and legalises bfloat16 vectors away before LLVM sees them. So the neighbours
travel as one word (two bfloat16 or four int8 as an int32, the first in its lowest bits), and a few lines of LLVM IR,
inlined into the kernel that imports them, give them their type back. Sources: Intel SDM; Arm Architecture Reference
Manual, DDI 0487.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.formats.floats import bfloat16_bits
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, load, materialize, splat, store, vector_type
from mhsa_compile.kernels.cpu.units.unit import Strips, Unit


@dataclass(frozen=True)
class DotProducts(Unit):
    """sums[i] += sum over j < group of a[j] * b[i, j], i < lanes; of `group` 1, a plain product.

    function, text  the instruction as LLVM IR
    pair            the function in `text`, where there is one, that rounds two vectors of float32 to one of pairs
    """

    function: str = ""
    text: str = ""
    pair: str = ""

    @property
    def word(self) -> str:
        return f"int{self.group * (8 if self.dtype == 'int8' else 16)}"

    @property
    def keeps_sums(self) -> bool:
        return bool(self.pair)

    def imported(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = T.attr(0, "pragma_import_llvm", self.text)
        return context

    def accumulate(self, sums: Expr, a: Expr, b: Expr) -> Expr:
        """`sums` (lanes,) plus the products of the groups in `a`, one word, and in `b`, a vector of `lanes` words."""
        return T.call_pure_extern(f"{self.sums}x{self.lanes}", self.function, sums, splat(a, self.lanes), b)

    def accumulate_turned(self, sums: Expr, a: Expr, b: Expr) -> Expr:
        """As `accumulate`, of signed bytes in `a`, and of unsigned ones in `b` where the unit takes such."""
        if not self.unsigned:
            return self.accumulate(sums, a, b)
        return T.call_pure_extern(f"{self.sums}x{self.lanes}", self.function, sums, b, splat(a, self.lanes))

    def multiply(self, sums: RegisterTile, a: Sequence[Expr], b: Sequence[Expr], columns_first: bool) -> None:
        sums.outer_product(a.__getitem__, b.__getitem__, self.accumulate)

    def words(self, buffer: Expr, index: Sequence[Expr], count: int) -> Expr:
        return T.reinterpret(vector_type(self.word, count), load(buffer, index, count * self.group))

    def pack_columns(self, packed: Expr, strips: Strips, scale: float) -> None:
        def read(row: Expr, step: Expr, count: int) -> Expr:
            return self.words(strips.buffer, strips.at(row, step * self.group), count)

        steps = strips.width // self.group
        vectors.pack_transposed(packed, strips.count, steps, self.lanes, strips.numbers, read)

    def pack_rows(self, packed: Expr, columns: Sequence[Chunk], view: HeadView, first: Expr, count: Expr) -> None:
        """Step j is rows 2 j and 2 j + 1 side by side."""

        def pack(step: Expr, rows: Sequence[Expr]) -> None:
            for column, lanes in columns:
                at = T.int64(column)
                halves = (
                    T.reinterpret(vector_type("uint16", lanes), load(view.buffer, view.at(row, at), lanes))
                    for row in rows
                )
                low, *high = (T.cast(half, vector_type("int32", lanes)) for half in halves)
                store(packed, [step, at], low | (high[0] << splat(T.int32(16), lanes)) if high else low, lanes)

        with T.serial(T.truncdiv(count, T.int64(2))) as step:
            pack(step, [first + step * 2, first + step * 2 + 1])
        with T.If(T.truncmod(count, T.int64(2)) == 1), T.Then():
            # A neighbour of zeros: what an earlier block left there might be NaN, and 0 * NaN is.
            pack(T.truncdiv(count, T.int64(2)), [first + (count - 1)])

    def as_factors(self, sums: Sequence[Expr], lanes: int) -> Expr:
        return T.call_pure_extern(f"int32x{lanes}", self.pair, *sums)

    def element(self, word: Expr, place: Expr) -> Expr:
        return T.Select(place == 0, _half(word, 0, 1), _half(word, 1, 1))

    def rescaled(self, words: Expr, factor: Expr, lanes: int) -> Expr:
        word = materialize(words, "int32", lanes)
        low, high = (bfloat16_bits(_half(word, side, lanes) * factor, lanes) for side in (0, 1))
        return T.reinterpret(f"int32x{lanes}", low | (high << splat(T.uint32(16), lanes)))


@dataclass(frozen=True)
class AddedProducts(DotProducts):
    """Products that another instruction adds to the sums: on their way they take a register."""

    def room(self, registers: int) -> int:
        return super().room(registers) - 1

    def why_not_tile(self, rows: int, columns: int, registers: int) -> str | None:
        return super().why_not_tile(rows, columns, registers - 1)

    def runs_at_once(self, lines: int, columns: int) -> int:
        """As many as give the same number of instructions: in longer bodies LLVM kept sums of sixteen registers in
        memory."""
        return super().runs_at_once(2 * lines, columns)


def _half(words: Expr, side: int, lanes: int) -> Expr:
    """The lower (0) or upper (1) bfloat16 of each word, as float32."""
    # -65536 is 0xFFFF0000.
    shifted = words << splat(T.int32(16), lanes) if side == 0 else words & splat(T.int32(-65536), lanes)
    return T.reinterpret(vector_type("float32", lanes), shifted)


# ---- x86-64


def _vdpbf16ps(lanes: int) -> str:
    """Products and sums are rounded to nearest even, denormals are flushed to zero. VCVTNE2PS2BF16's second operand
    becomes the lower half of its result; halves become pairs, the first vector in the lower ones."""
    sums, words, halves = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{2 * lanes} x bfloat>"
    bits = 32 * lanes
    dot, convert = f"@llvm.x86.avx512bf16.dpbf16ps.{bits}", f"@llvm.x86.avx512bf16.cvtne2ps2bf16.{bits}"
    interleave = ", ".join(f"i32 {i // 2 + lanes * (i % 2)}" for i in range(2 * lanes))
    return f"""
declare {sums} {dot}({sums}, {halves}, {halves})
declare {halves} {convert}({sums}, {sums})
define {sums} @mhsa_dot_bfloat16_{lanes}({sums} %c, {words} %a, {words} %b) alwaysinline nounwind memory(none) {{
  %x = bitcast {words} %a to {halves}
  %y = bitcast {words} %b to {halves}
  %r = call {sums} {dot}({sums} %c, {halves} %x, {halves} %y)
  ret {sums} %r
}}
define {words} @mhsa_pair_bfloat16_{lanes}({sums} %low, {sums} %high) alwaysinline nounwind memory(none) {{
  %halves = call {halves} {convert}({sums} %high, {sums} %low)
  %pairs = shufflevector {halves} %halves, {halves} poison, <{2 * lanes} x i32> <{interleave}>
  %words = bitcast {halves} %pairs to {words}
  ret {words} %words
}}
"""


def _vpdpbusd(lanes: int) -> str:
    """Sums wrap around, as int32 does; one product of unsigned and signed bytes cannot."""
    words = f"<{lanes} x i32>"
    instruction = f"@llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    return f"""
declare {words} {instruction}({words}, {words}, {words})
define {words} @mhsa_dot_int8_{lanes}({words} %c, {words} %a, {words} %b) alwaysinline nounwind memory(none) {{
  %r = call {words} {instruction}({words} %c, {words} %a, {words} %b)
  ret {words} %r
}}
"""


def _vpmaddwd(lanes: int, instruction: str) -> str:
    """Products of 16 bits, two and two added in 32: of what a byte holds, and of differences of bytes, no sum wraps."""
    words, halves = f"<{lanes} x i32>", f"<{2 * lanes} x i16>"
    return f"""
declare {words} {instruction}({halves}, {halves})
define {words} @mhsa_dot_int16_{lanes}({words} %c, {words} %a, {words} %b) alwaysinline nounwind memory(none) {{
  %x = bitcast {words} %a to {halves}
  %y = bitcast {words} %b to {halves}
  %p = call {words} {instruction}({halves} %x, {halves} %y)
  %r = add {words} %c, %p
  ret {words} %r
}}
"""


# ---- aarch64


def _dot(name: str, intrinsic: str, sums: str, narrow: str) -> str:
    """All lanes of %a are equal: where they are one lane of a vector, LLVM takes that as it is."""
    return f"""
declare {sums} {intrinsic}({sums}, {narrow}, {narrow})
define {sums} @{name}({sums} %c, <4 x i32> %a, <4 x i32> %b) alwaysinline nounwind memory(none) {{
  %x = bitcast <4 x i32> %a to {narrow}
  %y = bitcast <4 x i32> %b to {narrow}
  %r = call {sums} {intrinsic}({sums} %c, {narrow} %y, {narrow} %x)
  ret {sums} %r
}}
"""


def _fmlal(name: str) -> str:
    """One product each, not rounded before it is added in float32. It takes the lower halves of its factors."""
    intrinsic = "@llvm.aarch64.neon.fmlal.v4f32.v8f16"
    lower = ", ".join(f"i32 {i}" for i in (0, 1, 2, 3, *["poison"] * 4))
    return f"""
declare <4 x float> {intrinsic}(<4 x float>, <8 x half>, <8 x half>)
define <4 x float> @{name}(<4 x float> %c, <4 x i16> %a, <4 x i16> %b) alwaysinline nounwind memory(none) {{
  %p = shufflevector <4 x i16> %a, <4 x i16> poison, <8 x i32> zeroinitializer
  %q = shufflevector <4 x i16> %b, <4 x i16> poison, <8 x i32> <{lower}>
  %x = bitcast <8 x i16> %p to <8 x half>
  %y = bitcast <8 x i16> %q to <8 x half>
  %r = call <4 x float> {intrinsic}(<4 x float> %c, <8 x half> %y, <8 x half> %x)
  ret <4 x float> %r
}}
"""


# What products leave as float32 becomes factors: BFCVTN, then ZIP1 and ZIP2.
AARCH64_PAIR = """
define <4 x i32> @mhsa_pair_bfloat16_4(<4 x float> %low, <4 x float> %high) alwaysinline nounwind memory(none) {
  %x = fptrunc <4 x float> %low to <4 x bfloat>
  %y = fptrunc <4 x float> %high to <4 x bfloat>
  %pairs = shufflevector <4 x bfloat> %x, <4 x bfloat> %y,
    <8 x i32> <i32 0, i32 4, i32 1, i32 5, i32 2, i32 6, i32 3, i32 7>
  %words = bitcast <8 x bfloat> %pairs to <4 x i32>
  ret <4 x i32> %words
}
"""
# BFDOT sums pairs in float32; denormals are flushed to zero, rounding is to odd inside. SDOT takes signed bytes.
_BFDOT = _dot("mhsa_dot_bfloat16_4", "@llvm.aarch64.neon.bfdot.v4f32.v8bf16", "<4 x float>", "<8 x bfloat>")
_SDOT = _dot("mhsa_dot_int8_4", "@llvm.aarch64.neon.sdot.v4i32.v16i8", "<4 x i32>", "<16 x i8>")


def _bfloat16(lanes: int, feature: str, text: str, run: int) -> DotProducts:
    function, pair = f"mhsa_dot_bfloat16_{lanes}", f"mhsa_pair_bfloat16_{lanes}"
    return DotProducts("bfloat16", "float32", lanes, 2, 1, run, feature, function=function, text=text, pair=pair)


def _int8(lanes: int, feature: str, text: str, run: int, *, unsigned: bool) -> DotProducts:
    name = f"mhsa_dot_int8_{lanes}"
    return DotProducts("int8", "int32", lanes, 4, run=run, feature=feature, function=name, text=text, unsigned=unsigned)


def _int16(lanes: int, feature: str, instruction: str) -> DotProducts:
    text, function = _vpmaddwd(lanes, instruction), f"mhsa_dot_int16_{lanes}"
    return AddedProducts("int16", "int32", lanes, 2, feature=feature, function=function, text=text)


UNITS = (  # the widest first
    _bfloat16(16, "avx512_bf16", _vdpbf16ps(16), 1),
    _int8(16, "avx512_vnni", _vpdpbusd(16), 1, unsigned=True),
    _int8(8, "avx_vnni", _vpdpbusd(8), 1, unsigned=True),
    _int16(16, "avx512bw", "@llvm.x86.avx512.pmaddw.d.512"),
    _int16(8, "avx2", "@llvm.x86.avx2.pmadd.wd"),
    _bfloat16(4, "bf16", _BFDOT + AARCH64_PAIR, 4),
    _int8(4, "asimddp", _SDOT, 4, unsigned=False),
    DotProducts(
        "float16", "float32", 4, run=8, feature="asimdfhm", function="mhsa_product_float16_4",
        text=_fmlal("mhsa_product_float16_4"),
    ),
)  # fmt: skip

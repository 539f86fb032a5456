"""Instructions for narrow products: each lane of an accumulator takes the products of a group of neighbours at once.

TVM has no word for them, and legalises bfloat16 vectors away before LLVM sees them. So the neighbours travel as one
word (two bfloat16 or four int8 as an int32, twice as many as an int64, the first in its lowest bits), and a few lines
of LLVM IR, inlined into the kernel that imports them, give them their type back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.cpu.simd import dot_product_aarch64
from mhsa_compile.kernels.cpu.simd.vectors import Expr, splat


@dataclass(frozen=True)
class Dot:
    """One instruction. A dot product (`rows` 1): accumulator[i] += sum over j < group of a[j] * b[i, j], i < lanes; of
    `group` 1, a plain one. A matrix product (`rows` 2) does it for two rows of `a`; its accumulator holds both, and
    `unzipped` parts them.

    dtype        of the factors
    accumulator  "float32", or "int32", which wraps around
    feature      what the CPU must have, named as in /proc/cpuinfo
    unsigned     for "int8": whether those of `a` are; those of `b` are signed
    """

    dtype: Literal["bfloat16", "float16", "int8"]
    accumulator: Literal["float32", "int32"]
    group: int
    lanes: int
    feature: str
    function: str
    text: str
    rows: int = 1
    unsigned: bool = False

    @property
    def word(self) -> str:
        """dtype of a group of neighbours."""
        return f"int{self.group * (8 if self.dtype == 'int8' else 16)}"

    def imported(self) -> AbstractContextManager[Any]:
        """Stands around the body of a PrimFunc that calls `accumulate`. Any number of PrimFuncs of a module may."""
        context: AbstractContextManager[Any] = T.attr(0, "pragma_import_llvm", self.text)
        return context

    def accumulate(self, accumulator: Expr, a: Expr, b: Expr) -> Expr:
        """`accumulator` (rows * lanes,) plus the products of the groups in `a`, one word or for two rows a vector of
        two, and in `b`, a vector of `lanes` words."""
        a = splat(a, self.lanes) if self.rows == 1 else a
        return T.call_pure_extern(f"{self.accumulator}x{self.rows * self.lanes}", self.function, accumulator, a, b)

    def unzipped(self, accumulator: Expr) -> list[Expr]:
        """The sums of each row of `a`, (lanes,) each."""
        if self.rows == 1:
            return [accumulator]
        # Pairs of lanes of one row and of the other in turn.
        places = [[4 * (i // 2) + 2 * row + i % 2 for i in range(self.lanes)] for row in range(2)]
        return [T.Shuffle([accumulator], [T.int32(i) for i in row]) for row in places]


def available(profile: CpuProfile, dtype: str) -> Dot | None:
    """The widest dot product of `dtype` on this target, or None."""
    return max(_usable(profile, dtype, 1), key=lambda dot: dot.lanes, default=None)


def matrix(profile: CpuProfile, dtype: str) -> Dot | None:
    """The matrix product of `dtype` on this target, or None."""
    return next(iter(_usable(profile, dtype, 2)), None)


def _usable(profile: CpuProfile, dtype: str, rows: int) -> list[Dot]:
    width, features = profile.vector_lanes("float32"), profile.hardware.features
    return [
        dot
        for dot in DOTS
        if dot.dtype == dtype and dot.rows == rows and dot.feature in features and dot.lanes <= width
    ]


def _bfloat16_text(lanes: int) -> str:
    """Products and sums are rounded to nearest even, denormals are flushed to zero (Intel SDM, VDPBF16PS)."""
    sums, words, halves = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{2 * lanes} x bfloat>"
    instruction = f"@llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
    return f"""
declare {sums} {instruction}({sums}, {halves}, {halves})
define {sums} @mhsa_dot_bfloat16_{lanes}({sums} %c, {words} %a, {words} %b) alwaysinline nounwind memory(none) {{
  %x = bitcast {words} %a to {halves}
  %y = bitcast {words} %b to {halves}
  %r = call {sums} {instruction}({sums} %c, {halves} %x, {halves} %y)
  ret {sums} %r
}}
"""


def _int8_text(lanes: int) -> str:
    """VPDPBUSD: sums wrap around, as int32 does; one product of unsigned and signed bytes cannot."""
    words = f"<{lanes} x i32>"
    instruction = f"@llvm.x86.avx512.vpdpbusd.{32 * lanes}"
    return f"""
declare {words} {instruction}({words}, {words}, {words})
define {words} @mhsa_dot_int8_{lanes}({words} %c, {words} %a, {words} %b) alwaysinline nounwind memory(none) {{
  %r = call {words} {instruction}({words} %c, {words} %a, {words} %b)
  ret {words} %r
}}
"""


DOTS = (
    Dot("bfloat16", "float32", 2, 16, "avx512_bf16", "mhsa_dot_bfloat16_16", _bfloat16_text(16)),
    Dot("int8", "int32", 4, 16, "avx512_vnni", "mhsa_dot_int8_16", _int8_text(16), unsigned=True),
    Dot("int8", "int32", 4, 8, "avx_vnni", "mhsa_dot_int8_8", _int8_text(8), unsigned=True),
    Dot("bfloat16", "float32", 2, 4, "bf16", *dot_product_aarch64.bfloat16_dot()),
    Dot("bfloat16", "float32", 4, 4, "bf16", *dot_product_aarch64.bfloat16_matrix(), rows=2),
    Dot("float16", "float32", 1, 4, "asimdfhm", *dot_product_aarch64.float16_products()),
    Dot("int8", "int32", 4, 4, "asimddp", *dot_product_aarch64.int8_dot()),
    Dot("int8", "int32", 8, 4, "i8mm", *dot_product_aarch64.int8_matrix(), rows=2),
)

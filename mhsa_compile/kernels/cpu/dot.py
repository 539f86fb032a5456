"""Dot-product instructions: each lane of an accumulator takes the products of a group of narrow neighbours at once.

TVM has no word for them, and legalises bfloat16 vectors away before LLVM sees them. So the neighbours travel as one
int32 (two bfloat16, or four int8, the first in its lowest bits), and a few lines of LLVM IR, inlined into the kernel
that imports them, give them their type back.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.vectors import Expr
from mhsa_compile.profile import TargetProfile


@dataclass(frozen=True)
class Dot:
    """One instruction: accumulator[i] += sum over j < group of a[i, j] * b[i, j], i < lanes.

    dtype        of the factors; for "int8" those of `a` are unsigned, those of `b` signed
    accumulator  "float32", or "int32", which wraps around
    feature      what the CPU must have, named as in /proc/cpuinfo
    """

    dtype: Literal["bfloat16", "int8"]
    accumulator: Literal["float32", "int32"]
    group: int
    lanes: int
    feature: str
    function: str
    text: str

    def imported(self) -> AbstractContextManager[Any]:
        """Stands around the body of a PrimFunc that calls `accumulate`. Any number of PrimFuncs of a module may."""
        context: AbstractContextManager[Any] = T.attr(0, "pragma_import_llvm", self.text)
        return context

    def accumulate(self, accumulator: Expr, a: Expr, b: Expr) -> Expr:
        """`accumulator` (lanes,) plus the products of the groups in `a` and `b`, both int32 (lanes,)."""
        return T.call_pure_extern(f"{self.accumulator}x{self.lanes}", self.function, accumulator, a, b)


def available(profile: TargetProfile, dtype: str) -> Dot | None:
    """The widest instruction that multiplies `dtype` on this target, or None."""
    width, features = profile.vector_lanes("float32"), profile.hardware.features
    usable = [dot for dot in DOTS if dot.dtype == dtype and dot.feature in features and dot.lanes <= width]
    return max(usable, key=lambda dot: dot.lanes, default=None)


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
    Dot("int8", "int32", 4, 16, "avx512_vnni", "mhsa_dot_int8_16", _int8_text(16)),
    Dot("int8", "int32", 4, 8, "avx_vnni", "mhsa_dot_int8_8", _int8_text(8)),
)

"""Powers of two of a whole vector in six instructions, and what a pair of them becomes for tiles."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vectors import constant, load, splat
from mhsa_compile.kernels.cpu.units import tiles

LANES = 16
COEFFICIENTS = (0.99992522, 0.69583354, 0.22606716, 0.07802452)
"""2^f on [0, 1), minimax of degree 3 with relative error 7.5e-5; what is rounded to bfloat16 has 2e-3."""


def exp2(x: Expr) -> Expr:
    """2^x of sixteen float32: 0 of -inf, inf of inf, NaN of NaN."""
    fraction = T.Bind(T.call_pure_extern("float32x16", "mhsa_fraction", x))
    value = constant(COEFFICIENTS[-1], LANES)
    for coefficient in COEFFICIENTS[-2::-1]:
        value = value * fraction + constant(coefficient, LANES)
    return T.call_pure_extern("float32x16", "mhsa_scaled", value, x)


def positive_pairs(low: Expr, high: Expr) -> Expr:
    """Two vectors of numbers from 0 on as words of two bfloat16, to nearest; half of the last place is rounded up."""
    half = splat(T.uint32(0x8000), LANES)
    low, high = (T.reinterpret("uint32x16", value) + half for value in (low, high))
    word = (low >> splat(T.uint32(16), LANES)) | (high & splat(T.uint32(0xFFFF0000), LANES))
    return T.reinterpret("int32x16", word)


def pairs(low: Expr, high: Expr) -> Expr:
    """Two vectors of numbers as words of two bfloat16, to nearest even, denormals as zero."""
    return T.call_pure_extern("int32x16", "mhsa_tile_pairs", low, high)


def row_of_bfloat16(buffer: Expr, index: Sequence[Expr]) -> Expr:
    """32 neighbours of a row as bits of bfloat16, uint16; float32 is rounded to nearest even, denormals are zero."""
    if buffer.dtype == "bfloat16":
        return T.reinterpret("uint16x32", load(buffer, index, 32))
    low, high = (load(buffer, [*index[:-1], index[-1] + first], LANES) for first in (0, LANES))
    return tiles.narrowed_pair(low, high)


def halves(words: Expr) -> Sequence[Expr]:
    """The two bfloat16 of each word, as float32."""
    high = words & splat(T.int32(-65536), LANES)
    return [T.reinterpret("float32x16", half) for half in (words << splat(T.int32(16), LANES), high)]


_TURNS = ", ".join(f"i32 {i // 2 + 16 * (i % 2)}" for i in range(32))
TEXT = f"""
declare <16 x float> @llvm.x86.avx512.mask.reduce.ps.512(<16 x float>, i32, <16 x float>, i16, i32)
declare <16 x float> @llvm.x86.avx512.mask.scalef.ps.512(<16 x float>, <16 x float>, <16 x float>, i16, i32)
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define <16 x float> @mhsa_fraction(<16 x float> %x) alwaysinline nounwind memory(none) {{
  %r = call <16 x float> @llvm.x86.avx512.mask.reduce.ps.512(<16 x float> %x, i32 9, <16 x float> undef, i16 -1, i32 4)
  ret <16 x float> %r
}}
define <16 x float> @mhsa_scaled(<16 x float> %x, <16 x float> %n) alwaysinline nounwind memory(none) {{
  %r = call <16 x float> @llvm.x86.avx512.mask.scalef.ps.512(<16 x float> %x, <16 x float> %n, <16 x float> undef,
    i16 -1, i32 4)
  ret <16 x float> %r
}}
define <16 x i32> @mhsa_tile_pairs(<16 x float> %low, <16 x float> %high) alwaysinline nounwind memory(none) {{
  %both = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %mixed = shufflevector <32 x bfloat> %both, <32 x bfloat> poison, <32 x i32> <{_TURNS}>
  %words = bitcast <32 x bfloat> %mixed to <16 x i32>
  ret <16 x i32> %words
}}
"""

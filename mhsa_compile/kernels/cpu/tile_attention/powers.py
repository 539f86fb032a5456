"""Powers of two of a whole vector in six instructions, or in ten with an error below 1 ulp, and the words that tiles
take of a pair of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vector_math import EXP2_COEFFICIENTS
from mhsa_compile.kernels.cpu.simd.vectors import constant, let, splat

LANES = 16
COEFFICIENTS = (0.99992522, 0.69583354, 0.22606716, 0.07802452)
"""2^f on [0, 1), minimax of degree 3 with relative error 7.5e-5; what is rounded to bfloat16 has 2e-3."""

BEFORE_CUT = 1 + 2**-8 / (2 * math.log(2))
"""What a number is multiplied by before all but its upper 16 bits are cut off: on average, over mantissas as those of
powers are (log-uniform), that loses nothing. The largest error is 2 thirds of the last place, to nearest a half."""


def exp2(x: Expr, terms: int = 1, scale: float = 1.0) -> Expr:
    """scale * 2^x of sixteen float32: 0 of -inf, inf of inf, NaN of NaN. What has several terms has an error below
    1 ulp."""
    coefficients: Sequence[float] = COEFFICIENTS if terms == 1 else EXP2_COEFFICIENTS
    fraction = let(_call("mhsa_fraction" if terms == 1 else "mhsa_signed_fraction", x))
    power = x if terms == 1 else x - fraction
    value = constant(coefficients[-1] * scale, LANES)
    for coefficient in coefficients[-2::-1]:
        value = value * fraction + constant(coefficient * scale, LANES)
    return _call("mhsa_scaled", value, power)


def _call(name: str, *vectors: Expr) -> Expr:
    return T.call_pure_extern("float32x16", name, *vectors)


def add_in_order(total: Expr, value: Expr) -> Expr:
    """total + value, where it stands among products of tiles: LLVM would leave all additions to their end, and keep
    what is added on the stack until then."""
    return T.call_extern("float32x16", "mhsa_add_in_order", total, value)


def words_of_terms(pair: Sequence[Expr], terms: int) -> list[Expr]:
    """The terms of two vectors of numbers as words of two bfloat16 each, to nearest; half of the last place is rounded
    away from zero. Of 24 bits the third has what two leave."""
    words, upper = [], splat(T.uint32(0xFFFF0000), LANES)
    for term in range(terms):
        if term < 2:
            bits = [_rounded(value) for value in pair]
        else:
            bits = [T.reinterpret("uint32x16", value) for value in pair]
        if term + 1 < terms:
            bits = [let(value & upper) for value in bits]
            pair = [let(value - _as_float(own)) for value, own in zip(pair, bits, strict=True)]
        words.append(T.reinterpret("int32x16", (bits[0] >> splat(T.uint32(16), LANES)) | (bits[1] & upper)))
    return words


def _rounded(value: Expr) -> Expr:
    """Bits whose upper half is a number's bfloat16."""
    return T.reinterpret("uint32x16", value) + splat(T.uint32(0x8000), LANES)


def _as_float(bits: Expr) -> Expr:
    return T.reinterpret("float32x16", bits)


def pairs(low: Expr, high: Expr, *, dtype: str) -> Expr:
    """Two vectors of numbers as words of two of 16 bits, to nearest even, denormals of bfloat16 as zero."""
    return T.call_pure_extern("int32x16", f"mhsa_tile_pairs_{dtype}", low, high)


def halves(words: Expr, dtype: str) -> list[Expr]:
    """The two numbers of each word, as float32."""
    if dtype == "float16":
        bits = [T.cast(half, "uint16x16") for half in (words, words >> splat(T.int32(16), LANES))]
        return [T.cast(T.reinterpret("float16x16", half), "float32x16") for half in bits]
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
define <16 x float> @mhsa_signed_fraction(<16 x float> %x) alwaysinline nounwind memory(none) {{
  %r = call <16 x float> @llvm.x86.avx512.mask.reduce.ps.512(<16 x float> %x, i32 8, <16 x float> undef, i16 -1, i32 4)
  ret <16 x float> %r
}}
define <16 x float> @mhsa_scaled(<16 x float> %x, <16 x float> %n) alwaysinline nounwind memory(none) {{
  %r = call <16 x float> @llvm.x86.avx512.mask.scalef.ps.512(<16 x float> %x, <16 x float> %n, <16 x float> undef,
    i16 -1, i32 4)
  ret <16 x float> %r
}}
define <16 x float> @mhsa_add_in_order(<16 x float> %total, <16 x float> %x) alwaysinline nounwind {{
  %r = call <16 x float> asm sideeffect "vaddps $2, $1, $0", "=v,v,v"(<16 x float> %total, <16 x float> %x)
  ret <16 x float> %r
}}
define <16 x i32> @mhsa_tile_pairs_float16(<16 x float> %low, <16 x float> %high) alwaysinline nounwind memory(none) {{
  %a = fptrunc <16 x float> %low to <16 x half>
  %b = fptrunc <16 x float> %high to <16 x half>
  %mixed = shufflevector <16 x half> %a, <16 x half> %b, <32 x i32> <{_TURNS}>
  %words = bitcast <32 x half> %mixed to <16 x i32>
  ret <16 x i32> %words
}}
define <16 x i32> @mhsa_tile_pairs_bfloat16(<16 x float> %low, <16 x float> %high) alwaysinline nounwind memory(none) {{
  %both = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %mixed = shufflevector <32 x bfloat> %both, <32 x bfloat> poison, <32 x i32> <{_TURNS}>
  %words = bitcast <32 x bfloat> %mixed to <16 x i32>
  ret <16 x i32> %words
}}
"""

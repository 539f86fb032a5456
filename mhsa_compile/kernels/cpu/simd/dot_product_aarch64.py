"""The narrow products of aarch64 as LLVM IR: the one place that knows their intrinsics.

Words are of 16 bits for plain products (FMLAL), of 32 for dot products (BFDOT, SDOT), and of 64 for matrix products
(BFMMLA, SMMLA), which multiply two rows of `a` with two of `b`: a vector of sums is [a0 b0, a0 b1, a1 b0, a1 b1]. Four
words of `b` at a time make two such vectors. Source: Arm Architecture Reference Manual, DDI 0487.
"""

from __future__ import annotations


def bfloat16_dot() -> tuple[str, str]:
    """BFDOT: pairs of products, summed in float32; denormals are flushed to zero, rounding is to odd inside."""
    intrinsic = "@llvm.aarch64.neon.bfdot.v4f32.v8bf16"
    return _dot("mhsa_dot_bfloat16_4", intrinsic, "<4 x float>", "<8 x bfloat>")


def int8_dot() -> tuple[str, str]:
    """SDOT: four products of signed bytes, added to int32."""
    return _dot("mhsa_dot_int8_4", "@llvm.aarch64.neon.sdot.v4i32.v16i8", "<4 x i32>", "<16 x i8>")


def bfloat16_matrix() -> tuple[str, str]:
    """BFMMLA: for each sum four products, two and two, rounded as BFDOT does."""
    return _matrix("mhsa_matrix_bfloat16", "@llvm.aarch64.neon.bfmmla", "float", "<8 x bfloat>")


def int8_matrix() -> tuple[str, str]:
    """SMMLA: for each sum eight products of signed bytes."""
    return _matrix("mhsa_matrix_int8", "@llvm.aarch64.neon.smmla.v4i32.v16i8", "i32", "<16 x i8>")


def float16_products() -> tuple[str, str]:
    """FMLAL: one product each, not rounded before it is added in float32. It takes the lower halves of its factors."""
    name, intrinsic = "mhsa_product_float16_4", "@llvm.aarch64.neon.fmlal.v4f32.v8f16"
    lower = ", ".join(f"i32 {i}" for i in (0, 1, 2, 3, *["poison"] * 4))
    return (
        name,
        f"""
declare <4 x float> {intrinsic}(<4 x float>, <8 x half>, <8 x half>)
define <4 x float> @{name}(<4 x float> %c, <4 x i16> %a, <4 x i16> %b) alwaysinline nounwind memory(none) {{
  %p = shufflevector <4 x i16> %a, <4 x i16> poison, <8 x i32> zeroinitializer
  %q = shufflevector <4 x i16> %b, <4 x i16> poison, <8 x i32> <{lower}>
  %x = bitcast <8 x i16> %p to <8 x half>
  %y = bitcast <8 x i16> %q to <8 x half>
  %r = call <4 x float> {intrinsic}(<4 x float> %c, <8 x half> %y, <8 x half> %x)
  ret <4 x float> %r
}}
""",
    )


# What products leave as float32 becomes factors: BFCVTN, then ZIP1 and ZIP2. Two vectors make pairs, four make words.
PAIR = """
define <4 x i32> @mhsa_pair_bfloat16_4(<4 x float> %low, <4 x float> %high) alwaysinline nounwind memory(none) {
  %x = fptrunc <4 x float> %low to <4 x bfloat>
  %y = fptrunc <4 x float> %high to <4 x bfloat>
  %pairs = shufflevector <4 x bfloat> %x, <4 x bfloat> %y,
    <8 x i32> <i32 0, i32 4, i32 1, i32 5, i32 2, i32 6, i32 3, i32 7>
  %words = bitcast <8 x bfloat> %pairs to <4 x i32>
  ret <4 x i32> %words
}
"""
WORDS_NAME = "mhsa_words_bfloat16"
WORDS = (
    PAIR
    + f"""
define <4 x i64> @{WORDS_NAME}(<4 x float> %a, <4 x float> %b, <4 x float> %c, <4 x float> %d)
    alwaysinline nounwind memory(none) {{
  %low = call <4 x i32> @mhsa_pair_bfloat16_4(<4 x float> %a, <4 x float> %b)
  %high = call <4 x i32> @mhsa_pair_bfloat16_4(<4 x float> %c, <4 x float> %d)
  %both = shufflevector <4 x i32> %low, <4 x i32> %high,
    <8 x i32> <i32 0, i32 4, i32 1, i32 5, i32 2, i32 6, i32 3, i32 7>
  %words = bitcast <8 x i32> %both to <4 x i64>
  ret <4 x i64> %words
}}
"""
)


def _dot(name: str, intrinsic: str, sums: str, narrow: str) -> tuple[str, str]:
    """All lanes of %a are equal: where they are one lane of a vector, LLVM takes that as it is."""
    return (
        name,
        f"""
declare {sums} {intrinsic}({sums}, {narrow}, {narrow})
define {sums} @{name}({sums} %c, <4 x i32> %a, <4 x i32> %b) alwaysinline nounwind memory(none) {{
  %x = bitcast <4 x i32> %a to {narrow}
  %y = bitcast <4 x i32> %b to {narrow}
  %r = call {sums} {intrinsic}({sums} %c, {narrow} %y, {narrow} %x)
  ret {sums} %r
}}
""",
    )


def _matrix(name: str, intrinsic: str, sum: str, narrow: str) -> tuple[str, str]:
    sums, four = f"<8 x {sum}>", f"<4 x {sum}>"
    low, high = (", ".join(f"i32 {i}" for i in range(first, first + 4)) for first in (0, 4))
    return (
        name,
        f"""
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
""",
    )

"""Float32 numbers as bfloat16 terms for tiles: x = x0 + x1 + x2, each to nearest even of what those before it leave.

What terms would make something else of has to be computed in float32: rows and columns that hold Inf, NaN or a number
from 2^60 on, or none but zeros and numbers below 2^-50. Of what remains the largest product is between 2^-100 and
2^120: nothing overflows that does not in float32, and what the unit loses below 2^-126 is less than 2^-24 of that
product. Beside larger numbers of its row, one below 2^-102 loses its last term, and one below 2^-126 is zero.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vectors import let, load, splat, store, vector_type
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.spec.float32_products import Float32Products

LANES = tiles.WORDS
ORDER: dict[Float32Products, tuple[tuple[int, int], ...]] = {
    "bf16x6": ((2, 0), (1, 0), (1, 1), (0, 1), (0, 2), (0, 0)),
    "bf16x3": ((1, 0), (0, 0), (0, 1)),
    "bf16": ((0, 0),),
}
"""The pairs of TERM_PRODUCTS, of which each has a term in common with the one before it."""
OF_FLOAT16 = ((1, 1), (1, 0), (0, 0), (0, 1))
"""Those of two float16 numbers, each of which is the sum of two terms, so that their product is exact."""
CHAIN = 4
"""Tiles of K after which a chain of sums starts anew: 128 numbers."""
LARGE, SMALL = 0x5D800000, 0x26800000
"""Bits of 2^60 and of 2^-50: the largest magnitude of a row or a feature is ordinary between them."""


def terms(halves: list[Expr], count: int) -> list[Expr]:
    """The terms of 32 numbers, each to nearest even of what those before it leave."""
    bits: list[Expr] = []
    for _ in range(count):
        if bits:
            low = [T.Shuffle([bits[-1]], [T.int32(start + i) for i in range(LANES)]) for start in (0, LANES)]
            wide = [T.cast(half, "uint32x16") << splat(T.uint32(16), LANES) for half in low]
            halves = [let(half - T.reinterpret("float32x16", last)) for half, last in zip(halves, wide, strict=True)]
        bits.append(let(tiles.narrowed_pair(*halves)))
    return bits


def pair_terms(low: Expr, high: Expr, count: int) -> list[Expr]:
    """The terms of two rows of weights, which are neighbours along K, as words of both."""
    words: list[Expr] = []
    turns = [T.int32(i // 2 + LANES * (i % 2)) for i in range(2 * LANES)]
    for _ in range(count):
        if words:
            last = T.reinterpret("uint32x16", words[-1])
            parts = last << splat(T.uint32(16), LANES), last & splat(T.uint32(0xFFFF0000), LANES)
            low, high = (
                let(half - T.reinterpret("float32x16", part)) for half, part in zip((low, high), parts, strict=True)
            )
        if len(words) == 2:  # what two terms leave has less than eight bits
            words.append(let(tiles.upper_halves(low, high)))
        else:
            bits = let(tiles.narrowed_pair(low, high))
            words.append(let(T.reinterpret("int32x16", T.Shuffle([bits], turns))))
    return words


def magnitude(number: Expr, lanes: int = LANES) -> Expr:
    """The bits of numbers without their signs, which are ordered as the numbers are."""
    return T.reinterpret(vector_type("uint32", lanes), number) & splat(T.uint32(0x7FFFFFFF), lanes)


def keep_largest(largest: Expr, at: list[Expr], numbers: list[Expr]) -> None:
    """A vector of largest magnitudes becomes what these vectors of numbers make of it."""
    most = load(largest, at, LANES)
    for number in numbers:
        most = T.max(most, magnitude(number))
    store(largest, at, most, LANES)


def is_extraordinary(largest: Expr, lanes: int = 1) -> Expr:
    """Whether the largest magnitude of a row or a feature asks for float32."""
    large, small, zero = (splat(T.uint32(bits), lanes) for bits in (LARGE, SMALL, 0))
    return T.Or(largest >= large, T.And(largest < small, largest > zero))

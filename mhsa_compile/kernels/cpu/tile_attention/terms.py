"""Rows of Q, K and V as tiles take them, 32 neighbours as bits of 16 or by terms, and what no terms carry.

A number is x = x0 + x1 + x2, each the nearest bfloat16 to what those before it leave; the unit takes what is below
2^-126 as zero. From 2^60 on products of numbers overflow that float32's do not, Inf and NaN have no lower terms; and a
row of V whose largest number is below 2^-50 would lose digits that its output has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import let, load, splat, store
from mhsa_compile.kernels.cpu.tile_attention.powers import LANES
from mhsa_compile.kernels.cpu.units import float32_terms, tiles
from mhsa_compile.kernels.cpu.units.float32_terms import ORDER, SMALL
from mhsa_compile.kernels.interface.ops import AttentionOp

WIDTH = 2 * LANES
"""Neighbours that are split together."""
WHOLE = 0x0C800000
"""Bits of 2^-102: from there on a number has all of its three terms."""
INFINITE = 0x7F800000
EXPONENTS = {"float16": 0x7C00, "bfloat16": INFINITE >> 16}
"""Of numbers of 16 bits, all of them set in those that are not finite."""


def term_pairs(op: AttentionOp) -> tuple[tuple[int, int], ...]:
    """The terms of the left and of the right factor that are multiplied."""
    return ((0, 0),) if op.dtype != "float32" else ORDER[op.float32_products]


def term_count(op: AttentionOp) -> int:
    return 1 + max(max(pair) for pair in term_pairs(op))


def narrow_row(buffer: Expr, index: Sequence[Expr]) -> Expr:
    """Its bits, uint16; float32 is rounded to bfloat16, to nearest even, denormals are zero."""
    if buffer.dtype != "float32":
        return T.reinterpret("uint16x32", load(buffer, index, WIDTH))
    return tiles.narrowed_pair(*wide_row(buffer, index))


def wide_row(buffer: Expr, index: Sequence[Expr]) -> list[Expr]:
    return [let(load(buffer, [*index[:-1], index[-1] + first], LANES)) for first in (0, LANES)]


@dataclass(frozen=True)
class Magnitudes:
    """The bits of the largest magnitude of some numbers, and one less than those of the smallest that is no zero, by
    lanes."""

    largest: Expr
    smallest: Expr

    @staticmethod
    def of_none() -> Magnitudes:
        both = Magnitudes(*(T.alloc_buffer((LANES,), "uint32") for _ in range(2)))
        store(both.largest, [T.int64(0)], splat(T.uint32(0), LANES), LANES)
        store(both.smallest, [T.int64(0)], splat(T.uint32(0xFFFFFFFF), LANES), LANES)
        return both

    def add(self, values: Sequence[Expr]) -> None:
        at = [T.int64(0)]
        for bits in [let(float32_terms.magnitude(value)) for value in values]:
            store(self.largest, at, T.max(load(self.largest, at, LANES), bits), LANES)
            # One less of a zero is the largest of all.
            less = bits - splat(T.uint32(1), LANES)
            store(self.smallest, at, T.min(load(self.smallest, at, LANES), less), LANES)

    def reach(self, bits: int) -> Expr:
        """Whether any number does."""
        return vectors.any_lane(load(self.largest, [T.int64(0)], LANES) >= splat(T.uint32(bits), LANES), LANES)

    def have_small_ones(self) -> Expr:
        """Whether a number is too small for all of its terms."""
        least = load(self.smallest, [T.int64(0)], LANES)
        return vectors.any_lane(least < splat(T.uint32(WHOLE - 1), LANES), LANES)

    def are_small(self) -> Expr:
        """Whether their largest is too small for terms, and no zero."""
        most = let(
            T.call_llvm_pure_intrin("uint32", "llvm.vector.reduce.umax", load(self.largest, [T.int64(0)], LANES))
        )
        return T.And(most > T.uint32(0), most < T.uint32(SMALL))

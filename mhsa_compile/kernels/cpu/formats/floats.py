"""Floats of 32 and 16 bits in memory, float32 in registers.

A bfloat16 is the upper half of a float32. It is widened and rounded through its bits: TVM's own cast to bfloat16
rounds some NaN to infinity or zero, and x86's instruction flushes denormals to zero. A float16 is left to LLVM's
conversion: one instruction on x86 with F16C and on every aarch64, a few lines of TVM's own elsewhere (on RISC-V of
ours: float16.c).

Rounding is to nearest, ties to even: beyond the largest finite value that is infinity; denormals are kept; NaN stays
NaN.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.formats.format import Format
from mhsa_compile.kernels.cpu.simd.vectors import let, splat, vector_type


class Float32(Format):
    def widened(self, elements: Expr, lanes: int) -> Expr:
        return elements

    def narrowed(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        return value


class Float16(Format):
    def widened(self, elements: Expr, lanes: int) -> Expr:
        return T.cast(elements, vector_type("float32", lanes))

    def narrowed(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        return T.cast(value, vector_type("float16", lanes))


class Bfloat16(Format):
    def widened(self, elements: Expr, lanes: int) -> Expr:
        bits = T.cast(T.reinterpret(vector_type("uint16", lanes), elements), vector_type("uint32", lanes))
        return T.reinterpret(vector_type("float32", lanes), bits << splat(T.uint32(16), lanes))

    def narrowed(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        bits = T.cast(bfloat16_bits(value, lanes), vector_type("uint16", lanes))
        return T.reinterpret(vector_type("bfloat16", lanes), bits)


def bfloat16_bits(value: Expr, lanes: int) -> Expr:
    """The bits of float32 values rounded to bfloat16, in the lower half of uint32.

    Half of the last place is added, less one bit where the last place is even, and what lies below is cut off; a carry
    into the exponent is right, up to infinity. It would turn some NaN into infinity: those get their quiet bit instead.
    """

    bits = let(T.reinterpret(vector_type("uint32", lanes), value))
    return rounded_bits(bits, let(bits >> splat(T.uint32(16), lanes)), lanes)


def rounded_bits(bits: Expr, upper: Expr, lanes: int, *, any_nan: bool = True) -> Expr:
    """The same of a float32's bits and their upper half, both of which are read more than once. Without `any_nan` NaN
    are those that arithmetic of bfloat16 has, whose lower bits are 0: no carry reaches their exponent."""

    def number(bits: int) -> Expr:
        return splat(T.uint32(bits), lanes)

    rounded = (bits + number(0x7FFF) + (upper & number(1))) >> number(16)
    if not any_nan:
        return rounded
    is_nan = (bits & number(0x7FFFFFFF)) > number(0x7F800000)
    return T.Select(is_nan, upper | number(0x40), rounded)

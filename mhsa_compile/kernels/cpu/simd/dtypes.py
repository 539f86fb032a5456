"""Elements of 16 bits in memory, float32 in registers: every kernel that reads or writes activations does it here.

A bfloat16 is the upper half of a float32. It is widened and rounded through its bits: TVM's own cast to bfloat16
rounds some NaN to infinity or zero, and x86's instruction flushes denormals to zero. A float16 is left to LLVM's
conversion: one instruction on x86 with F16C and on every aarch64, a few lines of TVM's own elsewhere (on RISC-V of
ours: float16.c).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vectors import (
    Expr,
    let,
    load,
    splat,
    store,
)


def vector_type(dtype: str, lanes: int) -> str:
    """TVM's name of a vector of `lanes` elements; of the element itself where that is one."""
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def load_wide(buffer: Expr, index: Sequence[Expr], lanes: int) -> Expr:
    """`lanes` neighbours in the last axis of a float32, bfloat16, float16 or int8 buffer, as float32."""
    value = load(buffer, index, lanes)
    if buffer.dtype == "float32":
        return value
    if buffer.dtype in ("float16", "int8"):
        return T.cast(value, vector_type("float32", lanes))
    bits = T.cast(T.reinterpret(vector_type("uint16", lanes), value), vector_type("uint32", lanes))
    return T.reinterpret(vector_type("float32", lanes), bits << splat(T.uint32(16), lanes))


def store_narrow(buffer: Expr, index: Sequence[Expr], value: Expr, lanes: int) -> None:
    """Stores `lanes` float32, each rounded to the nearest of the buffer's dtype, ties to even.

    Beyond the largest finite value that is infinity; denormals are kept; NaN stays NaN.
    """
    store(buffer, index, _narrowed(value, str(buffer.dtype), lanes), lanes)


def _narrowed(value: Expr, dtype: str, lanes: int) -> Expr:
    if dtype == "float32":
        return value
    if dtype == "float16":
        return T.cast(value, vector_type("float16", lanes))
    return T.reinterpret(
        vector_type("bfloat16", lanes), T.cast(bfloat16_bits(value, lanes), vector_type("uint16", lanes))
    )


def bfloat16_bits(value: Expr, lanes: int) -> Expr:
    """The bits of float32 values rounded to bfloat16, in the lower half of uint32.

    Half of the last place is added, less one bit where the last place is even, and what lies below is cut off; a carry
    into the exponent is right, up to infinity. It would turn some NaN into infinity: those get their quiet bit instead.
    """

    def number(bits: int) -> Expr:
        return splat(T.uint32(bits), lanes)

    bits = let(T.reinterpret(vector_type("uint32", lanes), value))
    upper = let(bits >> number(16))
    rounded = (bits + number(0x7FFF) + (upper & number(1))) >> number(16)
    is_nan = (bits & number(0x7FFFFFFF)) > number(0x7F800000)
    return T.Select(is_nan, upper | number(0x40), rounded)

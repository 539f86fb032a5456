"""Values that TVM's simplifier does not look into, as it takes floats for numbers on paper: x - x would be 0 also for
NaN, (x + k) - k be x also where x + k was rounded, and not (x < k) be k <= x.
"""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

_CARRIERS = {"float32": "int32", "float64": "int64", "float16": "int16"}


def opaque(value: Expr) -> Expr:
    """A float behind a reinterpretation as a whole number and back, which is no instruction."""
    kind, _, lanes = str(value.ty.dtype).partition("x")
    carrier = f"{_CARRIERS[kind]}x{lanes}" if lanes else _CARRIERS[kind]
    return tirx.call_intrin(value.ty.dtype, "tirx.reinterpret", tirx.call_intrin(carrier, "tirx.reinterpret", value))


def opaque_pair(one: Expr, other: Expr) -> tuple[Expr, Expr]:
    """The operands of an operation; the second is behind two, so that no two look alike."""
    return opaque(one), opaque(opaque(other))


def opaque_flag(value: Expr) -> Expr:
    """A bool, or a vector of them, as `opaque` does it."""
    value = tirx.convert(value)  # a comparison is none yet
    _, _, lanes = str(value.ty.dtype).partition("x")
    kind = f"float32x{lanes}" if lanes else "float32"
    number = opaque(tirx.Cast(kind, value))
    zero = tirx.const(0, "float32")
    return number != (tirx.Broadcast(zero, int(lanes)) if lanes else zero)

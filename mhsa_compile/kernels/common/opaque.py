"""Values that TVM's simplifier does not look into, as it takes floats for numbers on paper: x - x would be 0 also for
NaN, (x + k) - k be x also where x + k was rounded, and not (x < k) be k <= x.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx

Expr = Any  # a TIR expression; TVM has no type stubs


def opaque(value: Expr) -> Expr:
    """The value behind a reinterpretation as what it is, which is no instruction."""
    value = tirx.convert(value)  # a comparison is none yet
    return tirx.call_intrin(value.ty.dtype, "tirx.reinterpret", value)


def opaque_pair(one: Expr, other: Expr) -> tuple[Expr, Expr]:
    """The operands of an operation; the second is behind two, so that no two look alike."""
    return opaque(one), opaque(opaque(other))

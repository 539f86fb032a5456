"""What functions of scores may use beside arithmetic, of vectors, within a few ulp over all floats: no call, no branch.

`vector_math` has what the softmax itself needs, for the arguments that it has there.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vector_math import EXP2_COEFFICIENTS, natural_log, tanh
from mhsa_compile.kernels.cpu.simd.vectors import constant, materialize, splat

_ROUNDING = 12582912.0  # 1.5 * 2^23: what it is added to is rounded to a whole number
# ln 2 in two parts, of which products of the first with numbers below 2^11 are exact (Cody and Waite).
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440054690583e-4


def computed(op: str, x: Expr, lanes: int) -> Expr:
    """The value at x of the function `op`: exp, exp2, log, tanh, sigmoid or sqrt."""
    return _FUNCTIONS[op](x, lanes)


def exp(x: Expr, lanes: int) -> Expr:
    """e^x, infinity beyond 88.73, denormals and 0 below; NaN for NaN."""
    x = _held(x, -104.0, 90.0, lanes)
    n = _nearest(x * constant(math.log2(math.e), lanes), lanes)
    rest = materialize(x - n * constant(_LN2_HIGH, lanes), "float32", lanes)
    rest = materialize(rest - n * constant(_LN2_LOW, lanes), "float32", lanes)
    return _power(n, rest * constant(math.log2(math.e), lanes), lanes)


def exp2(x: Expr, lanes: int) -> Expr:
    """2^x, infinity from 128 on, denormals and 0 below; NaN for NaN."""
    x = _held(x, -151.0, 129.0, lanes)
    n = _nearest(x, lanes)
    return _power(n, x - n, lanes)


def log(x: Expr, lanes: int) -> Expr:
    """ln x; -infinity of 0, NaN of less and of NaN."""
    x = materialize(x, "float32", lanes)
    small, zero = constant(2.0**-126, lanes), constant(0.0, lanes)
    normal = materialize(T.Select(x < small, x * constant(2.0**24, lanes), x), "float32", lanes)
    shift = T.Select(x < small, constant(24 * math.log(2), lanes), zero)
    value = materialize(natural_log(normal, lanes) - shift, "float32", lanes)
    value = T.Select(x == constant(math.inf, lanes), constant(math.inf, lanes), value)
    value = T.Select(x < zero, constant(math.nan, lanes), value)
    return T.Select(x == zero, constant(-math.inf, lanes), value)


def sigmoid(x: Expr, lanes: int) -> Expr:
    one = constant(1.0, lanes)
    return one / (one + exp(constant(0.0, lanes) - x, lanes))


def sqrt(x: Expr, lanes: int) -> Expr:
    return T.call_llvm_pure_intrin(_real(lanes), "llvm.sqrt", x)


_FUNCTIONS = {"exp": exp, "exp2": exp2, "log": log, "tanh": tanh, "sigmoid": sigmoid, "sqrt": sqrt}


def _real(lanes: int) -> str:
    return "float32" if lanes == 1 else f"float32x{lanes}"


def _held(x: Expr, low: float, high: float, lanes: int) -> Expr:
    """x within bounds; NaN fails both comparisons, and stays."""
    x = materialize(x, "float32", lanes)
    x = materialize(T.Select(x < constant(low, lanes), constant(low, lanes), x), "float32", lanes)
    return materialize(T.Select(x > constant(high, lanes), constant(high, lanes), x), "float32", lanes)


def _nearest(x: Expr, lanes: int) -> Expr:
    """The nearest whole number, as a float."""
    rounding = constant(_ROUNDING, lanes)
    return materialize(materialize(x + rounding, "float32", lanes) - rounding, "float32", lanes)


def _power(n: Expr, fraction: Expr, lanes: int) -> Expr:
    """2^(n + fraction), n whole: in two steps, as 2^n itself may be beyond all floats where the result is not."""
    fraction = materialize(fraction, "float32", lanes)
    value = constant(EXP2_COEFFICIENTS[-1], lanes)
    for coefficient in reversed(EXP2_COEFFICIENTS[:-1]):
        value = value * fraction + constant(coefficient, lanes)
    whole = "int32" if lanes == 1 else f"int32x{lanes}"
    # NaN has no whole number; its fraction is NaN, too.
    number = materialize(T.cast(T.Select(T.isnan(n), constant(0.0, lanes), n), whole), "int32", lanes)
    half = materialize(number >> splat(T.int32(1), lanes), "int32", lanes)
    first, second = (
        T.reinterpret(_real(lanes), (part + splat(T.int32(127), lanes)) << splat(T.int32(23), lanes))
        for part in (half, number - half)
    )
    return materialize(value * first, "float32", lanes) * second

"""exp2, tanh and the natural logarithm of vectors: no call, no branch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vectors import constant, materialize, splat


def _at_least(x: Expr, floor: Expr, lanes: int) -> Expr:
    """The larger of the two; NaN where x is NaN."""
    return T.Select(x < floor, floor, x)


def maximum(x: Expr, floor: Expr, lanes: int) -> Expr:
    """The larger of x and floor, as one instruction where there is one: on aarch64."""
    return T.call_llvm_pure_intrin(f"float32x{lanes}" if lanes > 1 else "float32", "llvm.maximum", x, floor)


EXP2_SHIFT, EXP2_FLOOR = 12582912.0 + 127.0, -127.0
# 2^f on [-1/2, 1/2], minimax of degree 6 with relative error 2e-9 (test_vectors.py checks it against float64).
EXP2_COEFFICIENTS = (
    1.0,
    0.6931471824645996,
    0.24022646248340607,
    0.05550328642129898,
    0.009618489071726799,
    0.0013399930903688073,
    0.0001534581242594868,
)
# The same of degree 3, relative error 7.5e-5: for powers that are rounded to bfloat16 (2^-9 = 2e-3) at once.
EXP2_FOR_BFLOAT16 = (0.9999280571937561, 0.6932609677314758, 0.2426111251115799, 0.0551716685295105)


def exp2_coefficients(dtype: str) -> Sequence[float]:
    """Coefficients of a polynomial for powers of two, as exact as this dtype keeps them."""
    return EXP2_FOR_BFLOAT16 if dtype == "bfloat16" else EXP2_COEFFICIENTS


def exp2(
    x: Expr,
    lanes: int,
    coefficients: Sequence[float] = EXP2_COEFFICIENTS,
    constant: Callable[[float, int], Expr] = constant,
    at_least: Callable[[Expr, Expr, int], Expr] = _at_least,
) -> Expr:
    """2^x for x < 127.5, NaN for NaN, exactly 0 below -127: no call, no branch.

    With the default coefficients the error is below 0.95 ulp wherever 2^x is a normal number (x >= -126), and below
    2^-126.5 beneath: `make exp2-exhaustive` compares every float32 with float64.

    x = n + f with n the nearest integer. Adding 1.5 * 2^23 + 127 rounds to n and leaves n + 127 in the low bits of the
    sum, which, moved to the exponent's place, are 2^n. The sum goes through its bits because TVM's simplifier, taking
    floats for reals, would cancel (x + shift) - shift. The lower clamp is a select with x on the false side: a
    comparison with NaN is false, and NaN must come through. `constant` and `at_least` are how a machine does it best.
    """
    integer, real = (f"{kind}32" if lanes == 1 else f"{kind}32x{lanes}" for kind in ("int", "float"))
    shift, floor = constant(EXP2_SHIFT, lanes), constant(EXP2_FLOOR, lanes)
    x = materialize(x, "float32", lanes)
    x = materialize(at_least(x, floor, lanes), "float32", lanes)
    bits = materialize(T.reinterpret(integer, x + shift), "int32", lanes)
    fraction = materialize(x - (T.reinterpret(real, bits) - shift), "float32", lanes)
    power = _polynomial(coefficients, fraction, lanes, constant)
    # Were the product contracted into whoever adds it up, it would be computed twice, on the busiest units.
    product = power * T.reinterpret(real, bits << splat(T.int32(23), lanes))
    return T.call_llvm_pure_intrin(real, "llvm.arithmetic.fence", product)


def _polynomial(
    coefficients: Sequence[float], x: Expr, lanes: int, constant: Callable[[float, int], Expr] = constant
) -> Expr:
    """c0 + c1 x + c2 x^2 + ... by Horner's rule."""
    value = constant(coefficients[-1], lanes)
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + constant(coefficient, lanes)
    return value


# (2^f - 1) / f on [-1/2, 1/2], minimax of degree 5 with relative error 1.1e-8.
EXP2M1_COEFFICIENTS = (
    0.6931471824645996,
    0.24022649228572845,
    0.05550357326865196,
    0.009618237614631653,
    0.0013390735257416964,
    0.00015403512225020677,
)


def tanh(x: Expr, lanes: int) -> Expr:
    """tanh x with an error below 4 ulp, of small x too; odd, NaN for NaN: no call, no branch, one division.

    With e = 2^y - 1, y = 2 |x| log2 e, it is e / (e + 2), and where e > 2 rather 1 - 2 / (e + 2): there, where a cap
    holds the largest scores, the error is below 1.8 ulp. y = n + f as in `exp2`; e = 2^n (2^f - 1) + (2^n - 1) keeps
    small numbers exact. From y = 27 on it is 1.
    """
    integer, real = (f"{kind}32" if lanes == 1 else f"{kind}32x{lanes}" for kind in ("int", "float"))
    shift, end, one, two = (constant(value, lanes) for value in (12582912.0 + 127.0, 27.0, 1.0, 2.0))
    x = materialize(x, "float32", lanes)
    y = materialize(T.call_llvm_pure_intrin(real, "llvm.fabs", x) * constant(2 / math.log(2), lanes), "float32", lanes)
    y = materialize(T.Select(y > end, end, y), "float32", lanes)
    bits = materialize(T.reinterpret(integer, y + shift), "int32", lanes)
    fraction = materialize(y - (T.reinterpret(real, bits) - shift), "float32", lanes)
    part = materialize(_polynomial(EXP2M1_COEFFICIENTS, fraction, lanes) * fraction, "float32", lanes)
    power = materialize(T.reinterpret(real, bits << splat(T.int32(23), lanes)), "float32", lanes)
    # Not (1 + part) * power - 1, which would lose the digits of a small e.
    e = materialize(part * power + (power - one), "float32", lanes)
    ratio = materialize(T.Select(e > two, two, e) / (e + two), "float32", lanes)
    return T.call_llvm_pure_intrin(real, "llvm.copysign", T.Select(e > two, one - ratio, ratio), x)


def natural_log(x: Expr, lanes: int) -> Expr:
    """ln x of positive normal numbers, NaN for NaN, within 2 ulp of the larger of |ln x| and 1: no call, no branch.

    x = m 2^n with m in [sqrt(1/2), sqrt(2)); ln m = 2 artanh((m - 1) / (m + 1)), by its series, which leaves 2e-9.
    """
    integer, real = (f"{kind}32" if lanes == 1 else f"{kind}32x{lanes}" for kind in ("int", "float"))
    least = splat(T.int32(0x3F3504F3), lanes)  # the bits of sqrt(1/2)
    # Counted from sqrt(1/2), so that the exponent steps there and m lies around 1.
    bits = materialize(T.reinterpret(integer, x) - least, "int32", lanes)
    exponent = T.cast(bits >> splat(T.int32(23), lanes), real)
    m = T.reinterpret(real, (bits & splat(T.int32(0x007FFFFF), lanes)) + least)
    m = materialize(m, "float32", lanes)
    one = constant(1.0, lanes)
    t = materialize((m - one) / (m + one), "float32", lanes)
    square = materialize(t * t, "float32", lanes)
    series = constant(2.0 / 9.0, lanes)
    # Odd powers only, up to the ninth.
    for n in (7, 5, 3, 1):
        series = series * square + constant(2.0 / n, lanes)
    value = exponent * constant(math.log(2.0), lanes) + series * t
    # The bits of a NaN were taken for a number.
    return T.Select(T.isnan(x), x, value)

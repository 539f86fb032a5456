"""exp, log, erf, sigmoid, tanh, arcs and what activations make of them, of float32, as arithmetic in TVM's expressions.

TVM leaves them to the C library, one element at a time: 13 ns for an erf. As arithmetic LLVM computes as many at once
as a vector holds, 0.3 ns each. No calls, no branches; NaN stays NaN. docs/lab/2026-11-23-fallbacks.md has the figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from tvm import tirx
from tvm.ir import Expr

from mhsa_compile.kernels.cpu.simd.vector_math import EXP2_COEFFICIENTS, EXP2M1_COEFFICIENTS

# erf x = x + x p(x^2) below ERF_SPLIT, minimax with relative error 8.5e-9; above 1 - 2^q(x), where q = log2 erfc, with
# an error of 1e-9 in erf. Both by Lawson's iteration; from ERF_END on 1 is nearest.
ERF_SPLIT, ERF_END = 0.875, 3.95
ERF_SMALL = (
    0.12837915122509003,
    -0.3761255145072937,
    0.11282455176115036,
    -0.026791462674736977,
    0.005032179411500692,
    -0.0006203246302902699,
)
ERF_LARGE = (
    0.0,
    -1.6282646656036377,
    -0.9164559841156006,
    -0.15305732190608978,
    0.034099556505680084,
    -0.005168606527149677,
    0.00044439081102609634,
    -1.4066634321352467e-05,
)


# log2 of the share of a normal distribution beyond a, minimax by Lawson's iteration: up to 6.5 the share has an error
# of 1.5e-9 at most, from there on it falls as fast as it should, to 2^-66000 at 20.
NORMAL_TAIL = (
    -1.0,
    -1.1511043310165405,
    -0.4592211842536926,
    -0.05243486911058426,
    0.006927981041371822,
    2.3997710741241463e-05,
    -0.000295389472739771,
    8.211359818233177e-05,
    -1.2083240108040627e-05,
    9.711612847240758e-07,
    -3.3312055336409685e-08,
)

EXP_END, EXP_FLOOR = 89.0, -104.0
"""exp is infinite from the first on, and 0 below the second."""
LN2_HIGH = 0.693145751953125
LN2_LOW = math.log(2) - LN2_HIGH
"""ln 2 in two parts, the first of so few bits that n times it is exact."""


def exp(x: Expr) -> Expr:
    """exp x with an error below 1.3 ulp, also where it is no normal number.

    x = n ln 2 + r, n the nearest integer. 2^n is multiplied by in halves: of the whole, a float32 holds neither 2^128
    nor 2^-150.
    """

    def of(x: Expr) -> Expr:
        end, floor = _f32(EXP_END), _f32(EXP_FLOOR)
        at_most = tirx.Select(x > end, end, x)
        return let(at_most, lambda x: let(tirx.Select(x < floor, floor, x), within))

    def within(x: Expr) -> Expr:
        return let(tirx.reinterpret("int32", x * _f32(1 / math.log(2)) + _f32(_SHIFT)), partial(by_parts, x), "int32")

    def by_parts(x: Expr, bits: Expr) -> Expr:
        n = tirx.reinterpret("float32", bits) - _f32(_SHIFT)
        rest = let(n, lambda n: ((x - n * _f32(LN2_HIGH)) - n * _f32(LN2_LOW)) * _f32(1 / math.log(2)))
        exponent = bits - tirx.const(_SHIFT_BITS, "int32")
        half = exponent >> 1
        powers = [tirx.reinterpret("float32", (e + 127) << 23) for e in (half, exponent - half)]
        return let(rest, lambda rest: _horner(EXP2_COEFFICIENTS, rest) * powers[0] * powers[1])

    return let(x, of)


def erf(x: Expr) -> Expr:
    """erf x with an error below 1.3 ulp."""

    def of(x: Expr) -> Expr:
        size = tirx.abs(x)
        end = _f32(ERF_END)
        large = let(tirx.Select(size > end, end, size), lambda t: _f32(1) - _exp2(_horner(ERF_LARGE, t)))
        small = x + x * _horner(ERF_SMALL, x * x)
        # Named outside of the select: TVM makes a branch of one whose sides it does not know to be harmless.
        return let(_signed(large, x), lambda large: tirx.Select(size < _f32(ERF_SPLIT), small, large))

    return let(x, of)


def round(x: Expr) -> Expr:
    """The nearest whole number, of two the even one."""
    return tirx.nearbyint(x)


LEAST_NORMAL, SQRT_HALF_BITS = 2.0**-126, 0x3F3504F3


def log(x: Expr) -> Expr:
    """ln x with an error below 1 ulp. What is no normal number is scaled before.

    x = m 2^n with m = 1 + f around 1; ln m = f - f^2 / 2 + t (f^2 / 2 + R), t = f / (2 + f), R = 2 t^2 / 3 + ... (as in
    fdlibm's e_logf.c).
    """
    root = tirx.const(SQRT_HALF_BITS, "int32")

    def of(x: Expr) -> Expr:
        is_normal = x >= _f32(LEAST_NORMAL)
        scaled = tirx.Select(is_normal, x, x * _f32(2.0**25))
        steps = tirx.Select(is_normal, _f32(0), _f32(25))
        value = let(tirx.reinterpret("int32", scaled) - root, lambda bits: by_parts(bits, steps), "int32")
        return let(value, lambda value: at_edges(x, value))

    def by_parts(bits: Expr, steps: Expr) -> Expr:
        exponent = (bits >> 23).astype("float32") - steps
        f = tirx.reinterpret("float32", (bits & tirx.const(0x007FFFFF, "int32")) + root) - _f32(1)
        return let(exponent, lambda n: let(f, lambda f: joined(n, f)))

    def joined(n: Expr, f: Expr) -> Expr:
        """n ln 2 + ln (1 + f), f first and what is small added to it, so that roundings are of small numbers."""
        half = f * f * _f32(0.5)
        t = f / (f + _f32(2))

        def of(half: Expr, t: Expr) -> Expr:
            series = _horner([0, *(2 / k for k in (3, 5, 7, 9))], t * t)
            return n * _f32(LN2_HIGH) - ((half - (t * (half + series) + n * _f32(LN2_LOW))) - f)

        return let(half, lambda half: let(t, lambda t: of(half, t)))

    def at_edges(x: Expr, value: Expr) -> Expr:
        ends = tirx.Select(x.equal(_f32(0)), _f32(-math.inf), tirx.Select(x < _f32(0), _f32(math.nan), x))
        return tirx.Select(tirx.all(x > _f32(0), x < _f32(math.inf)), value, ends)

    return let(x, of)


def log1p(x: Expr) -> Expr:
    """ln (1 + x) with an error below 2.5 ulp, also of a small x: x / ((1 + x) - 1) has what 1 + x lost of it."""

    def of(x: Expr, above: Expr) -> Expr:
        value = let(log(above), lambda value: value * (x / (above - _f32(1))))
        return let(value, lambda value: at_edges(x, above, value))

    def at_edges(x: Expr, above: Expr, value: Expr) -> Expr:
        near = tirx.Select(above.equal(_f32(1)), x, value)
        return tirx.Select(x < _f32(math.inf), near, x)

    return let(x, lambda x: let(_f32(1) + x, lambda above: of(x, above)))


def sigmoid(x: Expr) -> Expr:
    """1 / (1 + exp(-x)); 0 below -89."""
    end = _f32(128)
    return let(x * _f32(-1 / math.log(2)), lambda y: _f32(1) / (_f32(1) + _exp2(tirx.Select(y > end, end, y))))


def tanh(x: Expr) -> Expr:
    """tanh x with an error below 4 ulp, of small x too; how: `vector_math.tanh`."""

    def of(x: Expr) -> Expr:
        y = tirx.abs(x) * _f32(2 / math.log(2))
        return let(tirx.Select(y > _f32(27), _f32(27), y), lambda y: _signed(let(_exp2m1(y), ratio), x))

    def ratio(e: Expr) -> Expr:
        two = _f32(2)
        return tirx.Select(e > two, _f32(1) - two / (e + two), e / (e + two))

    return let(x, of)


_ASIN = (0.16666752422, 0.074953002686, 0.045470025998, 0.024181311049, 0.042163199048)
_ATAN = (-0.333329491539, 0.199777106478, -0.138776856032, 0.0805374449538)
"""(asin x - x) / x^3 up to 1 / 2 and (atan x - x) / x^3 up to tan(pi / 8), by powers of x^2 (Cephes' asinf, atanf)."""


def atan(x: Expr) -> Expr:
    """atan x with an error below 3 ulp: of a large x from pi / 2 on, of one around 1 from pi / 4 on."""
    one = _f32(1)

    def of(size: Expr) -> Expr:
        is_large, is_middle = size > _f32(1 + 2**0.5), size > _f32(2**0.5 - 1)
        above = tirx.Select(is_large, _f32(-1), tirx.Select(is_middle, size - one, size))
        below = tirx.Select(is_large, size, tirx.Select(is_middle, size + one, one))
        first = tirx.Select(is_large, _f32(math.pi / 2), tirx.Select(is_middle, _f32(math.pi / 4), _f32(0)))
        return let(above / below, lambda t: first + (t + t * (t * t) * _horner(_ATAN, t * t)))

    return let(x, lambda x: _signed(let(tirx.abs(x), of), x))


def asin(x: Expr) -> Expr:
    """asin x with an error below 3 ulp; NaN beyond 1."""

    def of(t: Expr, is_large: Expr) -> Expr:
        return tirx.Select(is_large, _f32(math.pi / 2) - _f32(2) * t, t)

    return let(x, lambda x: _signed(_half_angle(x, of), x))


def acos(x: Expr) -> Expr:
    """acos x with an error below 3 ulp of the largest of its neighbourhood; NaN beyond 1."""

    def of(x: Expr, t: Expr, is_large: Expr) -> Expr:
        near = tirx.Select(x < _f32(0), _f32(math.pi) - _f32(2) * t, _f32(2) * t)
        return tirx.Select(is_large, near, _f32(math.pi / 2) - _signed(t, x))

    return let(x, lambda x: _half_angle(x, partial(of, x)))


def _half_angle(x: Expr, body: Callable[[Expr, Expr], Expr]) -> Expr:
    """body(t, whether |x| > 1 / 2) of t = asin |x|, or asin sqrt((1 - |x|) / 2), half of what is left to pi / 2."""

    def of(size: Expr) -> Expr:
        is_large = size > _f32(0.5)
        root = let(tirx.sqrt(_f32(0.5) * (_f32(1) - size)), lambda root: tirx.Select(is_large, root, size))
        angle = let(root, lambda s: s + s * (s * s) * _horner(_ASIN, s * s))
        return let(angle, lambda t: body(t, is_large))

    return let(tirx.abs(x), of)


def gelu(x: Expr) -> Expr:
    """x times the share of a normal distribution below x, of which what lies beyond |x| is a single power of two."""

    def of(x: Expr) -> Expr:
        beyond = let(let(tirx.abs(x), partial(_horner, NORMAL_TAIL)), _exp2)
        return let(beyond, lambda p: x * tirx.Select(x < _f32(0), p, _f32(1) - p))

    return let(x, of)


def gelu_tanh(x: Expr) -> Expr:
    """GELU by tanh, as GPT-2 has it: (1 + tanh u) / 2 is the sigmoid of 2 u."""
    scale = _f32(2 * (2 / math.pi) ** 0.5)
    return let(x, lambda x: x * let((x + cube(x) * _f32(0.044715)) * scale, sigmoid))


def silu(x: Expr) -> Expr:
    return x * sigmoid(x)


def square(x: Expr) -> Expr:
    return x * x


def cube(x: Expr) -> Expr:
    return x * x * x


def _exp2(y: Expr) -> Expr:
    """2^y for y <= 128, infinity included; 0 below -127. How: `vector_math.exp2`."""
    floor = _f32(-127)
    return let(
        tirx.Select(y < floor, floor, y),
        lambda y: _split(y, lambda power, fraction: _horner(EXP2_COEFFICIENTS, fraction) * power),
    )


def _exp2m1(y: Expr) -> Expr:
    """2^y - 1 for 0 <= y < 127, exact for small y."""
    return _split(y, lambda power, f: _horner(EXP2M1_COEFFICIENTS, f) * f * power + (power - _f32(1)))


_SHIFT = 12582912.0 + 127.0
"""1.5 * 2^23, which rounds what it is added to, and the bias of a float32's exponent."""
_SHIFT_BITS = 0x4B40007F
"""The same number's bits."""


def _split(y: Expr, body: Callable[[Expr, Expr], Expr]) -> Expr:
    """body(2^n, f) for y = n + f, n the nearest integer."""

    def of(bits: Expr) -> Expr:
        power = tirx.reinterpret("float32", bits << 23)
        fraction = y - (tirx.reinterpret("float32", bits) - _f32(_SHIFT))
        return let(power, lambda power: let(fraction, lambda fraction: body(power, fraction)))

    return let(tirx.reinterpret("int32", y + _f32(_SHIFT)), of, "int32")


def let(value: Expr, body: Callable[[Expr], Expr], dtype: str = "float32") -> Expr:
    """Gives a value a name, so that it is written once, however often it is read."""
    name = tirx.Var("v", dtype)
    return tirx.Let(name, value, body(name))


def _signed(size: Expr, sign: Expr) -> Expr:
    return tirx.call_llvm_pure_intrin("float32", "llvm.copysign", size, sign)


def _horner(coefficients: Sequence[float], x: Expr) -> Expr:
    value = _f32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + _f32(coefficient) if coefficient else value * x
    return value


def _f32(value: float) -> Expr:
    return tirx.const(value, "float32")

"""The functions that ONNX's recurrent operators name, of vectors of float32."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vector_math import exp2, natural_log, tanh
from mhsa_compile.kernels.cpu.simd.vectors import constant, materialize
from mhsa_compile.kernels.interface.ops import Activation

LOG2_E = 1 / math.log(2)
_STEEP = 126.0
"""The largest power of 2 that is asked for: its reciprocal is still a normal number."""


def activated(activation: Activation, x: Expr, lanes: int) -> Expr:
    """The function of a vector; NaN of NaN."""
    value = FUNCTIONS[activation.name](materialize(x, "float32", lanes), activation, lanes)
    return materialize(value, "float32", lanes)


def clipped(x: Expr, bound: float | None, lanes: int) -> Expr:
    """The vector within -bound .. bound."""
    if bound is None:
        return x
    x, low, high = materialize(x, "float32", lanes), constant(-bound, lanes), constant(bound, lanes)
    return T.Select(x < low, low, T.Select(x > high, high, x))


def _sigmoid(x: Expr, activation: Activation, lanes: int) -> Expr:
    one, steep = constant(1.0, lanes), constant(_STEEP, lanes)
    power = materialize(x * constant(-LOG2_E, lanes), "float32", lanes)
    return one / (one + exp2(T.Select(power > steep, steep, power), lanes))


def _tanh(x: Expr, activation: Activation, lanes: int) -> Expr:
    return tanh(x, lanes)


def _scaled_tanh(x: Expr, activation: Activation, lanes: int) -> Expr:
    return constant(activation.alpha, lanes) * tanh(x * constant(activation.beta, lanes), lanes)


def _relu(x: Expr, activation: Activation, lanes: int) -> Expr:
    zero = constant(0.0, lanes)
    return T.Select(x < zero, zero, x)


def _leaky_relu(x: Expr, activation: Activation, lanes: int) -> Expr:
    return T.Select(x < constant(0.0, lanes), x * constant(activation.alpha, lanes), x)


def _thresholded_relu(x: Expr, activation: Activation, lanes: int) -> Expr:
    return T.Select(x < constant(activation.alpha, lanes), constant(0.0, lanes), x)


def _affine(x: Expr, activation: Activation, lanes: int) -> Expr:
    return x * constant(activation.alpha, lanes) + constant(activation.beta, lanes)


def _hard_sigmoid(x: Expr, activation: Activation, lanes: int) -> Expr:
    zero, one = constant(0.0, lanes), constant(1.0, lanes)
    line = materialize(_affine(x, activation, lanes), "float32", lanes)
    return T.Select(line < zero, zero, T.Select(line > one, one, line))


def _elu(x: Expr, activation: Activation, lanes: int) -> Expr:
    below = (_exp_of_negative(x, lanes) - constant(1.0, lanes)) * constant(activation.alpha, lanes)
    return T.Select(x < constant(0.0, lanes), materialize(below, "float32", lanes), x)


def _softsign(x: Expr, activation: Activation, lanes: int) -> Expr:
    return x / (constant(1.0, lanes) + _magnitude(x, lanes))


def _softplus(x: Expr, activation: Activation, lanes: int) -> Expr:
    """ln(1 + e^x) as max(x, 0) + ln(1 + e^-|x|)."""
    rest = natural_log(
        materialize(constant(1.0, lanes) + _exp_of_negative(-_magnitude(x, lanes), lanes), "float32", lanes), lanes
    )
    return _relu(x, activation, lanes) + rest


def _exp_of_negative(x: Expr, lanes: int) -> Expr:
    """e^x of numbers below 0; 1 of others."""
    zero, power = constant(0.0, lanes), materialize(x * constant(LOG2_E, lanes), "float32", lanes)
    return exp2(T.Select(power > zero, zero, power), lanes)


def _magnitude(x: Expr, lanes: int) -> Expr:
    return T.call_llvm_pure_intrin("float32" if lanes == 1 else f"float32x{lanes}", "llvm.fabs", x)


FUNCTIONS: dict[str, Callable[[Expr, Activation, int], Expr]] = {
    "Affine": _affine,
    "Elu": _elu,
    "HardSigmoid": _hard_sigmoid,
    "LeakyRelu": _leaky_relu,
    "Relu": _relu,
    "ScaledTanh": _scaled_tanh,
    "Sigmoid": _sigmoid,
    "Softplus": _softplus,
    "Softsign": _softsign,
    "Tanh": _tanh,
    "ThresholdedRelu": _thresholded_relu,
}

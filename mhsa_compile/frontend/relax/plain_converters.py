"""Operators, or uses of them, that TVM's importer has not: written in Relax, of narrow floats in float32."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import onnx
import tvm
from tvm import relax, te, tirx, topi

from mhsa_compile.kernels.interface.extremes import larger, smaller

Converter = Callable[[Any, list[Any], dict[str, Any]], Any]

_NARROW = ("float16", "bfloat16")


def cumulative(scan: Callable[..., Any]) -> Converter:
    """CumSum, CumProd: along an axis that may come by the call: then along each, and the one that is meant is taken.
    An axis that there is not, which ONNX forbids, is the last."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, axis = inputs
        kind, rank = str(data.ty.dtype), data.ty.ndim

        def emit(value: Any) -> Any:
            return bb.normalize(value)

        def along(place: int) -> Any:
            x = emit(relax.op.astype(data, "float32")) if kind in _NARROW else data
            reverse = attributes.get("reverse", 0)
            x = bb.emit_te(topi.flip, x, axis=place) if reverse else x
            y = emit(scan(x, place, exclusive=bool(attributes.get("exclusive", 0))))
            y = bb.emit_te(topi.flip, y, axis=place) if reverse else y
            return emit(relax.op.astype(y, kind)) if kind in _NARROW else y

        if isinstance(axis, tvm.ir.GenericConst):
            return along(int(axis.value.numpy().item()) % rank)
        number = emit(relax.op.reshape(axis, [1] * rank))
        result = along(rank - 1)
        for place in range(rank - 1):
            conditions = [
                emit(relax.op.equal(number, relax.const(one, str(axis.ty.dtype)))) for one in (place, place - rank)
            ]
            result = emit(relax.op.where(emit(relax.op.logical_or(*conditions)), along(place), result))
        return result

    return convert


def infinities_of_a_sign(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """IsInf of one sign, or of none."""
    signs = [attributes.get(name, 1) for name in ("detect_negative", "detect_positive")]
    if all(signs):
        return None
    x = bb.normalize(relax.op.astype(inputs[0], "float32")) if str(inputs[0].ty.dtype) in _NARROW else inputs[0]
    if not any(signs):
        return bb.normalize(relax.op.zeros_like(x, "bool"))
    compare = relax.op.less if signs[0] else relax.op.greater
    of_the_sign = bb.normalize(compare(x, relax.const(0, str(x.ty.dtype))))
    return bb.normalize(relax.op.logical_and(bb.normalize(relax.op.isinf(x)), of_the_sign))


def by_elements(formula: Callable[..., Any], *attributes: tuple[str, float]) -> Converter:
    """An operator of one argument by its formula, of narrow floats in float32; attributes with what they are by
    default are further arguments."""

    def convert(bb: Any, inputs: list[Any], stated: dict[str, Any]) -> Any:
        kind = str(inputs[0].ty.dtype)
        wide = "float32" if kind in _NARROW else kind
        numbers = [tirx.const(stated.get(name, default), wide) for name, default in attributes]
        x = bb.normalize(relax.op.astype(inputs[0], wide))
        y = bb.emit_te(
            lambda x: te.compute(x.shape, lambda *at: formula(x(*at), *numbers), formula.__name__),
            x,
            primfunc_name_hint=formula.__name__,
        )
        return bb.normalize(relax.op.astype(y, kind))

    return convert


def elu(x: Any, alpha: Any) -> Any:
    kind = x.ty.dtype
    return tirx.Select(x < tirx.const(0, kind), alpha * (tirx.exp(x) - tirx.const(1, kind)), x)


def selu(x: Any, alpha: Any, gamma: Any) -> Any:
    return gamma * elu(x, alpha)


def area_tangent(x: Any) -> Any:
    """Atanh. As TVM has it, by the logarithm of a quotient, nothing is left of a small one."""
    return (tirx.log1p(x) - tirx.log1p(-x)) * tirx.const(0.5, x.ty.dtype)


def softplus(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """ln (1 + e^x) as max(x, 0) + ln (1 + e^-|x|), the power for itself, so that both are arithmetic."""
    kind = str(inputs[0].ty.dtype)
    wide = "float32" if kind in _NARROW else kind
    x = bb.normalize(relax.op.astype(inputs[0], wide))
    power = bb.normalize(relax.op.exp(bb.normalize(relax.op.negative(bb.normalize(relax.op.abs(x))))))

    def element(x: Any, power: Any) -> Any:
        return larger(x, tirx.const(0, wide), wide) + tirx.log1p(power)

    y = bb.emit_te(lambda x, p: te.compute(x.shape, lambda *at: element(x(*at), p(*at)), "softplus"), x, power)
    return bb.normalize(relax.op.astype(y, kind))


def mish(x: Any) -> Any:
    """x tanh(softplus(x)), with e^x as e: x n / (n + 2) where n = e (e + 2). From 20 on that is x."""
    kind = x.ty.dtype
    e = tirx.exp(smaller(x, tirx.const(20, kind), kind))
    n = e * (e + tirx.const(2, kind))
    return x * (n / (n + tirx.const(2, kind)))


def lp_normalization(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """LpNormalization: a vector by its norm; one of zeros stays one."""
    kind = str(inputs[0].ty.dtype)

    def emit(value: Any) -> Any:
        return bb.normalize(value)

    wide = "float32" if kind in _NARROW else kind
    x, axis = emit(relax.op.astype(inputs[0], wide)), attributes.get("axis", -1)
    if attributes.get("p", 2) == 1:
        norm = emit(relax.op.sum(emit(relax.op.abs(x)), axis, keepdims=True))
    else:
        norm = emit(relax.op.sqrt(emit(relax.op.sum(emit(relax.op.square(x)), axis, keepdims=True))))
    zero = relax.const(0, wide)
    divisor = emit(relax.op.where(emit(relax.op.equal(norm, zero)), relax.const(1, wide), norm))
    return emit(relax.op.astype(emit(relax.op.divide(x, divisor)), kind))


def group_normalization(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """GroupNormalization: deviations from the mean of a group by their root mean square. TVM's own takes the square of
    the mean from the mean of the squares, of which nothing is left where the mean is large."""
    x, *affine = inputs
    kind, (batch, channels, *sizes) = str(x.ty.dtype), x.ty.shape.values

    def emit(value: Any) -> Any:
        return bb.normalize(value)

    groups = tirx.IntImm("int64", attributes["num_groups"])
    row = functools.reduce(operator.mul, sizes, tirx.floordiv(channels, groups))
    rows = emit(relax.op.reshape(x, relax.ShapeExpr([batch, groups, row])))
    deviations = emit(relax.op.subtract(rows, emit(relax.op.mean(rows, -1, keepdims=True))))
    variance = emit(relax.op.mean(emit(relax.op.multiply(deviations, deviations)), -1, keepdims=True))
    epsilon = relax.const(attributes.get("epsilon", 1e-5), kind)
    deviation = emit(relax.op.sqrt(emit(relax.op.add(variance, epsilon))))
    y = emit(relax.op.reshape(emit(relax.op.divide(deviations, deviation)), x.ty.shape))
    scale, bias = (emit(relax.op.reshape(one, [1, channels, *(1 for _ in sizes)])) for one in affine)
    return emit(relax.op.add(emit(relax.op.multiply(y, scale)), bias))


def dropout_with_mask(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Dropout at inference: its input, and a mask that keeps all of it."""
    return relax.Tuple([inputs[0], bb.normalize(relax.op.ones_like(inputs[0], "bool"))])


def bit_cast(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """BitCast: the same bits as numbers of another dtype of that width."""
    kind = str(onnx.helper.tensor_dtype_to_np_dtype(attributes["to"]))

    def bits(x: Any) -> Any:
        return te.compute(x.shape, lambda *place: tirx.reinterpret(kind, x(*place)), "bits")

    return bb.emit_te(bits, inputs[0])


PLAIN: dict[str, Converter] = {
    "Atanh": by_elements(area_tangent),
    "BitCast": bit_cast,
    "CumProd": cumulative(relax.op.cumprod),
    "CumSum": cumulative(relax.op.cumsum),
    "Dropout": dropout_with_mask,
    "Elu": by_elements(elu, ("alpha", 1.0)),
    "GroupNormalization": group_normalization,
    "IsInf": infinities_of_a_sign,
    "LpNormalization": lp_normalization,
    "Mish": by_elements(mish),
    "Selu": by_elements(selu, ("alpha", 1.67326319217681884765625), ("gamma", 1.05070102214813232421875)),
    "Softplus": softplus,
}

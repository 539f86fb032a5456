"""Operators, or uses of them, that TVM's importer has not, written in Relax."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import onnx
from tvm import relax, te, tirx, topi

from mhsa_compile.frontend.relax.values import Converter, is_constant
from mhsa_compile.kernels.interface.extremes import larger, smaller


def cumulative(scan: Callable[..., Any]) -> Converter:
    """CumSum, CumProd: along an axis that may come by the call: then along each, and the one that is meant is taken.
    An axis that there is not, which ONNX forbids, is the last."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, axis = inputs
        rank, reverse, exclusive = data.ty.ndim, attributes.get("reverse", 0), bool(attributes.get("exclusive", 0))

        def along(place: int) -> Any:
            x = bb.emit_te(topi.flip, data, axis=place) if reverse else data
            y = bb.normalize(scan(x, place, exclusive=exclusive))
            return bb.emit_te(topi.flip, y, axis=place) if reverse else y

        if is_constant(axis):
            return along(int(axis.value.numpy().item()) % rank)
        number = relax.op.reshape(axis, [1] * rank)
        result = along(rank - 1)
        for place in range(rank - 1):
            numbers = (relax.const(one, str(axis.ty.dtype)) for one in (place, place - rank))
            meant = relax.op.logical_or(*(relax.op.equal(number, one) for one in numbers))
            result = relax.op.where(meant, along(place), result)
        return result

    return convert


def infinities_of_a_sign(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """IsInf of one sign, or of none."""
    (x,) = inputs
    signs = [attributes.get(name, 1) for name in ("detect_negative", "detect_positive")]
    if all(signs):
        return None
    if not any(signs):
        return relax.op.zeros_like(x, "bool")
    compare = relax.op.less if signs[0] else relax.op.greater
    return relax.op.logical_and(relax.op.isinf(x), compare(x, relax.const(0, str(x.ty.dtype))))


def by_elements(formula: Callable[..., Any], *attributes: tuple[str, float]) -> Converter:
    """An operator of one argument by its formula; attributes with what they are by default are further arguments."""

    def convert(bb: Any, inputs: list[Any], values: dict[str, Any]) -> Any:
        numbers = [tirx.const(values.get(name, default), str(inputs[0].ty.dtype)) for name, default in attributes]

        def compute(x: Any) -> Any:
            return te.compute(x.shape, lambda *at: formula(x(*at), *numbers), formula.__name__)

        return bb.emit_te(compute, inputs[0], primfunc_name_hint=formula.__name__)

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
    (x,) = inputs
    kind = str(x.ty.dtype)

    def total(x: Any, power: Any) -> Any:
        zero = tirx.const(0, kind)
        return te.compute(x.shape, lambda *at: larger(x(*at), zero, kind) + tirx.log1p(power(*at)), "softplus")

    return bb.emit_te(total, x, bb.normalize(relax.op.exp(relax.op.negative(relax.op.abs(x)))))


def mish(x: Any) -> Any:
    """x tanh(softplus(x)), with e^x as e: x n / (n + 2) where n = e (e + 2). From 20 on that is x."""
    kind = x.ty.dtype
    e = tirx.exp(smaller(x, tirx.const(20, kind), kind))
    n = e * (e + tirx.const(2, kind))
    return x * (n / (n + tirx.const(2, kind)))


def lp_normalization(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """LpNormalization: a vector by its norm; one of zeros stays one."""
    (x,), axis = inputs, attributes.get("axis", -1)
    if attributes.get("p", 2) == 1:
        norm = relax.op.sum(relax.op.abs(x), axis, keepdims=True)
    else:
        norm = relax.op.sqrt(relax.op.sum(relax.op.square(x), axis, keepdims=True))
    zero, one = (relax.const(number, str(x.ty.dtype)) for number in (0, 1))
    return relax.op.divide(x, relax.op.where(relax.op.equal(norm, zero), one, norm))


def group_normalization(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """GroupNormalization: deviations from the mean of a group by their root mean square. TVM's own takes the square of
    the mean from the mean of the squares, of which nothing is left where the mean is large."""
    x, *affine = inputs
    batch, channels, *sizes = x.ty.shape.values
    groups = tirx.IntImm("int64", attributes["num_groups"])
    row = functools.reduce(operator.mul, sizes, tirx.floordiv(channels, groups))
    rows = bb.emit(relax.op.reshape(x, relax.ShapeExpr([batch, groups, row])))
    mean = bb.emit(relax.op.mean(rows, -1, keepdims=True))
    variance = bb.emit_te(_variance, rows, mean, primfunc_name_hint="variance")
    alone = isinstance(channels, tirx.IntImm) and int(channels) == int(groups)
    if alone:  # one loop computes y then, which a view would end
        ones = [tirx.IntImm("int64", 1) for _ in sizes]
        mean, variance = (
            bb.emit(relax.op.reshape(one, relax.ShapeExpr([batch, channels, *ones]))) for one in (mean, variance)
        )
    epsilon = relax.const(attributes.get("epsilon", 1e-5), str(x.ty.dtype))
    deviations = relax.op.subtract(x if alone else rows, mean)
    y = relax.op.divide(deviations, relax.op.sqrt(relax.op.add(variance, epsilon)))
    y = y if alone else relax.op.reshape(y, x.ty.shape)
    scale, bias = (relax.op.reshape(one, [1, channels, *(1 for _ in sizes)]) for one in affine)
    return relax.op.add(relax.op.multiply(y, scale), bias)


def _variance(rows: Any, mean: Any) -> Any:
    """The mean square of how far rows (B, groups, K) are from the mean (B, groups, 1) of each. Deviations are computed
    again by who divides them: that is faster than keeping them."""
    k = te.reduce_axis((0, rows.shape[2]), "k")

    def total(b: Any, g: Any, _: Any) -> Any:
        deviation = rows(b, g, k) - mean(b, g, 0)
        return te.sum(deviation * deviation, axis=k)

    sums = te.compute(mean.shape, total, "sums")
    return te.compute(mean.shape, lambda *at: sums(*at) / rows.shape[2].astype(rows.dtype), "variance")


def instance_normalization(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """InstanceNormalization: each channel is a group."""
    return group_normalization(bb, inputs, {**attributes, "num_groups": int(inputs[0].ty.shape.values[1])})


def dropout_with_mask(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Dropout at inference: its input, and a mask that keeps all of it."""
    return relax.Tuple([inputs[0], relax.op.ones_like(inputs[0], "bool")])


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
    "InstanceNormalization": instance_normalization,
    "IsInf": infinities_of_a_sign,
    "LpNormalization": lp_normalization,
    "Mish": by_elements(mish),
    "Selu": by_elements(selu, ("alpha", 1.67326319217681884765625), ("gamma", 1.05070102214813232421875)),
    "Softplus": softplus,
}

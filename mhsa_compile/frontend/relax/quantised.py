"""Operators of quantised numbers: whole numbers of 32 bits inside, so that no sum is rounded.

Where the result is quantised again, the sum times the ratio of the scales is computed in float64, rounded to the
nearest number, of two the even one, and cut to what the result can hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import Conv

from mhsa_compile.frontend.relax.masks import equal
from mhsa_compile.frontend.relax.plain_converters import Converter


def matmul_integer(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """MatMulInteger: zero points of all of a factor, of the rows of A, of the columns of B."""
    a, b, a_zero, b_zero = [*inputs, None, None][:4]
    return _matmul(bb, a, a_zero, b, b_zero)


def qlinear_matmul(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """QLinearMatMul."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs
    ranks = a.ty.ndim, b.ty.ndim
    scales = [_of_rows(bb, a_scale, ranks[0]), _of_columns(bb, b_scale, ranks[1])]
    return _quantised(bb, _matmul(bb, a, a_zero, b, b_zero), scales, y_scale, y_zero)


def conv_integer(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """ConvInteger: zero points of the input, and of the weights, also of each output channel."""
    x, w, x_zero, w_zero = [*inputs, None, None][:4]
    return _convolution(bb, x, x_zero, w, w_zero, None, attributes)


def qlinear_conv(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """QLinearConv."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = [*inputs, None][:9]
    sums = _convolution(bb, x, x_zero, w, w_zero, bias, attributes)
    scales = [_scalar(bb, x_scale), _of_channels(bb, w_scale, [1, -1, *[1] * (w.ty.ndim - 2)])]
    return _quantised(bb, sums, scales, y_scale, y_zero)


def _matmul(bb: Any, a: Any, a_zero: Any, b: Any, b_zero: Any) -> Any:
    left = _centred(bb, a, a_zero if a_zero is None else _of_rows(bb, a_zero, a.ty.ndim))
    right = _centred(bb, b, b_zero if b_zero is None else _of_columns(bb, b_zero, b.ty.ndim))
    return bb.normalize(relax.op.matmul(left, right, out_dtype="int32"))


def _convolution(bb: Any, x: Any, x_zero: Any, w: Any, w_zero: Any, bias: Any, attributes: dict[str, Any]) -> Any:
    """The sums; what is padded is the zero point, which is 0 then."""
    data = _centred(bb, x, x_zero if x_zero is None else _scalar(bb, x_zero))
    rows = [-1, *[1] * (w.ty.ndim - 1)]
    weight = _centred(bb, w, w_zero if w_zero is None else _of_channels(bb, w_zero, rows))
    return bb.normalize(Conv._impl_v11(bb, [data, weight, bias], dict(attributes), ({}, {})))


def _centred(bb: Any, x: Any, zero: Any) -> Any:
    """Numbers counted from their zero point."""
    wide = bb.normalize(relax.op.astype(x, "int32"))
    if zero is None:
        return wide
    zero = bb.normalize(relax.op.astype(zero, "int32"))
    if isinstance(x.ty.shape, relax.ShapeExpr) and zero.ty.ndim == x.ty.ndim:  # a call is held to sizes that agree
        pairs = zip(zero.ty.shape.values, x.ty.shape.values, strict=True)
        dims = [own if equal(own, 1) else size for own, size in pairs]
        if not all(map(equal, dims, zero.ty.shape.values)):
            zero = bb.match_cast(zero, relax.TensorType(dims, "int32"))
    return bb.normalize(relax.op.subtract(wide, zero))


def _quantised(bb: Any, sums: Any, scales: Sequence[Any], y_scale: Any, y_zero: Any) -> Any:
    kind = str(y_zero.ty.dtype)

    def wide(value: Any) -> Any:
        return bb.normalize(relax.op.astype(value, "float64"))

    ratio = bb.normalize(relax.op.multiply(*map(wide, scales)))
    ratio = bb.normalize(relax.op.divide(ratio, wide(_scalar(bb, y_scale))))
    y = bb.normalize(relax.op.round(bb.normalize(relax.op.multiply(wide(sums), ratio))))
    y = bb.normalize(relax.op.add(y, wide(_scalar(bb, y_zero))))
    bounds = np.iinfo(kind)
    return bb.normalize(relax.op.astype(bb.normalize(relax.op.clip(y, int(bounds.min), int(bounds.max))), kind))


def _of_rows(bb: Any, value: Any, rank: int) -> Any:
    """One number for all, for each row of a matrix, or for each row of several, as they are broadcast."""
    if _is_one(value):
        return _scalar(bb, value)
    return bb.normalize(relax.op.expand_dims(value, -1)) if value.ty.ndim == 1 and rank > 1 else value


def _of_columns(bb: Any, value: Any, rank: int) -> Any:
    return _scalar(bb, value) if _is_one(value) else value


def _of_channels(bb: Any, value: Any, shape: Sequence[int]) -> Any:
    return _scalar(bb, value) if _is_one(value) else bb.normalize(relax.op.reshape(value, list(shape)))


def _is_one(value: Any) -> bool:
    shape = value.ty.shape
    return isinstance(shape, relax.ShapeExpr) and all(equal(size, 1) for size in shape.values)


def _scalar(bb: Any, value: Any) -> Any:
    return bb.normalize(relax.op.reshape(value, [])) if value.ty.ndim else value


QUANTISED: dict[str, Converter] = {
    "ConvInteger": conv_integer,
    "MatMulInteger": matmul_integer,
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": qlinear_matmul,
}

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

from mhsa_compile.frontend.relax.values import Converter, equal


def matmul_integer(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """MatMulInteger: zero points of all of a factor, of the rows of A, of the columns of B."""
    a, b, a_zero, b_zero = [*inputs, None, None][:4]
    return _matmul(bb, a, a_zero, b, b_zero)


def qlinear_matmul(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """QLinearMatMul."""
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = inputs
    scales = [_of_rows(a_scale, a.ty.ndim), _reshaped(b_scale)]
    return _quantised(_matmul(bb, a, a_zero, b, b_zero), scales, y_scale, y_zero)


def conv_integer(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """ConvInteger: zero points of the input, and of the weights, also of each output channel."""
    x, w, x_zero, w_zero = [*inputs, None, None][:4]
    return _convolution(bb, x, x_zero, w, w_zero, None, attributes)


def qlinear_conv(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """QLinearConv."""
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = [*inputs, None][:9]
    sums = _convolution(bb, x, x_zero, w, w_zero, bias, attributes)
    scales = [_scalar(x_scale), _reshaped(w_scale, [1, -1, *[1] * (w.ty.ndim - 2)])]
    return _quantised(sums, scales, y_scale, y_zero)


def _matmul(bb: Any, a: Any, a_zero: Any, b: Any, b_zero: Any) -> Any:
    left = _centred(bb, a, a_zero if a_zero is None else _of_rows(a_zero, a.ty.ndim))
    right = _centred(bb, b, b_zero if b_zero is None else _reshaped(b_zero))
    return relax.op.matmul(left, right, out_dtype="int32")


def _convolution(bb: Any, x: Any, x_zero: Any, w: Any, w_zero: Any, bias: Any, attributes: dict[str, Any]) -> Any:
    """The sums; what is padded is the zero point, which is 0 then."""
    data = _centred(bb, x, x_zero if x_zero is None else _scalar(x_zero))
    weight = _centred(bb, w, w_zero if w_zero is None else _reshaped(w_zero, [-1, *[1] * (w.ty.ndim - 1)]))
    return Conv._impl_v11(bb, [data, weight, bias], dict(attributes), ({}, {}))


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


def _quantised(sums: Any, scales: Sequence[Any], y_scale: Any, y_zero: Any) -> Any:
    kind = str(y_zero.ty.dtype)
    left, right, last, zero, sums = (
        relax.op.astype(value, "float64") for value in (*scales, _scalar(y_scale), _scalar(y_zero), sums)
    )
    ratio = relax.op.divide(relax.op.multiply(left, right), last)
    y = relax.op.add(relax.op.round(relax.op.multiply(sums, ratio)), zero)
    bounds = np.iinfo(kind)
    return relax.op.astype(relax.op.clip(y, int(bounds.min), int(bounds.max)), kind)


def _of_rows(value: Any, rank: int) -> Any:
    """One number for all, for each row of a matrix, or for each row of several, as they are broadcast."""
    return _reshaped(value, [-1, 1] if value.ty.ndim == 1 and rank > 1 else None)


def _reshaped(value: Any, shape: list[int] | None = None) -> Any:
    """One number for all, or several in a shape."""
    own = value.ty.shape
    if isinstance(own, relax.ShapeExpr) and all(equal(size, 1) for size in own.values):
        return _scalar(value)
    return value if shape is None else relax.op.reshape(value, shape)


def _scalar(value: Any) -> Any:
    return relax.op.reshape(value, []) if value.ty.ndim else value


QUANTISED: dict[str, Converter] = {
    "ConvInteger": conv_integer,
    "MatMulInteger": matmul_integer,
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": qlinear_matmul,
}

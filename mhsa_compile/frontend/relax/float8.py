"""Casts to eight-bit floats: the nearest number of them, of two the even one, cut to the largest. It stays float32.

Source: ONNX's "Float stored in 8 bits", the table of saturated casts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from tvm import relax, te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import get_type


class _Kind(NamedTuple):
    """`mantissa` bits behind the first, normal numbers from 2^least on."""

    mantissa: int
    least: int
    largest: float
    has_negative_zero: bool


_KINDS = {
    "float8_e4m3fn": _Kind(3, -6, 448.0, True),
    "float8_e4m3fnuz": _Kind(3, -7, 240.0, False),
    "float8_e5m2": _Kind(2, -14, 57344.0, True),
    "float8_e5m2fnuz": _Kind(2, -15, 57344.0, False),
}
_INFINITY, _SIGN = 0x7F800000, -(1 << 31)


def cast_to_float8(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """A Cast of float32 to one of them; None for any other."""
    (x,), kind = inputs, _KINDS.get(str(get_type(attributes["to"])))
    if kind is None or not isinstance(getattr(x.ty, "shape", None), relax.ShapeExpr) or str(x.ty.dtype) != "float32":
        return None

    def rounded(x: Any) -> Any:
        return te.compute(x.shape, lambda *at: _rounded(x(*at), kind), "rounded")

    return bb.emit_te(rounded, x, primfunc_name_hint="cast")


def _rounded(x: Any, kind: _Kind) -> Any:
    """The nearest number of a kind: bits behind its mantissa are rounded away as a whole number's are; what is smaller
    than a normal number becomes a multiple of the least step."""
    bits = tirx.reinterpret("int32", x)
    size = tirx.min(bits & _whole(~_SIGN), _bits_of(kind.largest))
    cut, step = 23 - kind.mantissa, 2.0 ** (kind.least - kind.mantissa)
    half = ((size >> _whole(cut)) & _whole(1)) + _whole((1 << (cut - 1)) - 1)
    normal = (size + half) & _whole(-(1 << cut))
    steps = tirx.nearbyint(tirx.reinterpret("float32", size) * tirx.const(1 / step, "float32"))
    small = tirx.reinterpret("int32", steps * tirx.const(step, "float32"))
    near = tirx.Select(size < _bits_of(2.0**kind.least), small, normal)
    y = tirx.reinterpret("float32", near | (bits & _whole(_SIGN)))
    if not kind.has_negative_zero:
        zero = tirx.const(0, "float32")
        y = tirx.Select(tirx.reinterpret("float32", near) > zero, y, zero)
    is_number = (bits & _whole(~_SIGN)) <= _whole(_INFINITY)
    return tirx.Select(is_number, y, x)


def _whole(value: int) -> Any:
    return tirx.const(value, "int32")


def _bits_of(number: float) -> Any:
    return _whole(int(np.float32(number).view(np.int32)))

"""Div and Mod where a processor would end the process, or TVM has another remainder."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.frontend.onnx.onnx_frontend import Div, Mod


def quotient(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Div of whole numbers: 0 where the divisor is 0, as NumPy has it, and the least number by -1 is itself."""
    if not _may_trap(inputs):
        return None
    x, divisor = inputs
    none, opposite, safe = _divisor(bb, divisor)
    result = bb.normalize(Div._impl_v7(bb, [x, safe], attributes, ({}, {})))
    zero = relax.const(0, str(x.ty.dtype))
    if opposite is not None:
        result = bb.normalize(relax.op.where(opposite, bb.normalize(relax.op.subtract(zero, x)), result))
    return bb.normalize(relax.op.where(none, zero, result))


def remainder(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Mod of whole numbers: 0 where the divisor is 0, as NumPy has it, or -1. Of floats without fmod: where nothing is
    left, a zero of the divisor's sign; by an infinity, the number itself, or that infinity where the signs differ."""
    x, divisor = inputs
    kind = str(x.ty.dtype) if isinstance(x.ty, relax.TensorType) else None
    if kind is not None and kind.startswith(("float", "bfloat")):
        return None if attributes.get("fmod", 0) else _of_floats(bb, x, divisor, kind)
    if not _may_trap(inputs):
        return None
    none, opposite, safe = _divisor(bb, divisor)
    result = bb.normalize(Mod._impl_v10(bb, [x, safe], attributes, ({}, {})))
    nothing = none if opposite is None else bb.normalize(relax.op.logical_or(none, opposite))
    return bb.normalize(relax.op.where(nothing, relax.const(0, kind), result))


def _may_trap(inputs: list[Any]) -> bool:
    """Whether these are whole numbers, and the divisor is not known to be neither 0 nor -1."""
    if any(not isinstance(value.ty, relax.TensorType) for value in inputs):
        return False
    if not str(inputs[0].ty.dtype).startswith(("int", "uint")):
        return False
    if not isinstance(inputs[1], tvm.ir.GenericConst):
        return True
    numbers = inputs[1].value.numpy()
    return bool(((numbers == 0) | (numbers == -1)).any())


def _divisor(bb: Any, divisor: Any) -> tuple[Any, Any, Any]:
    """(where it is 0, where it is -1, if it may be, and itself, but 1 in these places)."""
    kind = str(divisor.ty.dtype)
    none = bb.normalize(relax.op.equal(divisor, relax.const(0, kind)))
    safe = bb.normalize(relax.op.where(none, relax.const(1, kind), divisor))
    if kind.startswith("u"):
        return none, None, safe
    opposite = bb.normalize(relax.op.equal(divisor, relax.const(-1, kind)))
    return none, opposite, bb.normalize(relax.op.where(opposite, relax.const(1, kind), safe))


def _of_floats(bb: Any, x: Any, divisor: Any, kind: str) -> Any:
    def emit(value: Any) -> Any:
        return bb.normalize(value)

    below, negative = (emit(relax.op.less(value, relax.const(0, kind))) for value in (x, divisor))
    apart = emit(relax.op.logical_xor(below, negative))
    endless = emit(relax.op.logical_and(emit(relax.op.isinf(divisor)), emit(relax.op.isfinite(x))))
    remainder = emit(relax.op.floor_mod(x, divisor))
    remainder = emit(relax.op.where(endless, emit(relax.op.where(apart, divisor, x)), remainder))
    zero = emit(relax.op.where(negative, relax.const(-0.0, kind), relax.const(0.0, kind)))
    none = emit(relax.op.equal(remainder, relax.const(0, kind)))
    none = emit(relax.op.logical_or(none, emit(relax.op.equal(x, relax.const(0, kind)))))
    is_whole = emit(relax.op.logical_and(none, emit(relax.op.logical_not(emit(relax.op.isnan(remainder))))))
    return emit(relax.op.where(is_whole, zero, remainder))

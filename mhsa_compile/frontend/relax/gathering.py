"""Gather as one function: TVM's own writes the indices out twice before it reads a table by them."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, te, tirx


def gather_within_bounds(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Gather of a tensor. An index out of bounds, which ONNX forbids, gives NaN where floats are gathered, and the
    nearest element elsewhere; TVM's reads whatever memory it points at."""
    data, indices = inputs
    shapes = [getattr(value.ty, "shape", None) for value in inputs]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return None
    if all(isinstance(value, tvm.ir.GenericConst) for value in inputs):
        return None
    axis = attributes.get("axis", 0) % data.ty.ndim
    outside = math.nan if str(data.ty.dtype).startswith(("float", "bfloat")) else None
    if isinstance(indices, tvm.ir.GenericConst) and not indices.ty.ndim:
        return bb.emit_te(_pick, data, int(indices.value.numpy()), axis, outside, primfunc_name_hint="take")
    return bb.emit_te(_gather, data, indices, axis, outside, primfunc_name_hint="take")


def _gather(data: Any, indices: Any, axis: int, outside: float | None) -> Any:
    """The elements of an axis that an array of indices names."""
    rank = len(indices.shape)

    def element(*at: Any) -> Any:
        index = indices[tuple(at[axis : axis + rank])].astype("int64")
        return _element(data, axis, outside, at[:axis], index, at[axis + rank :])

    return te.compute((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]), element, "take")


def _pick(data: Any, index: int, axis: int, outside: float | None) -> Any:
    """The elements of an axis at one place."""

    def element(*at: Any) -> Any:
        return _element(data, axis, outside, at[:axis], tirx.const(index, "int64"), at[axis:])

    return te.compute((*data.shape[:axis], *data.shape[axis + 1 :]), element, "take")


def _element(data: Any, axis: int, outside: float | None, before: Any, index: Any, behind: Any) -> Any:
    """An element by an index that may count from the end; where there is none, `outside`, or the nearest."""
    size = data.shape[axis]
    place = tirx.Select(index < 0, index + size, index)
    nearest = tirx.max(tirx.min(place, size - 1), tirx.const(0, "int64"))
    if outside is None:
        return data[(*before, nearest, *behind)]
    inside = tirx.all(place >= 0, place < size)
    return tirx.if_then_else(inside, data[(*before, place, *behind)], tirx.const(outside, str(data.dtype)))

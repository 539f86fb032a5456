"""ScatterND and ScatterElements: TVM's, of places that the data have, and of updates that fit in the call.

An index out of bounds, which ONNX forbids, writes NaN to the nearest place where floats are scattered, and its update
elsewhere: TVM's writes to whatever memory it points at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ScatterElements, ScatterND

from mhsa_compile.frontend.relax.values import dtype_of, is_constant, is_floating


def scatter_nd_within_bounds(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """ScatterND. Dims of updates that only turn out to be those of the indices and of the data, as where a Range counts
    the places of what a Slice took, are held to that in a call."""
    shapes = _shapes(inputs)
    if shapes is None or not isinstance(shapes[1][-1], tirx.IntImm):
        return None
    data, indices, updates = shapes
    count = int(indices[-1])
    dims = [*indices[:-1], *data[count:]]
    values = bb.normalize(inputs[2])
    if len(dims) != len(updates):
        return None
    if not all(map(tvm.sym.Analyzer().can_prove_equal, dims, updates)):
        values = bb.match_cast(values, relax.TensorType(dims, dtype_of(values)))
    places, values = _within(bb, inputs[1], values, data[:count], has_rows=True)
    return ScatterND._impl_v18(bb, [inputs[0], places, values], attributes, ({}, {}))


def scatter_elements_within_bounds(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """ScatterElements."""
    shapes = _shapes(inputs)
    if shapes is None:
        return None
    size = shapes[0][attributes.get("axis", 0) % len(shapes[0])]
    places, values = _within(bb, inputs[1], bb.normalize(inputs[2]), [size], has_rows=False)
    return ScatterElements._impl_v18(bb, [inputs[0], places, values], attributes, ({}, {}))


def _shapes(inputs: Sequence[Any]) -> list[list[Any]] | None:
    shapes: list[Any] = [getattr(value.ty, "shape", None) for value in inputs]
    return [list(shape.values) for shape in shapes] if all(isinstance(s, relax.ShapeExpr) for s in shapes) else None


def _within(bb: Any, indices: Any, updates: Any, sizes: list[Any], *, has_rows: bool) -> tuple[Any, Any]:
    """(the nearest places that there are, the updates of them), of indices into axes of these sizes: along their last
    axis where they are rows. Constant ones into known sizes were looked at when the file was read."""
    if is_constant(indices) and all(isinstance(size, tirx.IntImm) for size in sizes):
        return indices, updates
    if is_floating(dtype_of(updates)):
        updates = bb.normalize(bb.emit_te(_or_nan, updates, indices, sizes, has_rows, primfunc_name_hint="updates"))
    return bb.normalize(bb.emit_te(_nearest, indices, sizes, has_rows, primfunc_name_hint="places")), updates


def _nearest(indices: Any, sizes: list[Any], has_rows: bool) -> Any:
    """Indices that are none of an axis become its first or its last; those from the end, what they are from the
    beginning."""

    def place(*at: Any) -> Any:
        index, size = indices[at].astype("int64"), _size(sizes, at[-1] if has_rows else 0)
        index = tirx.Select(index < 0, index + size, index)
        return tirx.max(tirx.min(index, size - 1), 0).astype(indices.dtype)

    return te.compute(indices.shape, place, "places")


def _or_nan(updates: Any, indices: Any, sizes: list[Any], has_rows: bool) -> Any:
    """NaN in the place of an update whose place there is not."""

    def update(*at: Any) -> Any:
        rows = [(*at[: len(indices.shape) - 1], i) for i in range(len(sizes))] if has_rows else [at]
        flags = [_is_inside(indices[row].astype("int64"), size) for row, size in zip(rows, sizes, strict=True)]
        return tirx.Select(tirx.all(*flags), updates[at], tirx.const(math.nan, updates.dtype))

    return te.compute(updates.shape, update, "updates")


def _size(sizes: list[Any], coordinate: Any) -> Any:
    """The size of the axis that a coordinate is of."""
    size = tirx.Cast("int64", sizes[-1])
    for i, other in enumerate(sizes[:-1]):
        size = tirx.Select(coordinate == i, tirx.Cast("int64", other), size)
    return size


def _is_inside(index: Any, size: Any) -> Any:
    size = tirx.Cast("int64", size)
    return tirx.all(index >= -size, index < size)

"""Operators that TVM's importer converts with less than is known, or less than is safe: each may decline with None."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, tirx

from mhsa_compile.frontend.relax.casts import cast_of_floats
from mhsa_compile.frontend.relax.contractions import contraction
from mhsa_compile.frontend.relax.divisions import quotient, remainder
from mhsa_compile.frontend.relax.edge_converters import EDGES
from mhsa_compile.frontend.relax.gathering import gather_within_bounds
from mhsa_compile.frontend.relax.plain_converters import PLAIN
from mhsa_compile.frontend.relax.powers import power
from mhsa_compile.frontend.relax.quantised import QUANTISED


def slice_of_constants(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Slice of a tensor by constants. TVM's reads them as 32 bits: 2**63 - 1, as files say "to the end", is then -1.

    Nor does it know an axis counted from the end where a dim is symbolic. The first element, or the last, of so many is
    an axis of one, which broadcasts: a call without any is held to that.
    """
    data, starts, ends, axes, steps = (*inputs, None, None)[:5]
    bounds = [bound for bound in (starts, ends, axes, steps) if bound is not None]
    if not isinstance(data.ty, relax.TensorType) or not all(isinstance(bound, tvm.ir.GenericConst) for bound in bounds):
        return None
    begin, end = _clamped(starts), _clamped(ends)
    along = list(range(len(begin))) if axes is None else [axis % data.ty.ndim for axis in _numbers(axes)]
    by = [1] * len(begin) if steps is None else _numbers(steps)
    for place, (axis, first, last, step) in enumerate(zip(along, begin, end, by, strict=True)):
        size = data.ty.shape.values[axis] if isinstance(data.ty.shape, relax.ShapeExpr) else None
        if isinstance(size, tirx.IntImm) and (step < 0 or not _elements(first, last, step, size.value)):
            begin[place], end[place], by[place] = _bounds(first, last, step, size.value)
    part = bb.normalize(relax.op.strided_slice(data, along, begin, end, None if steps is None else by))
    ends_of_an_axis = [(0, 1), *((-1, last) for last in end if last >= _TO_THE_END)]
    ones = {axis for axis, bounds in zip(along, zip(begin, end, strict=True), strict=True) if bounds in ends_of_an_axis}
    if {*by} != {1} or not isinstance(part.ty.shape, relax.ShapeExpr):
        return part
    dims = [1 if axis in ones else size for axis, size in enumerate(part.ty.shape.values)]
    is_proved = all(
        tvm.sym.Analyzer().can_prove_equal(*sizes) for sizes in zip(dims, part.ty.shape.values, strict=True)
    )
    return part if is_proved else bb.match_cast(part, relax.TensorType(dims, part.ty.dtype))


def _elements(first: int, last: int, step: int, size: int) -> range:
    """The places that a Slice takes of an axis of this size, as ONNX clamps its bounds."""
    first, last = (bound + size if bound < 0 else bound for bound in (first, last))
    if step > 0:
        return range(min(max(first, 0), size), min(max(last, 0), size), step)
    return range(min(max(first, 0), size - 1), min(max(last, -1), size - 1), step)


def _bounds(first: int, last: int, step: int, size: int) -> tuple[int, int, int]:
    """The same places in bounds that TVM takes: none are an empty part from 0 on, an end before 0 is below -size."""
    places = _elements(first, last, step, size)
    if not places:
        return 0, 0, 1
    return places.start, places.stop if places.stop >= 0 else -size - 1, step


_TO_THE_END = 2**31 - 1


def expand_to_constants(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Expand of a tensor, some dims of it symbolic, to constant sizes. TVM's knows constant dims only."""
    data, shape_value = inputs
    sizes = data.ty.shape if isinstance(data.ty, relax.TensorType) else None
    if not isinstance(sizes, relax.ShapeExpr) or not isinstance(shape_value, tvm.ir.GenericConst):
        return None
    dims, target = list(sizes.values), _numbers(shape_value)
    dims, target = [1] * (len(target) - len(dims)) + dims, [1] * (len(dims) - len(target)) + target
    if any(to != 1 and not isinstance(size, int | tvm.tirx.IntImm) for size, to in zip(dims, target, strict=True)):
        return None
    result = [size if to == 1 else to for size, to in zip(dims, target, strict=True)]
    return bb.normalize(relax.op.broadcast_to(data, relax.ShapeExpr(result)))


def concat_of_dims_that_must_agree(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Concat where dims beside its axis only turn out equal, as 1 and (h - 33) // 48 + 1: a call is held to that."""
    shapes: list[Any] = [getattr(value.ty, "shape", None) for value in inputs]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return None
    rank, same = len(shapes[0].values), tvm.sym.Analyzer().can_prove_equal
    columns = [[shape.values[i] for shape in shapes] for i in range(rank)]
    stated = [next((dim for dim in column if isinstance(dim, tirx.IntImm)), column[0]) for column in columns]
    axis, parts, differ = attributes["axis"] % rank, list(inputs), False
    for k, shape in enumerate(shapes):
        others = [i for i, own in enumerate(shape.values) if i != axis and not same(own, stated[i])]
        if others:
            differ = True
            dims = [stated[i] if i in others else own for i, own in enumerate(shape.values)]
            parts[k] = bb.match_cast(bb.normalize(inputs[k]), relax.TensorType(dims, inputs[k].ty.dtype))
    return bb.normalize(relax.op.concat(relax.Tuple(parts), axis)) if differ else None


def _numbers(constant: Any) -> list[int]:
    return [int(number) for number in constant.value.numpy()]


def _clamped(constant: Any) -> list[int]:
    """Bounds of a slice; those beyond every axis as numbers that arithmetic with a symbolic dim can hold."""
    return [max(min(number, _TO_THE_END), -_TO_THE_END) for number in _numbers(constant)]


CONVERSIONS: dict[str, Callable[[Any, list[Any], dict[str, Any]], Any]] = {
    **EDGES,
    **PLAIN,
    **QUANTISED,
    "Cast": cast_of_floats,
    "Concat": concat_of_dims_that_must_agree,
    "Expand": expand_to_constants,
    "Gather": gather_within_bounds,
    "Div": quotient,
    "Einsum": contraction,
    "Mod": remainder,
    "Pow": power,
    "Slice": slice_of_constants,
}

"""Operators of axes that TVM's importer converts with less than is known, or less than is safe: each may decline with
None. `CONVERSIONS` has these, and all others that are not TVM's."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, te, tirx

from mhsa_compile.frontend.relax.arithmetic import ARITHMETIC
from mhsa_compile.frontend.relax.edge_converters import EDGES
from mhsa_compile.frontend.relax.grid_sample import grid_sample
from mhsa_compile.frontend.relax.plain_converters import PLAIN
from mhsa_compile.frontend.relax.quantised import QUANTISED
from mhsa_compile.frontend.relax.scattering import scatter_elements_within_bounds, scatter_nd_within_bounds
from mhsa_compile.frontend.relax.values import Converter, dtype_of, is_constant, is_floating, text_of


def slice_of_constants(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Slice of a tensor by constants. TVM's reads them as 32 bits: 2**63 - 1, as files say "to the end", is then -1.

    Nor does it know an axis counted from the end where a dim is symbolic. The first element, or the last, of so many is
    an axis of one, which broadcasts: a call without any is held to that.
    """
    data, starts, ends, axes, steps = (*inputs, None, None)[:5]
    bounds = [bound for bound in (starts, ends, axes, steps) if bound is not None]
    if dtype_of(data) is None or not all(map(is_constant, bounds)):
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
    is_proved = all(map(tvm.sym.Analyzer().can_prove_equal, dims, part.ty.shape.values))
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
    if not isinstance(sizes, relax.ShapeExpr) or not is_constant(shape_value):
        return None
    dims, target = list(sizes.values), _numbers(shape_value)
    dims, target = [1] * (len(target) - len(dims)) + dims, [1] * (len(dims) - len(target)) + target
    if any(to != 1 and not isinstance(size, int | tvm.tirx.IntImm) for size, to in zip(dims, target, strict=True)):
        return None
    result = [size if to == 1 else to for size, to in zip(dims, target, strict=True)]
    return relax.op.broadcast_to(data, relax.ShapeExpr(result))


def concat_of_dims_that_must_agree(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Concat where dims beside its axis only turn out equal, as 1 and (h - 33) // 48 + 1: a call is held to that."""
    shapes: list[Any] = [getattr(value.ty, "shape", None) for value in inputs]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes):
        return None
    rank, same = len(shapes[0].values), tvm.sym.Analyzer().can_prove_equal
    columns = [[shape.values[i] for shape in shapes] for i in range(rank)]
    broadcast = [next((dim for dim in column if isinstance(dim, tirx.IntImm)), column[0]) for column in columns]
    axis, parts, differ = attributes["axis"] % rank, list(inputs), False
    for k, shape in enumerate(shapes):
        others = [i for i, own in enumerate(shape.values) if i != axis and not same(own, broadcast[i])]
        if others:
            differ = True
            dims = [broadcast[i] if i in others else own for i, own in enumerate(shape.values)]
            parts[k] = bb.match_cast(bb.normalize(inputs[k]), relax.TensorType(dims, inputs[k].ty.dtype))
    return relax.op.concat(relax.Tuple(parts), axis) if differ else None


def gather_within_bounds(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Gather of a tensor as one function: TVM's own writes the indices out twice before it reads a table by them.

    An index out of bounds, which ONNX forbids, gives NaN where floats are gathered, and the nearest element elsewhere;
    TVM's reads whatever memory it points at.
    """
    data, indices = inputs
    shapes = [getattr(value.ty, "shape", None) for value in inputs]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes) or all(map(is_constant, inputs)):
        return None
    axis = attributes.get("axis", 0) % data.ty.ndim
    outside = math.nan if is_floating(dtype_of(data)) else None
    if is_constant(indices) and not indices.ty.ndim:
        return bb.emit_te(_pick, data, int(indices.value.numpy()), axis, outside, primfunc_name_hint="take")
    return bb.emit_te(_gather, data, indices, axis, outside, primfunc_name_hint="take")


def _gather(data: Any, indices: Any, axis: int, outside: float | None) -> Any:
    """The elements of an axis that an array of indices names."""
    rank = len(indices.shape)

    def element(*at: Any) -> Any:
        index = indices[tuple(at[axis : axis + rank])].astype("int64")
        return _element(data, outside, at[:axis], [index], at[axis + rank :])

    return te.compute((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]), element, "take")


def gather_nd_within_bounds(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """GatherND without batch axes as one function, as `gather_within_bounds` reads: TVM's has no code where an axis is
    a sum of symbols, as that of a decoder's mask over past and new keys is.
    """
    data, places = inputs
    shapes: list[Any] = [getattr(value.ty, "shape", None) for value in inputs]
    if not all(isinstance(shape, relax.ShapeExpr) for shape in shapes) or all(map(is_constant, inputs)):
        return None
    if attributes.get("batch_dims", 0) or not isinstance(shapes[1].values[-1], tirx.IntImm):
        return None
    outside = math.nan if is_floating(dtype_of(data)) else None
    return bb.emit_te(_gather_nd, data, places, int(shapes[1].values[-1]), outside, primfunc_name_hint="gather_nd")


def _gather_nd(data: Any, places: Any, count: int, outside: float | None) -> Any:
    """The elements that rows of `count` indices into the first axes name."""
    rows = len(places.shape) - 1

    def element(*at: Any) -> Any:
        indices = [places[(*at[:rows], i)].astype("int64") for i in range(count)]
        return _element(data, outside, [], indices, at[rows:])

    return te.compute((*places.shape[:-1], *data.shape[count:]), element, "gather_nd")


def _pick(data: Any, index: int, axis: int, outside: float | None) -> Any:
    """The elements of an axis at one place."""

    def element(*at: Any) -> Any:
        return _element(data, outside, at[:axis], [tirx.const(index, "int64")], at[axis:])

    return te.compute((*data.shape[:axis], *data.shape[axis + 1 :]), element, "take")


def _element(data: Any, outside: float | None, before: Any, indices: list[Any], behind: Any) -> Any:
    """An element by indices into neighbouring axes, which may count from their end; where there is none, `outside`, or
    the nearest."""
    sizes = data.shape[len(before) : len(before) + len(indices)]
    pairs = list(zip(indices, sizes, strict=True))
    places = [tirx.Select(index < 0, index + size, index) for index, size in pairs]
    if outside is None:
        bounds = zip(places, sizes, strict=True)
        nearest = [tirx.max(tirx.min(place, size - 1), tirx.const(0, "int64")) for place, size in bounds]
        return data[(*before, *nearest, *behind)]
    inside = [test for place, size in zip(places, sizes, strict=True) for test in (place >= 0, place < size)]
    return tirx.if_then_else(tirx.all(*inside), data[(*before, *places, *behind)], tirx.const(outside, str(data.dtype)))


def contraction(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Einsum of two tensors as a product of matrices: axes of a kind are put together, and apart again behind it. None
    where a letter stands twice in one, or in one alone without being kept.

    bqc,bchw->bqhw    matmul(a (b, q, c), b (b, c, h * w)), then (b, q, h, w)
    """
    equation = text_of(attributes["equation"]).replace(" ", "")
    terms, arrow, output = equation.partition("->")
    operands = terms.split(",")
    if not arrow or len(operands) != 2 or len(inputs) != 2 or "." in equation:
        return None
    left, right = operands
    once = all(len(set(term)) == len(term) for term in (left, right, output))
    fits_ranks = all(len(term) == value.ty.ndim for term, value in zip(operands, inputs, strict=True))
    if not once or not fits_ranks or not all(isinstance(value.ty.shape, relax.ShapeExpr) for value in inputs):
        return None
    free = [letter for letter in output if (letter in left) != (letter in right)]
    if free and free[-1] in left:  # the axis that comes last is of the columns
        (left, right), inputs = (right, left), inputs[::-1]
        operands = [left, right]
    batch = "".join(c for c in output if c in left and c in right)
    inner = "".join(c for c in left if c in right and c not in output)
    rows = "".join(c for c in output if c in left and c not in right)
    columns = "".join(c for c in output if c in right and c not in left)
    if not inner or {*left} != {*batch, *inner, *rows} or {*right} != {*batch, *inner, *columns}:
        return None
    sizes: dict[str, Any] = {}
    for term, value in zip(operands, inputs, strict=True):
        for letter, size in zip(term, value.ty.shape.values, strict=True):
            first = sizes.setdefault(letter, size)
            if letter not in rows + columns and not tvm.sym.Analyzer().can_prove_equal(first, size):
                return None  # one of them may be 1, and broadcast
    a = _as_matrix(inputs[0], left, (batch, rows, inner), sizes)
    b = _as_matrix(inputs[1], right, (batch, inner, columns), sizes)
    product, order = relax.op.matmul(a, b), batch + rows + columns
    if len(rows) != 1 or len(columns) != 1:
        product = relax.op.reshape(product, relax.ShapeExpr([sizes[letter] for letter in order]))
    return product if order == output else relax.op.permute_dims(product, [order.index(letter) for letter in output])


def _as_matrix(value: Any, term: str, groups: tuple[str, str, str], sizes: dict[str, Any]) -> Any:
    """The operand as (batch, a group as one axis, another as one axis)."""
    batch, *matrix = groups
    order = "".join(groups)
    if order != term:
        value = relax.op.permute_dims(value, [term.index(letter) for letter in order])
    if all(len(group) == 1 for group in matrix):
        return value
    axes = [math.prod((sizes[letter] for letter in group), start=tirx.const(1, "int64")) for group in matrix]
    return relax.op.reshape(value, relax.ShapeExpr([*(sizes[letter] for letter in batch), *axes]))


def _numbers(constant: Any) -> list[int]:
    return [int(number) for number in constant.value.numpy()]


def _clamped(constant: Any) -> list[int]:
    """Bounds of a slice; those beyond every axis as numbers that arithmetic with a symbolic dim can hold."""
    return [max(min(number, _TO_THE_END), -_TO_THE_END) for number in _numbers(constant)]


CONVERSIONS: dict[str, Converter] = {
    **ARITHMETIC,
    **EDGES,
    **PLAIN,
    **QUANTISED,
    "Concat": concat_of_dims_that_must_agree,
    "Einsum": contraction,
    "Expand": expand_to_constants,
    "Gather": gather_within_bounds,
    "GridSample": grid_sample,
    "ScatterElements": scatter_elements_within_bounds,
    "ScatterND": scatter_nd_within_bounds,
    "GatherND": gather_nd_within_bounds,
    "Slice": slice_of_constants,
}

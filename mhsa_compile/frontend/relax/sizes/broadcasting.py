"""Operands whose dims only a call shows to be equal, or 1, made fit before TVM's operators get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax, te, tirx

from mhsa_compile.frontend.relax.sizes.size_values import SizeNames, emitted, equals, literal, number

BROADCAST = frozenset(
    ("Add", "And", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual", "Less",
     "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "Pow", "Sub", "Sum", "Where", "Xor")
)  # fmt: skip
UNIDIRECTIONAL = frozenset(("PRelu",))


def agreeing(bb: Any, names: SizeNames, op_name: str, inputs: list[Any], attrs: Mapping[str, Any]) -> list[Any]:
    """The inputs of a node with dims that TVM sees to fit: an axis that may be 1 is written out as it broadcasts, and a
    call where two differ ends with an error."""
    shapes = [None if value is None else dims_of(value) for value in inputs]
    if any(shape is None for shape in shapes) or len(inputs) < 2:
        return inputs
    dims: list[list[Any]] = [shape for shape in shapes if shape is not None]
    if op_name in BROADCAST:
        return inputs if _plain(dims) else _broadcast(bb, names, inputs, dims)
    if op_name in UNIDIRECTIONAL and not _plain(dims):
        return [inputs[0], spread(bb, names, inputs[1], dims[0])]
    if op_name == "Gemm" and len(inputs) > 2 and inputs[2] is not None:
        rows, *_, columns = gemm_sizes(dims, attrs)
        whole = [rows, columns][2 - len(dims[2]) :]
        return inputs if _plain([whole, dims[2]]) else [*inputs[:2], spread(bb, names, inputs[2], whole)]
    if op_name == "MatMul" and all(dims):
        return _factors(bb, names, inputs, dims)
    return inputs


def gemm_sizes(shapes: Sequence[Any], attrs: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """A Gemm's rows, the columns of its first factor, the rows of its second, both as they are multiplied, its
    columns."""
    one, other = (list(shape[:2]) for shape in shapes[:2])
    if attrs.get("transA"):
        one.reverse()
    if attrs.get("transB"):
        other.reverse()
    return one[0], one[1], other[0], other[1]


def _factors(bb: Any, names: SizeNames, inputs: list[Any], shapes: list[list[Any]]) -> list[Any]:
    one, other = inputs
    rows, columns = list(shapes[0]), list(shapes[1])
    place = -2 if len(columns) > 1 else -1
    if not equal(rows[-1], columns[place]):
        size = columns[place] if number(columns[place]) is not None else rows[-1]
        if not equal(rows[-1], size):
            rows[-1] = size
            one = bb.match_cast(bb.normalize(one), relax.TensorType(rows, one.ty.dtype))
        if not equal(columns[place], size):
            columns[place] = size
            other = bb.match_cast(bb.normalize(other), relax.TensorType(columns, other.ty.dtype))
    batches = [rows[:-2], columns[:-2]]
    if len(rows) > 2 and len(columns) > 2 and not _plain(batches):
        batch = broadcast_dims(names, batches)
        one = spread(bb, names, one, [*batch, *rows[-2:]])
        other = spread(bb, names, other, [*batch, *columns[-2:]])
    return [one, other]


def of_width(bb: Any, rows: Any, width: int) -> Any:
    """Rows for a matrix of weights, which says their width where they were reshaped by sizes that only a call has."""
    sizes = dims_of(rows) or []
    if number(sizes[-1]) is not None:
        return rows
    return bb.match_cast(bb.normalize(rows), relax.TensorType([*sizes[:-1], literal(width)], rows.ty.dtype))


def _broadcast(bb: Any, names: SizeNames, inputs: list[Any], shapes: list[list[Any]]) -> list[Any]:
    shape = broadcast_dims(names, shapes)
    return [value if not dims else spread(bb, names, value, shape) for value, dims in zip(inputs, shapes, strict=True)]


def _plain(shapes: Sequence[Sequence[Any]]) -> bool:
    """Whether TVM itself sees how arrays of these dims broadcast."""
    rank = max(map(len, shapes), default=0)
    for axis in range(-rank, 0):
        sizes = [shape[axis] for shape in shapes if len(shape) >= -axis and number(shape[axis]) != 1]
        if any(not equal(size, sizes[0]) for size in sizes[1:]):
            return False
    return True


def broadcast_dims(names: SizeNames, shapes: Sequence[Sequence[Any]]) -> list[Any]:
    """The dims that arrays of these broadcast to, each 1 or equal: where only a call can tell, it is held to that."""
    rank = max(map(len, shapes))
    result: list[Any] = []
    for axis in range(-rank, 0):
        whole = literal(1)
        for size in (shape[axis] for shape in shapes if len(shape) >= -axis):
            whole = _together(names, whole, literal(size))
        result.append(whole)
    return result


def _together(names: SizeNames, one: Any, other: Any) -> Any:
    if number(one) == 1:
        return other
    if number(other) == 1 or names.same(one, other):
        return one
    for size, free in ((one, other), (other, one)):
        if number(size) is not None:  # the other one is that, or 1
            names.hold_equal([tirx.Select(equals(free, literal(1)), size, free)], [size])
            return size
    ways = (tirx.Select(equals(own, literal(1)), full, own) for own, full in ((one, other), (other, one)))
    return names.common_name(*ways)


def spread(bb: Any, names: SizeNames, value: Any, shape: Sequence[Any]) -> Any:
    """A tensor broadcast to dims, where an axis may turn out to be of one element."""
    dims = dims_of(value) or []
    own = shape[len(shape) - len(dims) :]
    if len(dims) == len(shape) and all(names.same(size, whole) for size, whole in zip(dims, own, strict=True)):
        if all(equal(size, whole) for size, whole in zip(dims, own, strict=True)):
            return value
        return bb.match_cast(bb.normalize(value), relax.TensorType(list(shape), value.ty.dtype))

    matches = [names.same(size, whole) for size, whole in zip(dims, own, strict=True)]

    def wide(data: Any, shape: list[Any]) -> Any:
        def element(*at: Any) -> Any:
            places = []
            for i, size, same in zip(at[len(shape) - len(dims) :], data.shape, matches, strict=True):
                one = tirx.Select(equals(size, literal(1)), literal(0), i)
                places.append(literal(0) if number(size) == 1 else i if same else one)
            return data[tuple(places)]

        return te.compute(tuple(shape), element, "broadcast")

    return emitted(bb, wide, value, list(shape), name="broadcast")


def dims_of(value: Any) -> list[Any] | None:
    """The dims of a tensor, where they are known by their expressions."""
    shape = getattr(value.ty, "shape", None)
    return list(shape.values) if isinstance(shape, relax.ShapeExpr) else None


def equal(one: Any, other: Any) -> bool:
    return bool(tvm.sym.Analyzer().can_prove_equal(one, other))

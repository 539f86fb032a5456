"""What operators make of sizes, as far as it is sizes again: the arithmetic that exporters write shapes with."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax, tirx
from tvm.relax.frontend.onnx.onnx_frontend import get_type

from mhsa_compile.frontend.relax.sizes.call_checks import Entry
from mhsa_compile.frontend.relax.sizes.size_values import (
    MOST,
    SizeValues,
    array_of,
    entries_of,
    equals,
    literal,
    number,
    objects,
)


def fold_sizes(op_name: str, inputs: Sequence[Any], attributes: dict[str, Any]) -> Any:
    """The result of an operator as Sizes (of Split, a Tuple of lists), None where it is to compute with tensors."""
    if op_name == "Shape":
        return _shape(inputs[0], attributes)
    if not any(isinstance(value, SizeValues) for value in inputs):
        return None
    operands = [None if value is None else entries_of(value) for value in inputs]
    if any(operand is None and value is not None for operand, value in zip(operands, inputs, strict=True)):
        return None
    fold = _FOLDS.get(op_name)
    if fold is None:
        return None
    try:
        result = fold(operands, attributes)
    except _NotFollowed:
        return None
    return None if result is not None and result.entries.size > MOST else result


class _NotFollowed(Exception):
    """Where entries are not enough: a tensor computes it."""


def _shape(value: Any, attributes: dict[str, Any]) -> SizeValues | None:
    part = slice(attributes.get("start", 0), attributes.get("end"))
    if isinstance(value, SizeValues):
        dims: list[Any] = list(value.entries.shape)
    elif isinstance(value.ty, relax.TensorType) and isinstance(value.ty.shape, relax.ShapeExpr):
        dims = list(value.ty.shape.values)
    else:
        return None
    return SizeValues(objects([literal(dim) for dim in dims])[part], "int64")


def _elementwise(function: Callable[..., Entry], result: str | None = None) -> Callable[[list[Any], Any], SizeValues]:
    """Entry by entry, broadcast. `result`: the dtype, where it is not the first operand's."""

    def fold(operands: list[SizeValues], attributes: dict[str, Any]) -> SizeValues:
        entries = np.frompyfunc(function, len(operands), 1)(*(operand.entries for operand in operands))
        return SizeValues(_array(entries), result or operands[0].dtype)

    return fold


def _chain(function: Callable[[Entry, Entry], Entry]) -> Callable[[list[Any], Any], SizeValues]:
    def fold(operands: list[SizeValues], attributes: dict[str, Any]) -> SizeValues:
        entries = functools.reduce(np.frompyfunc(function, 2, 1), (operand.entries for operand in operands))
        return SizeValues(_array(entries), operands[0].dtype)

    return fold


def _floating(entry: Entry) -> bool:
    return str(entry.ty.dtype).startswith("float")


def _divide(a: Entry, b: Entry) -> Entry:
    return a / b if _floating(a) else tirx.truncdiv(a, _divisor(b))


def _divisor(b: Entry) -> Entry:
    """A divisor of whole numbers that is not zero: what ONNX leaves open ends no process."""
    if number(b) == 0:
        raise _NotFollowed
    if number(b) is not None:
        return b
    none, one = (literal(value, str(b.ty.dtype)) for value in (0, 1))
    return tirx.Select(equals(b, none), one, b)


def _modulo(operands: list[SizeValues], attributes: dict[str, Any]) -> SizeValues:
    if operands[0].dtype.startswith("float"):
        raise _NotFollowed
    remainder = tirx.truncmod if attributes.get("fmod", 0) else tirx.floormod
    return _elementwise(lambda a, b: remainder(a, _divisor(b)))(operands, attributes)


def _round(function: Callable[[Entry], Entry]) -> Callable[[list[Any], Any], SizeValues]:
    return _elementwise(lambda a: function(a) if _floating(a) else a)


def _square_root(a: Entry) -> Entry:
    if not _floating(a):
        raise _NotFollowed
    return tirx.sqrt(a)


def _cast(operands: list[SizeValues], attributes: dict[str, Any]) -> SizeValues:
    return _convert(operands[0], get_type(attributes["to"]))


def _convert(sizes: SizeValues, kind: str) -> SizeValues:
    if not kind.startswith(("int", "bool", "float32", "float64")):
        raise _NotFollowed

    def convert(a: Entry) -> Entry:
        return tirx.Not(equals(a, literal(0, str(a.ty.dtype)))) if kind == "bool" else a.astype(kind)

    return _elementwise(convert, kind)([sizes], {})


def _clip(operands: list[Any], attributes: dict[str, Any]) -> SizeValues:
    value, low, high = (*operands, None, None)[:3]
    if low is not None:
        value = _elementwise(tirx.max)([value, low], attributes)
    return value if high is None else _elementwise(tirx.min)([value, high], attributes)


def _where(operands: list[SizeValues], attributes: dict[str, Any]) -> SizeValues:
    def choose(condition: Entry, a: Entry, b: Entry) -> Entry:
        decided = number(condition)
        return tirx.Select(condition, a, b) if decided is None else a if decided else b

    return SizeValues(_elementwise(choose)(operands, attributes).entries, operands[1].dtype)


def _sign(a: Entry) -> Entry:
    one, none = literal(1, str(a.ty.dtype)), literal(0, str(a.ty.dtype))
    return tirx.Select(a > none, one, tirx.Select(a < none, none - one, none))


def _arranged(function: Callable[..., Any]) -> Callable[[list[Any], Any], SizeValues]:
    """Entries in another arrangement, by `function(entries, attributes, *numbers)`: numbers are what all other operands
    are."""

    def fold(operands: list[Any], attributes: dict[str, Any]) -> SizeValues:
        data, *others = operands
        numbers = [None if other is None else _numbers(other) for other in others]
        try:
            return SizeValues(_array(function(data.entries, attributes, *numbers)), data.dtype)
        except IndexError as error:
            raise _NotFollowed from error

    return fold


def _slice(operands: list[Any], attributes: dict[str, Any]) -> SizeValues:
    data, starts, ends, axes, steps = (*operands, None, None)[:5]
    begin, end = _numbers(starts).tolist(), _numbers(ends).tolist()
    along = range(len(begin)) if axes is None else _numbers(axes).tolist()
    index = [slice(None)] * data.entries.ndim
    for i, axis in enumerate(along):
        step = 1 if steps is None else int(_numbers(steps)[i])
        size = data.entries.shape[axis]
        low = max(begin[i] + size, -1 if step < 0 else 0) if begin[i] < 0 else begin[i]
        high = None if end[i] < -size else end[i]
        index[axis] = slice(low if low >= 0 else 0, high if high is not None or step > 0 else None, step)
        if high is None and step > 0:
            index[axis] = slice(0, 0)
    return SizeValues(data.entries[tuple(index)], data.dtype)


def _concat(operands: list[SizeValues], attributes: dict[str, Any]) -> SizeValues:
    return SizeValues(np.concatenate([operand.entries for operand in operands], attributes["axis"]), operands[0].dtype)


def _squeeze(entries: np.ndarray, attributes: dict[str, Any], axes: np.ndarray | None = None) -> Any:
    return np.squeeze(entries, None if axes is None else tuple(axes.reshape(-1).tolist()))


def _reshape(entries: np.ndarray, attributes: dict[str, Any], target: np.ndarray) -> Any:
    sizes = target.reshape(-1).tolist()
    if not attributes.get("allowzero", 0):
        sizes = [entries.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    return entries.reshape(sizes)


def _expand(entries: np.ndarray, attributes: dict[str, Any], target: np.ndarray) -> Any:
    shape = np.broadcast_shapes(entries.shape, tuple(target.reshape(-1).tolist()))
    return np.broadcast_to(entries, shape).copy()


def _flatten(entries: np.ndarray, attributes: dict[str, Any]) -> Any:
    axis, rank = attributes.get("axis", 1), entries.ndim
    return entries.reshape(int(np.prod(entries.shape[: axis if axis >= 0 else rank + axis])), -1)


def _reduce(function: Callable[[Entry, Entry], Entry]) -> Callable[[list[Any], Any], SizeValues]:
    def fold(operands: list[Any], attributes: dict[str, Any]) -> SizeValues:
        data, axes = operands[0].entries, None if len(operands) < 2 else operands[1]
        along = list(range(data.ndim)) if axes is None else [axis % data.ndim for axis in _numbers(axes).tolist()]
        if axes is None and attributes.get("noop_with_empty_axes", 0):
            return operands[0]  # type: ignore[no-any-return]
        if not data.size:
            raise _NotFollowed
        for axis in sorted(along, reverse=True):
            parts = [np.take(data, i, axis) for i in range(data.shape[axis])]
            data = _array(functools.reduce(np.frompyfunc(function, 2, 1), parts))
        if attributes.get("keepdims", 1):
            data = np.expand_dims(data, tuple(along))
        return SizeValues(data, operands[0].dtype)

    return fold


def _numbers(sizes: SizeValues) -> np.ndarray:
    """The numbers that sizes are. Raises _NotFollowed where some are expressions."""
    if any(number(entry) is None for entry in sizes.entries.reshape(-1)):
        raise _NotFollowed
    return array_of(sizes)


def _array(value: Any) -> np.ndarray:
    """An object array, also of one entry without axes."""
    if isinstance(value, np.ndarray):
        return value
    entries = np.empty((), dtype=object)
    entries[()] = value
    return entries


_FOLDS: dict[str, Callable[[list[Any], dict[str, Any]], SizeValues]] = {
    "Abs": _elementwise(lambda a: tirx.max(a, literal(0, str(a.ty.dtype)) - a)),
    "Add": _elementwise(operator.add),
    "And": _elementwise(tirx.all),
    "Cast": _cast,
    "CastLike": lambda operands, attributes: _convert(operands[0], operands[1].dtype),
    "Ceil": _round(tirx.ceil),
    "Clip": _clip,
    "Concat": _concat,
    "Div": _elementwise(_divide),
    "Equal": _elementwise(equals, "bool"),
    "Expand": _arranged(_expand),
    "Flatten": _arranged(_flatten),
    "Floor": _round(tirx.floor),
    "Gather": _arranged(lambda entries, attributes, at: np.take(entries, at, attributes.get("axis", 0))),
    "Greater": _elementwise(operator.gt, "bool"),
    "GreaterOrEqual": _elementwise(operator.ge, "bool"),
    "Identity": lambda operands, attributes: operands[0],
    "Less": _elementwise(operator.lt, "bool"),
    "LessOrEqual": _elementwise(operator.le, "bool"),
    "Max": _chain(tirx.max),
    "Min": _chain(tirx.min),
    "Mod": _modulo,
    "Mul": _elementwise(operator.mul),
    "Neg": _elementwise(lambda a: literal(0, str(a.ty.dtype)) - a),
    "Not": _elementwise(tirx.Not),
    "Or": _elementwise(tirx.any),
    "ReduceMax": _reduce(tirx.max),
    "ReduceMin": _reduce(tirx.min),
    "ReduceProd": _reduce(operator.mul),
    "ReduceSum": _reduce(operator.add),
    "Reshape": _arranged(_reshape),
    "Sign": _elementwise(_sign),
    "Size": lambda operands, attributes: SizeValues(_array(literal(operands[0].entries.size)), "int64"),
    "Slice": _slice,
    "Sqrt": _elementwise(_square_root),
    "Squeeze": _arranged(_squeeze),
    "Sub": _elementwise(operator.sub),
    "Sum": _chain(operator.add),
    "Tile": _arranged(lambda entries, attributes, times: np.tile(entries, times.tolist())),
    "Transpose": _arranged(lambda entries, attributes: np.transpose(entries, attributes.get("perm"))),
    "Unsqueeze": _arranged(lambda entries, _, axes: np.expand_dims(entries, tuple(axes.reshape(-1).tolist()))),
    "Where": _where,
}

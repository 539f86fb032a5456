"""Operators that TVM's importer converts rightly but for an edge: a dtype, a shift, a row of zeros. Each may decline
with None."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tvm import relax, te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ArgMax, ArgMin, MaxPool, OneHot, get_type

from mhsa_compile.frontend.relax.values import NARROW, Converter, dtype_of, is_constant, is_floating


def equal_flags(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Equal of bool, as numbers: TVM's compares single bits as floats."""
    if any(dtype_of(value) != "bool" for value in inputs):
        return None
    return relax.op.equal(*(relax.op.astype(value, "uint8") for value in inputs))


def one_hot_of_its_dtype(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """OneHot, of the dtype of its values: TVM's has that of Python's numbers. Its depth may be a list of one."""
    if is_constant(inputs[1]):
        inputs[1] = relax.const(inputs[1].value.numpy().reshape(()), dtype_of(inputs[1]))
    result = bb.normalize(OneHot._impl_v11(bb, inputs, attributes, ({}, {})))
    kind = dtype_of(inputs[2])
    return result if dtype_of(result) == kind else relax.op.astype(result, kind)


def reduction_of_nothing(function: Callable[[Any], Any]) -> Converter:
    """A reduction over no axes, noop_with_empty_axes: what it does to each number, which TVM's leaves out."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        known, axes = _axes(inputs)
        return function(inputs[0]) if known and axes is None and attributes.get("noop_with_empty_axes", 0) else None

    return convert


def _axes(inputs: Sequence[Any]) -> tuple[bool, list[int] | None]:
    """(whether the axes of a reduction are constant, and they; None of all axes)."""
    axes: Any = inputs[1] if len(inputs) > 1 else None
    numbers = axes.value.numpy().tolist() if is_constant(axes) else []
    return axes is None or is_constant(axes), numbers or None


def extreme_of_flags(operator: Callable[..., Any]) -> Converter:
    """The largest or the smallest of flags, as numbers, as TVM knows no bounds of bool."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        known, axes = _axes(inputs)
        if not known or dtype_of(inputs[0]) != "bool":
            return None
        if axes is None and attributes.get("noop_with_empty_axes", 0):
            return inputs[0]
        numbers = relax.op.astype(inputs[0], "uint8")
        return relax.op.astype(operator(numbers, axes, bool(attributes.get("keepdims", 1))), "bool")

    return convert


def clip(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Clip: NaN stays NaN, and a bound that is NaN is none."""
    x, *bounds = inputs
    kind = dtype_of(x)
    if not is_floating(kind):
        return None
    for bound, operator, none in zip(bounds, (relax.op.maximum, relax.op.minimum), (-np.inf, np.inf), strict=False):
        if is_constant(bound) and bound.value.numpy().size == 1:
            number = float(bound.value.numpy().item())
            x = x if np.isnan(number) else operator(x, relax.const(number, kind))
        elif bound is not None:
            missing = relax.op.isnan(relax.op.astype(bound, "float32") if kind in NARROW else bound)
            x = operator(x, relax.op.where(missing, relax.const(none, kind), bound))
    return x


def extreme_of_several(operator: Callable[..., Any]) -> Converter:
    """Max, Min: two by two, as TVM's, of them all at once, makes the lowest float of -inf."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        return None if any(dtype_of(value) is None for value in inputs) else functools.reduce(operator, inputs)

    return convert


def place_of_the_extreme(converter: Any) -> Converter:
    """ArgMax, ArgMin: a place that there is, also where nothing but infinities is; TVM's is before the first
    then, or behind the last."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        if not is_floating(dtype_of(inputs[0])):
            return None
        place = converter._impl_v12(bb, inputs, attributes, ({}, {}))
        shape, axis = inputs[0].ty.shape, attributes.get("axis", 0)
        size = shape.values[axis] if isinstance(shape, relax.ShapeExpr) else None
        if not attributes.get("select_last_index", 0):
            return relax.op.maximum(place, relax.const(0, "int64"))
        if not isinstance(size, tirx.IntImm):
            return place
        return relax.op.minimum(place, relax.const(size.value - 1, "int64"))

    return convert


def hardmax(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Hardmax: the first of equals, also where nothing but -inf is."""
    (x,) = inputs
    shape, axis = getattr(x.ty, "shape", None), attributes.get("axis", -1)
    if not isinstance(shape, relax.ShapeExpr) or not isinstance(size := shape.values[axis], tirx.IntImm):
        return None
    place = relax.op.argmax(x, axis=axis % len(shape.values), keepdims=True)
    place = relax.op.maximum(place, relax.const(0, "int64"))
    sizes = [1] * len(shape.values)
    sizes[axis] = size.value
    places = relax.const(np.arange(size.value).reshape(sizes), "int64")
    return relax.op.astype(relax.op.equal(place, places), dtype_of(x))


def log_of_exponentials(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """ReduceLogSumExp: an infinity where the largest is one; TVM's takes it off itself, which is NaN."""
    x, kind, (known, axes) = inputs[0], dtype_of(inputs[0]), _axes(inputs)
    if kind is None or not known:
        return None
    if axes is None and attributes.get("noop_with_empty_axes", 0):
        return x
    highest = relax.op.max(x, axes, True)
    finite = relax.op.less(relax.op.abs(highest), relax.const(np.inf, kind))
    highest = relax.op.where(finite, highest, relax.const(0, kind))
    exponentials = relax.op.exp(relax.op.subtract(x, highest))
    result = relax.op.add(relax.op.log(relax.op.sum(exponentials, axes, True)), highest)
    return result if attributes.get("keepdims", 1) else relax.op.squeeze(result, axes)


def eye_of_a_dtype(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """EyeLike, of the dtype that it says."""
    kind = str(get_type(attributes["dtype"])) if "dtype" in attributes else str(dtype_of(inputs[0]))
    shift, one, zero = attributes.get("k", 0), tirx.const(1, kind), tirx.const(0, kind)

    def eye(x: Any) -> Any:
        return te.compute(x.shape, lambda i, j: tirx.Select(j == i + shift, one, zero), "eye")

    return bb.emit_te(eye, inputs[0], primfunc_name_hint="eye")


def pool_with_places(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """MaxPool with where its values come from: the first of equal ones, as places in the whole array, whose rows or
    columns (storage_order) lie behind each other."""
    if attributes["tvm_custom"]["num_outputs"] < 2:
        return None
    call = MaxPool._impl_v1(bb, inputs, attributes, ({}, {}))
    attrs, values = call.attrs, bb.emit(call)
    window, strides, dilations = (list(map(int, one)) for one in (attrs.pool_size, attrs.strides, attrs.dilation))
    before, columns = [int(n) for n in attrs.padding][: len(window)], attributes.get("storage_order", 0)

    def places(x: Any, values: Any) -> Any:
        steps = [te.reduce_axis((0, n), f"k{i}") for i, n in enumerate(window)]
        sizes = x.shape[2:]

        def element(*at: Any) -> Any:
            own = [
                i * stride + step * dilation - pad
                for i, stride, step, dilation, pad in zip(at[2:], strides, steps, dilations, before, strict=True)
            ]
            place = at[0] * x.shape[1] + at[1]
            for i, size in zip(own, sizes, strict=True):
                place = place * size + i
            value, extreme = x(*at[:2], *own), values(*at)
            ordered = is_floating(str(x.dtype))
            same = tirx.Not(tirx.any(value < extreme, value > extreme)) if ordered else value == extreme
            inside = tirx.all(*[tirx.all(i >= 0, i < size) for i, size in zip(own, sizes, strict=True)])
            nowhere = tirx.max_value("int64")
            return te.min(tirx.if_then_else(inside, tirx.Select(same, place, nowhere), nowhere), axis=steps)

        first = te.compute(values.shape, element, "places")
        return te.compute(values.shape, lambda *at: _by_columns(first(*at), sizes), "columns") if columns else first

    return relax.Tuple([values, bb.emit_te(places, inputs[0], values, primfunc_name_hint="max_pool_places")])


def _by_columns(place: Any, sizes: Sequence[Any]) -> Any:
    """A place in an array whose columns lie behind each other, from that of its rows behind each other."""
    own = []
    for size in reversed(sizes):
        own.append(place % size)
        place = place // size
    for i, size in zip(own, reversed(sizes), strict=True):
        place = place * size + i
    return place


def above_a_threshold(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """ThresholdedRelu chooses: TVM's multiplies by 0, which makes NaN of -inf."""
    (x,) = inputs
    threshold, zero = (relax.const(number, dtype_of(x)) for number in (attributes.get("alpha", 1.0), 0))
    return relax.op.where(relax.op.greater(x, threshold), x, zero)


EDGES: dict[str, Converter] = {
    "ArgMax": place_of_the_extreme(ArgMax),
    "ArgMin": place_of_the_extreme(ArgMin),
    "Clip": clip,
    "Equal": equal_flags,
    "EyeLike": eye_of_a_dtype,
    "Hardmax": hardmax,
    "Max": extreme_of_several(relax.op.maximum),
    "MaxPool": pool_with_places,
    "Min": extreme_of_several(relax.op.minimum),
    "OneHot": one_hot_of_its_dtype,
    "ReduceL1": reduction_of_nothing(relax.op.abs),
    "ReduceL2": reduction_of_nothing(relax.op.abs),
    "ReduceLogSum": reduction_of_nothing(relax.op.log),
    "ReduceLogSumExp": log_of_exponentials,
    "ReduceMax": extreme_of_flags(relax.op.max),
    "ReduceMin": extreme_of_flags(relax.op.min),
    "ReduceSumSquare": reduction_of_nothing(relax.op.square),
    "ThresholdedRelu": above_a_threshold,
}

"""Operators that TVM's importer converts rightly but for an edge: a dtype, a shift, a row of zeros. Each may decline
with None."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import ArgMax, ArgMin, MaxPool, OneHot, get_type

from mhsa_compile.frontend.relax.plain_converters import Converter

_NARROW = ("float16", "bfloat16")


def in_float32(function: Callable[[Any], Any]) -> Converter:
    """A function of one argument: of narrow floats in float32, as LLVM has none of them."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        (x,) = inputs
        kind = _dtype(x)
        if kind not in _NARROW:
            return None
        y = bb.normalize(function(bb.normalize(relax.op.astype(x, "float32"))))
        return y if _dtype(y) == "bool" else bb.normalize(relax.op.astype(y, kind))

    return convert


def equal_flags(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Equal of bool, as numbers: TVM's compares single bits as floats."""
    if any(_dtype(value) != "bool" for value in inputs):
        return None
    return bb.normalize(relax.op.equal(*(bb.normalize(relax.op.astype(value, "uint8")) for value in inputs)))


def shift_of_any_length(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """BitShift: by as many bits as the number has, or more, or fewer than 0, what the sign's extension leaves."""
    x, amount = inputs
    kind = _dtype(x)
    if kind is None or not kind.lstrip("u").startswith("int") or _dtype(amount) != kind:
        return None
    bits, right = int(kind.lstrip("uint")), attributes["direction"] in (b"RIGHT", "RIGHT")

    def emit(value: Any) -> Any:
        return bb.normalize(value)

    within = emit(relax.op.less(amount, relax.const(bits, kind)))
    if not kind.startswith("u"):
        within = emit(relax.op.logical_and(within, emit(relax.op.greater_equal(amount, relax.const(0, kind)))))
    last, none = relax.const(bits - 1, kind), relax.const(0, kind)
    by = emit(relax.op.where(within, amount, last if right and not kind.startswith("u") else none))
    result = emit((relax.op.right_shift if right else relax.op.left_shift)(x, by))
    if right and not kind.startswith("u"):
        return result  # by all bits but one, the sign is left
    return emit(relax.op.where(within, result, none))


def one_hot_of_its_dtype(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """OneHot, of the dtype of its values: TVM's has that of Python's numbers. Its depth may be a list of one."""
    if isinstance(inputs[1], tvm.ir.GenericConst):
        inputs[1] = relax.const(inputs[1].value.numpy().reshape(()), _dtype(inputs[1]))
    result = bb.normalize(OneHot._impl_v11(bb, inputs, attributes, ({}, {})))
    kind = _dtype(inputs[2])
    return result if _dtype(result) == kind else bb.normalize(relax.op.astype(result, kind))


def reduction_of_nothing(function: Callable[[Any], Any]) -> Converter:
    """A reduction over no axes, noop_with_empty_axes: what it does to each number, which TVM's leaves out."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        axes = inputs[1] if len(inputs) > 1 else None
        empty = axes is None or (isinstance(axes, tvm.ir.GenericConst) and not axes.value.numpy().size)
        return bb.normalize(function(inputs[0])) if empty and attributes.get("noop_with_empty_axes", 0) else None

    return convert


def extreme(operator: Callable[..., Any]) -> Converter:
    """The largest or the smallest of flags, as numbers, as TVM knows no bounds of bool, and of narrow floats, in
    float32."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        axes, kind = inputs[1] if len(inputs) > 1 else None, str(_dtype(inputs[0]))
        if not (axes is None or isinstance(axes, tvm.ir.GenericConst)) or kind not in ("bool", *_NARROW):
            return None
        over = None if axes is None or not axes.value.numpy().size else axes.value.numpy().tolist()
        if over is None and attributes.get("noop_with_empty_axes", 0):
            return inputs[0]
        wide = bb.normalize(relax.op.astype(inputs[0], "uint8" if kind == "bool" else "float32"))
        keepdims = bool(attributes.get("keepdims", 1))
        return bb.normalize(relax.op.astype(bb.normalize(operator(wide, over, keepdims)), kind))

    return convert


def clip(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Clip: NaN stays NaN, and a bound that is NaN is none."""
    x, *bounds = inputs
    kind = _dtype(x)
    if kind is None or not kind.startswith(("float", "bfloat")):
        return None
    for bound, operator, none in zip(bounds, (relax.op.maximum, relax.op.minimum), (-np.inf, np.inf), strict=False):
        if bound is not None:
            wide = bb.normalize(relax.op.astype(bound, "float32")) if kind in _NARROW else bound
            missing = bb.normalize(relax.op.isnan(wide))
            x = bb.normalize(operator(x, bb.normalize(relax.op.where(missing, relax.const(none, kind), bound))))
    return x


def extreme_of_several(operator: Callable[..., Any]) -> Converter:
    """Max, Min: two by two, as TVM's, of them all at once, makes the lowest float of -inf."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        if any(_dtype(value) is None for value in inputs):
            return None
        return functools.reduce(lambda one, other: bb.normalize(operator(one, other)), inputs)

    return convert


def place_of_the_extreme(converter: Any) -> Converter:
    """ArgMax, ArgMin: a place that there is, also where nothing but infinities is; TVM's is before the first
    then, or behind the last."""

    def convert(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        if not str(_dtype(inputs[0])).startswith(("float", "bfloat")):
            return None
        place = bb.normalize(converter._impl_v12(bb, inputs, attributes, ({}, {})))
        shape, axis = inputs[0].ty.shape, attributes.get("axis", 0)
        size = shape.values[axis] if isinstance(shape, relax.ShapeExpr) else None
        if not attributes.get("select_last_index", 0):
            return bb.normalize(relax.op.maximum(place, relax.const(0, "int64")))
        if not isinstance(size, tirx.IntImm):
            return place
        return bb.normalize(relax.op.minimum(place, relax.const(size.value - 1, "int64")))

    return convert


def hardmax(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """Hardmax: the first of equals, also where nothing but -inf is."""
    (x,) = inputs
    shape, axis = getattr(x.ty, "shape", None), attributes.get("axis", -1)
    if not isinstance(shape, relax.ShapeExpr) or not isinstance(size := shape.values[axis], tirx.IntImm):
        return None
    place = bb.normalize(relax.op.argmax(x, axis=axis % len(shape.values), keepdims=True))
    place = bb.normalize(relax.op.maximum(place, relax.const(0, "int64")))
    sizes = [1] * len(shape.values)
    sizes[axis] = size.value
    places = relax.const(np.arange(size.value).reshape(sizes), "int64")
    return bb.normalize(relax.op.astype(bb.normalize(relax.op.equal(place, places)), str(_dtype(x))))


def log_of_exponentials(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """ReduceLogSumExp: an infinity where the largest is one; TVM's takes it off itself, which is NaN."""
    x, axes = (*inputs, None)[:2]
    kind = _dtype(x)
    if kind is None or not (axes is None or isinstance(axes, tvm.ir.GenericConst)):
        return None
    over = None if axes is None or not axes.value.numpy().size else axes.value.numpy().tolist()
    if over is None and attributes.get("noop_with_empty_axes", 0):
        return x

    def emit(value: Any) -> Any:
        return bb.normalize(value)

    highest = emit(relax.op.max(x, over, True))
    finite = emit(relax.op.less(emit(relax.op.abs(highest)), relax.const(np.inf, kind)))
    highest = emit(relax.op.where(finite, highest, relax.const(0, kind)))
    exponentials = emit(relax.op.exp(emit(relax.op.subtract(x, highest))))
    result = emit(relax.op.add(emit(relax.op.log(emit(relax.op.sum(exponentials, over, True)))), highest))
    return result if attributes.get("keepdims", 1) else emit(relax.op.squeeze(result, over))


def eye_of_a_dtype(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """EyeLike, of the dtype that it says."""
    kind = str(get_type(attributes["dtype"])) if "dtype" in attributes else str(_dtype(inputs[0]))
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
            same = tirx.Not(tirx.any(value < extreme, value > extreme)) if _floating(x) else value == extreme
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


def _floating(x: Any) -> bool:
    return str(x.dtype).startswith(("float", "bfloat"))


def above_a_threshold(bb: Any, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """ThresholdedRelu chooses: TVM's multiplies by 0, which makes NaN of -inf."""
    (x,) = inputs
    kind = str(_dtype(x))
    above = bb.normalize(relax.op.greater(x, relax.const(attributes.get("alpha", 1.0), kind)))
    return bb.normalize(relax.op.where(above, x, relax.const(0, kind)))


def _dtype(value: Any) -> str | None:
    return str(value.ty.dtype) if value is not None and isinstance(value.ty, relax.TensorType) else None


EDGES: dict[str, Converter] = {
    **{
        name: in_float32(getattr(relax.op, name.lower()))
        for name in ("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cosh", "IsNaN", "Sinh", "Tan")
    },
    "ArgMax": place_of_the_extreme(ArgMax),
    "ArgMin": place_of_the_extreme(ArgMin),
    "BitShift": shift_of_any_length,
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
    "ReduceMax": extreme(relax.op.max),
    "ReduceMin": extreme(relax.op.min),
    "ReduceSumSquare": reduction_of_nothing(relax.op.square),
    "ThresholdedRelu": above_a_threshold,
}

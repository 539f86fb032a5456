"""Operators that TVM's own lowering has wrong at the edge: NaN, infinities and axes of nothing among the largest and
the smallest, which include Relu and pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import te, tirx

from mhsa_compile.kernels.interface.extremes import larger, largest, largest_of, smaller, smallest

Legalize = Callable[[Any, Any], Any]
"""A relax.BlockBuilder and a call -> what takes its place: how LegalizeOps lowers an operator."""

_WIDE = ("float32", "float64")


def _of_floats(legalize: Legalize) -> Legalize:
    """A rule for floats; of whole numbers TVM's is right."""

    def rule(builder: Any, call: Any) -> Any:
        if not str(call.args[0].ty.dtype).startswith(("float", "bfloat")):
            return call.op.get_attr("FLegalize")(builder, call)
        return legalize(builder, call)

    return rule


def _of_two(pick: Callable[[Any, Any, str], Any], name: str) -> Legalize:
    def computed(one: Any, other: Any) -> Any:
        rank = max(len(one.shape), len(other.shape))
        shape = [_wider(_size(one, axis), _size(other, axis)) for axis in range(-rank, 0)]

        def element(*at: Any) -> Any:
            return pick(_element(one, at), _element(other, at), str(one.dtype))

        return te.compute(tuple(shape), element, name)

    def legalize(builder: Any, call: Any) -> Any:
        one, other = call.args
        if (number := _number(other)) is not None:
            return builder.call_te(
                lambda one: te.compute(one.shape, lambda *at: pick(one(*at), number, str(one.dtype)), name),
                one,
                primfunc_name_hint=name,
            )
        return builder.call_te(computed, one, other, primfunc_name_hint=name)

    return _of_floats(legalize)


def _number(value: Any) -> Any:
    """What a constant of one number is within an expression: an operand that nothing is read for, and no NaN."""
    if not isinstance(value, tvm.ir.GenericConst) or value.value.numpy().ndim or str(value.ty.dtype) not in _WIDE:
        return None
    number = value.value.numpy().item()
    return None if np.isnan(number) else tirx.const(number, str(value.ty.dtype))


def _size(array: Any, axis: int) -> Any:
    return array.shape[axis] if len(array.shape) >= -axis else tirx.const(1, "int64")


def _wider(one: Any, other: Any) -> Any:
    return other if _is_one(one) else one


def _is_one(size: Any) -> bool:
    return bool(tvm.sym.Analyzer().can_prove_equal(size, 1))


def _element(array: Any, at: Sequence[Any]) -> Any:
    """An element as it broadcasts."""
    own = at[len(at) - len(array.shape) :]
    places = [0 if _is_one(size) else i for i, size in zip(own, array.shape, strict=True)]
    return array(*places)


def _along_axes(extreme: Callable[..., Any], name: str) -> Legalize:
    def legalize(builder: Any, call: Any) -> Any:
        axes, keepdims = call.attrs.axis, bool(call.attrs.keepdims)

        def computed(data: Any) -> Any:
            rank = len(data.shape)
            along = {int(axis) % rank for axis in (range(rank) if axes is None else axes)}
            steps = {axis: te.reduce_axis((0, data.shape[axis]), f"k{axis}") for axis in sorted(along)}
            own = [axis for axis in range(rank) if axis not in along]
            axes_of_result = range(rank) if keepdims else own
            shape = [tirx.const(1, "int64") if axis in along else data.shape[axis] for axis in axes_of_result]

            def element(*at: Any) -> Any:
                places = dict(zip(axes_of_result, at, strict=True)) | steps
                return data(*(places[axis] for axis in range(rank)))

            return extreme(tuple(shape), element, list(steps.values()), str(data.dtype))

        return builder.call_te(computed, call.args[0], primfunc_name_hint=name)

    return _of_floats(legalize)


def _elementwise(value: Callable[..., Any], name: str) -> Legalize:
    """A rule by the value of an element, with the numbers that the call has behind it."""

    def legalize(builder: Any, call: Any) -> Any:
        numbers = [tirx.const(float(bound.value), call.args[0].ty.dtype) for bound in call.args[1:]]

        def computed(x: Any) -> Any:
            return te.compute(x.shape, lambda *at: value(x(*at), *numbers), name)

        return builder.call_te(computed, call.args[0], primfunc_name_hint=name)

    return _of_floats(legalize)


def _relu(x: Any) -> Any:
    zero = tirx.const(0, x.ty.dtype)
    return tirx.Select(x < zero, zero, x)


def _sign(x: Any) -> Any:
    zero, one = tirx.const(0, x.ty.dtype), tirx.const(1, x.ty.dtype)
    return tirx.Select(x > zero, one, tirx.Select(x < zero, -one, x))


def _clip(x: Any, low: Any, high: Any) -> Any:
    return tirx.Select(x < low, low, tirx.Select(x > high, high, x))


_UNROLLED = 32
"""Elements of a window that are one expression, which LLVM makes vectors of, where windows lie side by side and sizes
are free: as steps of a reduction each would find its place by divisions."""


def _max_pool(builder: Any, call: Any) -> Any:
    attrs = call.attrs
    if attrs.layout != attrs.out_layout or str(attrs.layout) not in ("NCW", "NCHW", "NCDHW"):
        return call.op.get_attr("FLegalize")(builder, call)
    window, strides, dilations = (list(map(int, one)) for one in (attrs.pool_size, attrs.strides, attrs.dilation))
    before = [int(n) for n in attrs.padding][: len(window)]
    shape = call.ty.shape.values
    is_free = not all(isinstance(size, tirx.IntImm) for size in shape[2:])
    is_unrolled = is_free and set(strides) == {1} and math.prod(window) <= _UNROLLED

    def element(x: Any, at: Sequence[Any], steps: Sequence[Any]) -> Any:
        places = [
            i * stride + step * dilation - pad
            for i, stride, step, dilation, pad in zip(at[2:], strides, steps, dilations, before, strict=True)
        ]
        inside = [tirx.all(p >= 0, p < n) for p, n in zip(places, x.shape[2:], strict=True)]
        lowest = tirx.const(-float("inf"), x.dtype)
        return tirx.if_then_else(tirx.all(*inside), x(*at[:2], *places), lowest)

    def computed(x: Any) -> Any:
        kind = str(x.dtype)
        if is_unrolled:
            every = list(itertools.product(*map(range, window)))
            return te.compute(
                tuple(shape), lambda *at: largest_of([element(x, at, steps) for steps in every], kind), "extreme"
            )
        axes = [te.reduce_axis((0, n), f"k{i}") for i, n in enumerate(window)]
        return largest(tuple(shape), lambda *at: element(x, at, axes), axes, kind)

    return builder.call_te(computed, call.args[0], primfunc_name_hint=str(call.op.name).rpartition(".")[2])


EDGES: dict[str, Legalize] = {
    "relax.clip": _elementwise(_clip, "clip"),
    "relax.max": _along_axes(largest, "max"),
    "relax.maximum": _of_two(larger, "maximum"),
    "relax.min": _along_axes(smallest, "min"),
    "relax.minimum": _of_two(smaller, "minimum"),
    **{f"relax.nn.max_pool{rank}d": _of_floats(_max_pool) for rank in (1, 2, 3)},
    "relax.nn.relu": _elementwise(_relu, "relu"),
    "relax.sign": _elementwise(_sign, "sign"),
}
"""By operator of Relax."""

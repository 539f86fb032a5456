"""Reductions over axes that a call chooses: a loop over all axes, of which those that are not reduced have one step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax, te, tirx

from mhsa_compile.frontend.relax.sizes.broadcasting import dims_of
from mhsa_compile.frontend.relax.sizes.call_checks import Entry
from mhsa_compile.frontend.relax.sizes.size_values import SizeNames, as_tensor, emitted, is_known, literal, number
from mhsa_compile.kernels.interface.extremes import largest, smallest

REDUCTIONS = ("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
              "ReduceProd", "ReduceSum", "ReduceSumSquare")  # fmt: skip
_FLOATING = ("ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean")
_NARROW = ("float16", "bfloat16")


def reduce_by_call(bb: Any, names: SizeNames, op_name: str, inputs: list[Any], attributes: dict[str, Any]) -> Any:
    """A Reduce* whose axes are known by the call alone; None where they are known before. Raises ModelError."""
    data, axes = (*(as_tensor(bb, value) for value in inputs), None)[:2]
    if axes is None or isinstance(axes, tvm.ir.GenericConst) or is_known(inputs[1]):
        return None
    dims, count = dims_of(data), dims_of(axes)
    if dims is None or count is None or len(count) != 1:
        raise names.checks.unknown("data of known rank, and a list of axes")
    if number(count[0]) == 0:
        return None
    kind = str(data.ty.dtype)
    if op_name in _FLOATING and not kind.startswith(("float", "bfloat")):
        raise names.checks.unknown("floating numbers, or constant axes")
    keepdims = bool(attributes.get("keepdims", 1))
    if not keepdims and number(count[0]) is None:
        raise names.checks.unknown("a fixed number of axes, or keepdims=1")
    over = _axes(bb, names, axes, len(dims), count[0], all_of_none=not attributes.get("noop_with_empty_axes", 0))
    reduction = _Reduction(bb, names, data, dims, over)
    result = reduction.of(op_name)
    return result if keepdims else reduction.without_axes(result, len(dims) - int(number(count[0]) or 0))


def _axes(bb: Any, names: SizeNames, axes: Any, rank: int, count: Entry, *, all_of_none: bool) -> list[Entry]:
    """For each axis 1 where a list of axes holds it, else 0. A call with others in the list, or twice one, ends."""

    def mentions(axes: Any) -> Any:
        place = te.reduce_axis((0, axes.shape[0]), "place")

        def times(axis: Any) -> Any:
            own = tirx.any(axes[place] == axis, axes[place] == axis - rank)
            return te.sum(own.astype("int64"), axis=place)

        return te.compute((max(rank, 1),), times, "mentions")

    times = names.of_tensor(emitted(bb, mentions, axes, name="axes"), max(rank, 1))[:rank]
    once = [time <= 1 for time in times] + [sum(times, start=literal(0)) >= count]
    span = f"axes from {-rank} to {rank - 1}, each once" if rank else "no axes of a scalar"
    names.checks.hold(tirx.all(*once), span, axes)
    none = literal(int(all_of_none))
    return [names.size(tirx.Select(count > 0, time, none)) if number(count) is None else time for time in times]


class _Reduction:
    """Data and which of its axes are reduced: `over` holds 1 for those."""

    def __init__(self, bb: Any, names: SizeNames, data: Any, dims: Sequence[Entry], over: Sequence[Entry]) -> None:
        self._bb, self._names, self._data, self._over = bb, names, data, over
        pairs, one = list(zip(over, dims, strict=True)), literal(1)
        self._shape = names.shape([tirx.Select(axis > 0, one, size) for axis, size in pairs])
        self._extents = names.shape([tirx.Select(axis > 0, size, one) for axis, size in pairs])
        self._own = list(dims)
        self._kind = str(data.ty.dtype)
        self._wide = "float32" if self._kind in _NARROW else "uint8" if self._kind == "bool" else self._kind

    def of(self, op_name: str) -> Any:
        """The value of a Reduce* of ONNX's, with every axis kept, those that are reduced with one element."""

        def reduction(data: Any, shape: list[Any], extents: list[Any]) -> Any:
            result = self._stages(op_name, data, tuple(shape), extents)
            return te.compute(tuple(shape), lambda *at: result(*at).astype(self._kind), "narrowed")

        return emitted(self._bb, reduction, self._data, self._shape, self._extents, name="reduction")

    def _stages(self, op_name: str, data: Any, shape: tuple[Any, ...], extents: Sequence[Any]) -> Any:
        wide = self._wide

        def steps() -> list[Any]:
            return [te.reduce_axis((0, extent), f"step{i}") for i, extent in enumerate(extents)]

        def element(at: Sequence[Any], steps: Sequence[Any]) -> Any:
            return data(*(i + step for i, step in zip(at, steps, strict=True))).astype(wide)

        def reduce(value: Callable[..., Any], combine: Callable[..., Any] = te.sum) -> Any:
            """A tensor of sums, or products, of what `value` makes of a place and a step."""
            axes = steps()
            if not axes:
                return te.compute(shape, lambda *at: value(at, ()), "scalar")
            return te.compute(shape, lambda *at: combine(value(at, axes), axis=axes), "reduction")

        def each(values: Any, function: Callable[[Any], Any]) -> Any:
            return te.compute(shape, lambda *at: function(values(*at)), "elements")

        def squares(at: Sequence[Any], steps: Sequence[Any]) -> Any:
            return element(at, steps) * element(at, steps)

        if op_name in ("ReduceMax", "ReduceMin"):
            axes = steps()
            extreme = largest if op_name == "ReduceMax" else smallest
            return extreme(shape, lambda *at: element(at, axes), axes, wide)
        if op_name == "ReduceLogSumExp":
            axes = steps()
            highest = largest(shape, lambda *at: element(at, axes), axes, wide)
            infinity, zero = tirx.const(float("inf"), wide), tirx.const(0, wide)
            offset = each(highest, lambda x: tirx.Select(tirx.abs(x) < infinity, x, zero))
            sums = reduce(lambda at, steps: tirx.exp(element(at, steps) - offset(*at)))
            return te.compute(shape, lambda *at: tirx.log(sums(*at)) + offset(*at), "logarithm")
        if op_name == "ReduceMean":
            count = functools.reduce(operator.mul, (extent.astype(wide) for extent in extents), tirx.const(1, wide))
            return each(reduce(element), lambda x: x / count)
        if op_name == "ReduceL1":
            return reduce(lambda at, steps: tirx.abs(element(at, steps)))
        if op_name == "ReduceL2":
            return each(reduce(squares), tirx.sqrt)
        if op_name == "ReduceLogSum":
            return each(reduce(element), tirx.log)
        if op_name == "ReduceProd":
            return reduce(element, _product)
        return reduce(squares if op_name == "ReduceSumSquare" else element)

    def without_axes(self, result: Any, rank: int) -> Any:
        """A result without its axes that were reduced, `rank` of them left."""
        sizes: list[Entry] = []
        for place in range(rank):
            size, before = literal(0), literal(0)
            for axis, own in zip(self._over, self._own, strict=True):
                size = size + tirx.Select(tirx.all(axis == 0, before == place), own, literal(0))
                before = before + (1 - axis)
            sizes.append(size)
        shape = self._names.shape(sizes)
        return self._bb.normalize(relax.op.reshape(result, relax.ShapeExpr(shape)))


_product = te.comm_reducer(lambda one, other: one * other, lambda dtype: tirx.const(1, dtype), name="product")

"""Operators whose result has a shape that the graph computes: Reshape, Expand, Slice, Pad, Range, Tile and others.

Each declines with None where nothing of it is computed: the other converters know those forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax.frontend.onnx.onnx_frontend import get_numpy

from mhsa_compile.frontend.relax.sizes.broadcasting import broadcast_dims, dims_of, spread
from mhsa_compile.frontend.relax.sizes.call_checks import Entry
from mhsa_compile.frontend.relax.sizes.grids import affine_grid, nonzero, one_hot
from mhsa_compile.frontend.relax.sizes.reductions import REDUCTIONS, reduce_by_call
from mhsa_compile.frontend.relax.sizes.resizing import resize
from mhsa_compile.frontend.relax.sizes.size_values import (
    SizeNames,
    SizeValues,
    as_tensor,
    ceil_div,
    emitted,
    entries_of,
    equals,
    is_fixed,
    is_known,
    literal,
    number,
    product,
)
from mhsa_compile.frontend.relax.values import is_constant, text_of


class ShapeOperators:
    """The converters of operators that read sizes; `names` are the sizes that are computed in the graph."""

    def __init__(self, bb: Any, names: SizeNames) -> None:
        self._bb, self._names = bb, names
        self._converters: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
            **{name: partial(reduce_by_call, bb, names, name) for name in REDUCTIONS},
            "AffineGrid": partial(affine_grid, bb, names),
            "ConstantOfShape": self._fill,
            "Expand": self._expand,
            "NonZero": partial(nonzero, bb, names),
            "OneHot": partial(one_hot, bb, names),
            "Pad": self._pad,
            "Range": self._range,
            "Reshape": self._reshape,
            "Resize": self._resize,
            "Slice": self._slice,
            "Split": self._split,
            "Tile": self._tile,
            "TopK": self._largest,
            "Trilu": self._triangle,
        }

    def convert(self, op_name: str, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        """The operator's result, None where it reads no sizes that the graph computes."""
        converter = self._converters.get(op_name)
        return None if converter is None else converter(inputs, attributes)

    def _stated(self, value: Any, expected: str) -> list[Entry]:
        """The elements of a list of whole numbers. Raises ModelError where there is no telling how many they are."""
        entries = self._entries(value)
        if entries is None:
            raise self._names.checks.unknown(expected)
        return entries

    def _entries(self, value: Any) -> list[Entry] | None:
        """The elements of a list of whole numbers: followed sizes, constants, or what a call computes."""
        if value is None:
            return None
        sizes = entries_of(value)
        if sizes is not None:
            return [entry.astype("int64") for entry in sizes.entries.reshape(-1)]
        count = _count(value)
        if count is None or not str(value.ty.dtype).startswith("int"):
            return None
        return self._names.of_tensor(value, count)

    def _reshape(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, target = as_tensor(self._bb, inputs[0]), inputs[1]
        constant, dims = is_fixed(target), dims_of(data)
        if constant and (dims is None or all(number(size) is not None for size in dims)):
            return None
        entries = self._entries(target)
        if entries is None or dims is None:
            raise self._names.checks.unknown("a target of known length, and dims of its data")
        of_call = [number(size) is None and not self._names.at_least(size, 0) for size in entries]
        if any(of_call):
            result = self._resolve_target(dims, entries, of_call, target, attributes)
        else:
            result = [self._target_size(dims, i, size, attributes) for i, size in enumerate(entries)]
            free = next((i for i, size in enumerate(result) if number(size) == -1), None)
            if free is not None:
                result[free] = self._quotient(dims, [size for i, size in enumerate(result) if i != free])
        fits = self._names.same(product(result), product(dims))
        if constant and fits:
            return None
        shape = self._names.shape(result)
        if not fits:  # a view of fewer elements, or of more, would be one without a word
            whole = equals(product(dims), product(shape))
            self._names.checks.hold(whole, "a shape of as many elements as its data has", target)
        return self._bb.normalize(relax.op.reshape(data, relax.ShapeExpr(shape)))

    def _target_size(self, dims: Sequence[Entry], place: int, size: Entry, attributes: dict[str, Any]) -> Entry:
        """A size of a Reshape's target; 0, unless it is one, is that of the data."""
        if attributes.get("allowzero", 0) or number(size) not in (0, None) or place >= len(dims):
            return size
        if number(size) == 0:
            return dims[place]
        is_size = self._names.at_least(size, 0)  # the size of something, which is 0 where that is
        return size if is_size else tirx.Select(equals(size, literal(0)), dims[place], size)

    def _resolve_target(
        self, dims: Sequence[Entry], entries: Sequence[Entry], of_call: Sequence[bool], target: Any, attributes: Any
    ) -> list[Entry]:
        """The target of a Reshape that a call states: any of its sizes may be 0, and one -1."""
        sizes = [self._target_size(dims, i, size, attributes) for i, size in enumerate(entries)]
        open_ends = [equals(size, literal(-1)) for size in entries]
        plain = [tirx.Select(end, literal(1), size) for end, size in zip(open_ends, sizes, strict=True)]
        count = sum((end.astype("int64") for end in open_ends), start=literal(0))
        least = [size >= -1 for size, own in zip(entries, of_call, strict=True) if own]
        self._names.checks.hold(tirx.all(count <= 1, *least), "sizes of 0 or more, and -1 once at most", target)
        rest = tirx.floordiv(product(dims), tirx.max(product(plain), literal(1)))
        return [tirx.Select(end, rest, size) for end, size in zip(open_ends, sizes, strict=True)]

    def _quotient(self, dims: Sequence[Entry], others: Sequence[Entry]) -> Entry:
        """What is left of a product of sizes: factors of both go first."""
        above, below = list(dims), []
        for size in others:
            same = next((i for i, other in enumerate(above) if self._names.same(size, other)), None)
            if same is None:
                below.append(size)
            else:
                above.pop(same)
        whole, part = self._names.simplify(product(above)), self._names.simplify(product(below))
        if number(part) == 1:
            return whole
        if number(part) is None:  # no division by an axis without elements
            part = tirx.max(part, literal(1))
        return tirx.floordiv(whole, part)

    def _expand(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, target = as_tensor(self._bb, inputs[0]), inputs[1]
        if is_fixed(target):
            return None
        entries, dims = self._entries(target), dims_of(data)
        if entries is None or dims is None:
            raise self._names.checks.unknown("a shape of known length")
        shape = broadcast_dims(self._names, [dims, self._names.shape(entries)])
        return spread(self._bb, self._names, data, shape)

    def _fill(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        if is_fixed(inputs[0]):
            return None
        shape = self._stated(inputs[0], "a shape of known length")
        self._hold_sizes(shape, inputs[0])
        value = get_numpy(attributes["value"]).reshape(-1)[0] if "value" in attributes else None
        kind = "float32" if value is None else str(value.dtype)
        fill = relax.const(0.0 if value is None else value, kind)
        return self._bb.normalize(relax.op.full(relax.ShapeExpr(self._names.shape(shape)), fill, kind))

    def _range(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        if not any(isinstance(value, SizeValues) for value in inputs):
            kinds = {str(value.ty.dtype) for value in inputs}
            if all(map(is_constant, inputs)) or not kinds <= {"int64", "int32", "float32", "float64"}:
                return None
        sizes = [entries_of(value) for value in inputs]
        kind = next(size.dtype if size else str(v.ty.dtype) for size, v in zip(sizes, inputs, strict=True))
        bounds: list[Any] = []
        for value, size in zip(inputs, sizes, strict=True):
            if size is None and not kind.startswith("int"):
                return self._range_of_tensors(inputs, kind)
            bounds.append(self._names.of_tensor(value, 1)[0] if size is None else size.entries.reshape(-1)[0])
        start, end, step = bounds
        if kind.startswith("int"):
            start, end, step = (bound.astype("int64") for bound in bounds)
            if number(step) == 0:
                raise self._names.checks.unknown("a delta other than 0")
            self._names.checks.hold(_not_zero(step), "a delta other than 0", inputs[2])
            count = self._steps(start, end, step)
        else:
            count = tirx.ceil((end - start).astype("float64") / step.astype("float64")).astype("int64")
        least = count if kind.startswith("int") and self._names.at_least(count, 0) else tirx.max(count, literal(0))
        length = self._names.size(least)
        if number(start) is not None and number(step) is not None and kind.startswith("int"):
            first, each = int(number(start) or 0), int(number(step) or 0)
            if number(length) is None and (first, each) == (0, 1):
                return self._bb.normalize(relax.op.arange(0, length, 1, kind))
        if kind.startswith("int"):
            start, step = map(self._names.size, (start, step))

        def ascending(length: Any, start: Any, step: Any) -> Any:
            return te.compute((length,), lambda i: (start + i.astype(str(start.ty.dtype)) * step).astype(kind), "range")

        return emitted(self._bb, ascending, length, start, step, name="range")

    def _range_of_tensors(self, inputs: list[Any], kind: str) -> Any:
        """Range of floats of which a call brings some, or by a delta that it brings."""
        bounds = [self._bb.normalize(relax.op.reshape(as_tensor(self._bb, value), [1])) for value in inputs]

        def steps(start: Any, end: Any, step: Any) -> Any:
            def count(i: Any) -> Any:
                wide = [bound[i].astype("float64") for bound in (start, end, step)]
                return tirx.max(tirx.ceil((wide[1] - wide[0]) / wide[2]), tirx.const(0, "float64")).astype("int64")

            return te.compute((1,), count, "steps")

        length = self._names.of_tensor(emitted(self._bb, steps, *bounds, name="steps"), 1)[0]

        def ascending(length: Any, start: Any, end: Any, step: Any) -> Any:
            return te.compute((length,), lambda i: start[0] + i.astype(kind) * step[0], "range")

        return emitted(self._bb, ascending, length, *bounds, name="range")

    def _tile(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, repeats = as_tensor(self._bb, inputs[0]), inputs[1]
        dims = dims_of(data)
        if is_fixed(repeats) or dims is None:
            return None
        times = self._entries(repeats)
        if times is None or len(times) != len(dims):
            raise self._names.checks.unknown("repeats of known length")
        self._hold_sizes(times, repeats)
        shape = self._names.shape([size * count for size, count in zip(dims, times, strict=True)])

        def tile(data: Any, shape: list[Any]) -> Any:
            return te.compute(
                shape, lambda *at: data[tuple(i % n for i, n in zip(at, data.shape, strict=True))], "tile"
            )

        return emitted(self._bb, tile, data, shape, name="tile")

    def _slice(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, starts, ends, axes, steps = (*inputs, None, None)[:5]
        data = as_tensor(self._bb, data)
        dims = dims_of(data)
        constant = all(map(is_constant, (starts, ends)))
        if dims is None:
            return None
        fixed = steps is None or all(number(size) is not None for size in dims)
        if constant and (fixed or all(number(step) == 1 for step in self._entries(steps) or ())):
            return None
        begin, end = self._entries(starts), self._entries(ends)
        strides = None if steps is None else self._entries(steps)
        along = None if axes is None else self._entries(axes)
        if begin is None or end is None or (steps is not None and strides is None):
            raise self._names.checks.unknown("bounds of known number")
        cuts = self._cuts(dims, (begin, end, strides or [literal(1)] * len(begin)), along, axes)
        if cuts is None:
            raise self._names.checks.unknown("as many axes as bounds, each once")
        self._names.checks.hold(tirx.all(*[_not_zero(step) for _, _, step in cuts]), "steps other than 0", steps)
        parts = [self._cut(size, *cut) for size, cut in zip(dims, cuts, strict=True)]
        shape = self._names.shape([length for _, length in parts])
        first = [self._names.size(start) for start, _ in parts]
        step = [by if number(by) is not None else self._names.size(_bound_step(by)) for _, _, by in cuts]
        return self._part(data, shape, first, step)

    def _cuts(
        self, dims: Sequence[Entry], bounds: Sequence[Sequence[Entry]], along: Sequence[Entry] | None, axes: Any
    ) -> list[tuple[Entry, Entry, Entry]] | None:
        """(start, end, step) of each axis, None where the axes are none of these dims; the whole axis of those that
        nobody cuts. A call whose axes are no such ends."""
        rank = len(dims)
        whole = [(literal(0), size, literal(1)) for size in dims]
        cuts = list(zip(*bounds, strict=True))
        places = list(range(len(cuts))) if along is None else [number(axis) for axis in along]
        if len(places) != len(cuts) or len(cuts) > rank:
            return None
        if None not in places:
            own = [int(place or 0) + (rank if int(place or 0) < 0 else 0) for place in places]
            if len(set(own)) < len(own) or any(not 0 <= place < rank for place in own):
                return None
            return [cuts[own.index(axis)] if axis in own else whole[axis] for axis in range(rank)]
        assert along is not None
        self._hold_axes(along, rank, axes)
        for place in range(rank):
            for axis, cut in zip(along, cuts, strict=True):
                here = _is_axis(axis, place, rank) > 0
                one, other, by = (tirx.Select(here, *pair) for pair in zip(cut, whole[place], strict=True))
                whole[place] = (one, other, by)
        entries = iter(self._names.opaque([bound for cut in whole for bound in cut]))
        return list(zip(entries, entries, entries, strict=True))

    def _part(self, data: Any, shape: list[Any], first: list[Any], step: Sequence[Any]) -> Any:
        def part(data: Any, shape: list[Any], first: list[Any], step: list[Any]) -> Any:
            def element(*at: Any) -> Any:
                return data[tuple(start + i * n for i, start, n in zip(at, first, step, strict=True))]

            return te.compute(tuple(shape), element, "slice")

        return emitted(self._bb, part, data, shape, first, [literal(by) for by in step], name="slice")

    def _cut(self, size: Entry, start: Entry, end: Entry, step: Entry) -> tuple[Entry, Entry]:
        """(the first element, how many) of an axis that is cut as ONNX says."""
        forwards = number(step)
        if forwards is None:
            ways = [self._cut_one_way(size, start, end, step, up=up) for up in (True, False)]
            first, length = (tirx.Select(step > 0, *pair) for pair in zip(*ways, strict=True))
            cut = self._names.opaque([first, tirx.max(length, literal(0))])
            return cut[0], cut[1]
        begin, length = self._cut_one_way(size, start, end, step, up=forwards > 0)
        return begin, length if self._names.at_least(length, 0) else tirx.max(length, literal(0))

    def _cut_one_way(self, size: Entry, start: Entry, end: Entry, step: Entry, *, up: bool) -> tuple[Entry, Entry]:
        highest = size if up else size - 1
        begin = self._within(self._from_end(start, size), literal(0), highest)
        stop = self._within(self._from_end(end, size), literal(0 if up else -1), highest)
        return begin, self._steps(begin, stop, step, up=up)

    def _steps(self, start: Entry, end: Entry, step: Entry, up: bool | None = None) -> Entry:
        """How many steps lead from a start to an end, which they do not reach; below 0 where they lead away."""
        by = number(step)
        if by is not None:
            return ceil_div(end - start if by > 0 else start - end, abs(int(by)))
        upwards = _ceil_div_by(end - start, _bound_step(step))
        downwards = _ceil_div_by(start - end, -_bound_step(step))
        return tirx.Select(step > 0, upwards, downwards) if up is None else upwards if up else downwards

    def _from_end(self, place: Entry, size: Entry) -> Entry:
        value = number(place)
        if value is not None:
            return place if value >= 0 else size + place
        if self._names.at_least(place, 0):
            return place
        return size + place if self._names.at_least(-1, place) else tirx.Select(place < 0, size + place, place)

    def _within(self, place: Entry, low: Entry, high: Entry) -> Entry:
        place = self._names.simplify(place)
        if not self._names.at_least(place, low):
            place = tirx.max(place, low)
        return place if self._names.at_least(high, place) else tirx.min(place, high)

    def _split(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, lengths = as_tensor(self._bb, inputs[0]), inputs[1] if len(inputs) > 1 else None
        dims = dims_of(data)
        if dims is None:
            return None
        axis = attributes.get("axis", 0) % len(dims)
        if lengths is None:
            if number(dims[axis]) is not None:
                return None
            count = attributes["tvm_custom"]["num_outputs"]
            each = ceil_div(dims[axis], count)
            parts = [each] * (count - 1) + [dims[axis] - each * (count - 1)]
        elif is_fixed(lengths) and number(dims[axis]) is not None:
            return None
        else:
            parts = self._stated(lengths, "a known number of lengths")
            total = sum(parts, start=literal(0))
            if not self._names.same(total, dims[axis]):
                self._names.checks.hold(equals(total, dims[axis]), "lengths that make up the axis", lengths)
            self._hold_sizes(parts, lengths)
        results, offset = [], literal(0)
        for length in parts:
            shape, first = list(dims), [literal(0)] * len(dims)
            shape[axis], first[axis] = self._names.size(length), self._names.size(offset)
            results.append(self._part(data, shape, first, [1] * len(dims)))
            offset = offset + length
        return results[0] if len(results) == 1 else relax.Tuple(results)

    def _pad(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, pads, value, axes = (*inputs, None, None)[:4]
        data = as_tensor(self._bb, data)
        dims = dims_of(data)
        if is_fixed(pads) or dims is None:
            return None
        amounts = self._entries(pads)
        along = None if axes is None else self._entries(axes)
        count, rank = len(amounts or ()) // 2, len(dims)
        if amounts is None or (axes is not None and along is None) or count != len(dims if along is None else along):
            raise self._names.checks.unknown("a known number of pads, two for each axis")
        around = self._around(rank, list(zip(amounts[:count], amounts[count:], strict=True)), along, axes)
        before = [self._names.size(one) for one, _ in around]
        sizes = [size + one + other for size, (one, other) in zip(dims, around, strict=True)]
        self._hold_sizes(sizes, pads)
        shape = self._names.shape(sizes)
        return self._surround(data, value, shape, before, text_of(attributes.get("mode", "constant")))

    def _around(
        self, rank: int, pairs: Sequence[tuple[Entry, Entry]], along: Sequence[Entry] | None, axes: Any
    ) -> list[tuple[Entry, Entry]]:
        """(before, behind) of each axis; a call whose axes there are not ends."""
        if along is None:
            return list(pairs)
        self._hold_axes(along, rank, axes)
        result = []
        for place in range(rank):
            meant = [_is_axis(axis, place, rank) for axis in along]
            ends = [sum((is_it * pair[end] for is_it, pair in zip(meant, pairs, strict=True)), start=literal(0))
                    for end in range(2)]  # fmt: skip
            result.append((self._names.simplify(ends[0]), self._names.simplify(ends[1])))
        return result

    def _hold_axes(self, along: Sequence[Entry], rank: int, value: Any) -> None:
        """Ends a call in which these are no axes of so many, or one of them stands twice."""
        times = [sum((_is_axis(axis, place, rank) for axis in along), start=literal(0)) for place in range(rank)]
        once = tirx.all(*[time <= 1 for time in times], equals(sum(times, start=literal(0)), literal(len(along))))
        self._names.checks.hold(once, f"axes from {-rank} to {rank - 1}, each once", value)

    def _hold_sizes(self, entries: Sequence[Entry], value: Any) -> None:
        """Ends a call in which some of these are below 0."""
        below = [entry for entry in entries if not self._names.at_least(entry, 0)]
        if below:
            self._names.checks.hold(tirx.all(*[entry >= 0 for entry in below]), "sizes of 0 or more", value)

    def _surround(self, data: Any, value: Any, shape: Sequence[Any], before: Sequence[Any], mode: str) -> Any:
        kind = str(data.ty.dtype)

        def pad(data: Any, shape: list[Any], before: list[Any], *fill: Any) -> Any:
            def element(*at: Any) -> Any:
                places = [i - start for i, start in zip(at, before, strict=True)]
                if mode != "constant":
                    return data[tuple(_inside(p, n, mode) for p, n in zip(places, data.shape, strict=True))]
                inside = tirx.all(*[tirx.all(p >= 0, p < n) for p, n in zip(places, data.shape, strict=True)])
                return tirx.if_then_else(inside, data[tuple(places)], fill[0][()] if fill else tirx.const(0, kind))

            return te.compute(tuple(shape), element, "pad")

        fill: list[Any] = []
        if value is not None and mode == "constant":
            scalar = as_tensor(self._bb, value)
            fill.append(scalar if scalar.ty.ndim == 0 else self._bb.normalize(relax.op.reshape(scalar, [])))
        return emitted(self._bb, pad, data, list(shape), list(before), *fill, name="pad")

    def _largest(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, count = as_tensor(self._bb, inputs[0]), inputs[1]
        dims = dims_of(data)
        if is_fixed(count) or dims is None:
            return None
        axis, entries = attributes.get("axis", -1) % len(dims), self._stated(count, "one number of elements")
        largest = bool(attributes.get("largest", 1))
        top_k = self._bb.emit(relax.op.topk(data, -1, axis, ret_type="both", largest=largest, dtype="int64"))
        if not self._names.at_least(dims[axis], entries[0]):
            self._names.checks.hold(entries[0] <= dims[axis], "no more elements than the axis has", count)
        self._hold_sizes(entries[:1], count)
        shape = list(dims)
        shape[axis] = self._names.size(entries[0])
        first, step = [literal(0)] * len(dims), [1] * len(dims)
        parts = [self._bb.emit(relax.TupleGetItem(top_k, i)) for i in range(2)]
        return relax.Tuple([self._part(part, shape, first, step) for part in parts])

    def _triangle(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, diagonal = as_tensor(self._bb, inputs[0]), inputs[1] if len(inputs) > 1 else None
        dims = dims_of(data)
        if not isinstance(diagonal, SizeValues) or is_known(diagonal) or dims is None:
            return None
        shift, upper = self._names.size(diagonal.entries.reshape(-1)[0]), attributes.get("upper", 1)

        def triangle(data: Any, shift: Any) -> Any:
            def element(*at: Any) -> Any:
                i, j = at[-2:]
                inside = j >= i + shift if upper else j <= i + shift
                return tirx.Select(inside, data[at], tirx.const(0, data.dtype))

            return te.compute(data.shape, element, "triangle")

        return emitted(self._bb, triangle, data, shift, name="trilu")

    def _resize(self, inputs: list[Any], attributes: dict[str, Any]) -> Any:
        data, _, scales, target = (*inputs, None, None, None)[:4]
        data = as_tensor(self._bb, data)
        dims = dims_of(data)
        if dims is None:
            return None
        if target is None:
            factors = None if scales is None else entries_of(scales)
            if factors is None:
                return None
            by = [number(f) for f in factors.entries.reshape(-1)]
            if all(number(dim) is not None for dim in dims) and None not in by:
                whole = all(float(number(d) or 0) * float(f or 0) % 1 == 0 for d, f in zip(dims, by, strict=True))
                if whole and all(f == 1 for f in by[:2]):
                    return None
            sizes = [
                dim if number(f) == 1 else tirx.floor(dim.astype("float32") * f).astype("int64")
                for dim, f in zip(dims, factors.entries.reshape(-1), strict=True)
            ]
            return resize(self._bb, data, self._names.shape(sizes), list(factors.entries.reshape(-1)), attributes)
        if is_constant(target) and all(number(dim) is not None for dim in dims):
            return None
        entries = self._entries(target)
        if entries is None or len(entries) != len(dims):
            raise self._names.checks.unknown("sizes for each axis")
        self._hold_sizes(entries, target)
        return resize(self._bb, data, self._names.shape(entries), None, attributes)


def _not_zero(step: Entry) -> Entry:
    return tirx.any(step > 0, step < 0)


def _is_axis(axis: Entry, place: int, rank: int) -> Entry:
    """1 where an axis, which may be counted from the end, is this one; else 0."""
    value = number(axis)
    if value is not None:
        return literal(int(value in (place, place - rank)))
    return tirx.any(equals(axis, literal(place)), equals(axis, literal(place - rank))).astype("int64")


def _bound_step(step: Entry) -> Entry:
    """A step, or one as good: beyond every axis, and of numbers that sums can hold."""
    return tirx.max(tirx.min(step, literal(_FAR)), literal(-_FAR))


_FAR = 1 << 40


def _ceil_div_by(distance: Entry, step: Entry) -> Entry:
    """The distance in steps, rounded up; of steps of 0, or backwards, no value that means anything."""
    step = tirx.max(step, literal(1))
    return tirx.floordiv(distance + step - 1, step)


def _inside(place: Any, size: Any, mode: str) -> Any:
    if mode == "edge":
        return tirx.max(tirx.min(place, size - 1), literal(0))
    if mode == "wrap":
        return tirx.floormod(place, tirx.max(size, literal(1)))
    period = tirx.max(2 * (size - 1), literal(1))  # back and forth, without the ends twice
    around = tirx.floormod(place, period)
    return tirx.min(around, tirx.max(2 * (size - 1) - around, literal(0)))


def _count(value: Any) -> int | None:
    """How many elements a value has, where that is a number."""
    dims = dims_of(value)
    total = None if dims is None else number(tvm.sym.Analyzer().simplify(product(dims)))
    return None if total is None else int(total)

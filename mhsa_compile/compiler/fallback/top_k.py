"""The k largest or smallest numbers along an axis, in order, on a CPU: the earlier of equals first, NaN the largest.

TVM's calls a function of a library that neither `mhsa.load` nor a bundle brings, and sorts by a comparison that NaN
makes contradict itself. Here the best so far are a heap in the results, whose root is the worst of them: of n numbers
each costs log k steps at most, and one comparison mostly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.compiler.fallback.plain_function import FunctionSizes, flat, plain_function, product
from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.cpu.simd.vectors import each_task, materialize
from mhsa_compile.kernels.interface.extremes import is_nan

_NARROW = ("bfloat16", "float16")


def call_of(builder: Any, call: Any) -> Any:
    """A call of relax.topk as one of a function of ours."""
    (x,), attributes, kinds = call.args, call.attrs, call.ty
    both = isinstance(kinds, relax.TupleType)
    values = kinds.fields[0] if both else kinds
    axis = int(attributes.axis) % x.ty.ndim
    number = str(attributes.dtype)
    result_shape = [relax.TensorType(values.shape, kind) for kind in (x.ty.dtype, number)]
    function = _function(x.ty, values.shape.values[axis], axis, number, bool(attributes.largest))
    results = builder.emit(relax.call_tir(builder.add_func(function, "top_k"), [x], result_shape))
    return results if both else relax.TupleGetItem(results, int(str(attributes.ret_type) == "indices"))


def _function(x: Any, k: Expr, axis: int, number: str, largest: bool) -> Any:
    """The function of an array of type x that writes its k best along an axis, and their places."""
    shape = list(map(FunctionSizes(), x.shape.values))
    count = T.int64(int(k.value)) if isinstance(k, tvm.tirx.IntImm) else tvm.tirx.Var("k", "int64")
    result_shape = [*shape[:axis], count, *shape[axis + 1 :]]
    before, behind = product(shape[:axis]), product(shape[axis + 1 :])

    def body() -> None:
        kinds = {"x": (shape, str(x.dtype)), "values": (result_shape, str(x.dtype)), "places": (result_shape, number)}
        source, values, places = map(flat, [argument(name, *kind) for name, kind in kinds.items()])
        step = materialize(behind)

        def row(task: Expr) -> None:
            first, along = materialize(T.truncdiv(task, step)), materialize(T.truncmod(task, step))
            begin = materialize(first * shape[axis] * step + along)
            heap = _Heap(values, places, materialize(first * count * step + along), step, largest)
            heap.select(lambda i: source[begin + i * step], shape[axis], count)

        each_task(before * behind, shape[axis], row)

    return plain_function("top_k", body)


@dataclass(frozen=True)
class _Heap:
    """Numbers with their places, `step` elements apart from `first` on, none better than the one above it."""

    values: Expr
    places: Expr
    first: Expr
    step: Expr
    largest: bool

    def select(self, element: Any, size: Expr, count: Expr) -> None:
        """Leaves the `count` best of elements 0 .. size, in order."""
        with T.serial(count) as i:
            self._put(i, element(i), T.cast(i, self.places.dtype))
        half, rest = materialize(T.truncdiv(count, T.int64(2))), materialize(T.max(size - count, T.int64(0)))
        # The upper half is sifted down; then each of the others takes the root's place where it is better; then the
        # roots go behind what is left, the worst first.
        turns = T.Select(count > 0, half + rest + count - 1, T.int64(0))
        with T.serial(turns) as turn:
            start, end = T.alloc_buffer((1,), "int64"), T.alloc_buffer((1,), "int64")
            value, place = (T.alloc_buffer((1,), array.dtype) for array in (self.values, self.places))
            with T.If(turn < half):
                with T.Then():
                    self._load(value, place, half - 1 - turn)
                    _set(start, half - 1 - turn)
                    _set(end, count)
                with T.Else(), T.If(turn < half + rest):
                    with T.Then():
                        _set(value, element(turn - half + count))
                        _set(place, T.cast(turn - half + count, self.places.dtype))
                        _set(start, T.int64(0))
                        is_better = self._beats(value[0], self._value(T.int64(0)))
                        _set(end, T.Select(is_better, count, T.int64(-1)))
                    with T.Else():
                        last = materialize(half + rest + count - 1 - turn)
                        self._load(value, place, last)
                        self._put(last, self._value(T.int64(0)), self._place(T.int64(0)))
                        _set(start, T.int64(0))
                        _set(end, last)
            with T.If(end[0] >= 0), T.Then():
                self._sift_down(start, value[0], place[0], end[0])

    def _sift_down(self, at: Expr, value: Expr, place: Expr, count: Expr) -> None:
        """Puts a number at the place in cell `at`, or below it, among the first `count`."""
        going = T.alloc_buffer((1,), "int32")
        _set(going, T.int32(1))
        with T.While(T.And(going[0] != 0, 2 * at[0] + 1 < count)):
            left = materialize(2 * at[0] + 1)
            right = materialize(T.min(left + 1, count - 1))
            is_right = self._precedes(self._value(left), self._place(left), self._value(right), self._place(right))
            child = materialize(T.Select(is_right, right, left))
            with T.If(self._precedes(value, place, self._value(child), self._place(child))):
                with T.Then():
                    self._put(at[0], self._value(child), self._place(child))
                    _set(at, child)
                with T.Else():
                    _set(going, T.int32(0))
        self._put(at[0], value, place)

    def _load(self, value: Expr, place: Expr, i: Expr) -> None:
        _set(value, self._value(i))
        _set(place, self._place(i))

    def _precedes(self, one: Expr, its_place: Expr, other: Expr, place: Expr) -> Expr:
        in_order = T.Select(self._beats(other, one), T.bool(False), its_place < place)
        return T.Select(self._beats(one, other), T.bool(True), in_order)

    def _beats(self, one: Expr, other: Expr) -> Expr:
        larger, smaller = (one, other) if self.largest else (other, one)
        kind = str(self.values.dtype)
        if kind in _NARROW:
            larger, smaller = T.cast(larger, "float32"), T.cast(smaller, "float32")
        if not kind.startswith(("float", "bfloat")):
            return larger > smaller
        kind = "float64" if kind == "float64" else "float32"
        return T.Select(is_nan(smaller, kind), T.bool(False), T.Or(is_nan(larger, kind), larger > smaller))

    def _value(self, i: Expr) -> Expr:
        return self.values[self.first + i * self.step]

    def _place(self, i: Expr) -> Expr:
        return self.places[self.first + i * self.step]

    def _put(self, i: Expr, value: Expr, place: Expr) -> None:
        T.buffer_store(self.values, value, [self.first + i * self.step])
        T.buffer_store(self.places, place, [self.first + i * self.step])


def _set(cell: Expr, value: Expr) -> None:
    T.buffer_store(cell, value, [0])

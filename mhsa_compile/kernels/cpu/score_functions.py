"""Functions of scores on a vector CPU. What does not depend on the key or the score is computed once a task, and waits
in memory; the rest is computed with the scores.

Both kernels of attention hold their query rows in lanes: `place` says what each lane is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_emission import ScoreEmission, TracedFunction, Value
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cpu.simd import score_math
from mhsa_compile.kernels.cpu.simd.vectors import constant, load, materialize, scratch, splat, store

HIDDEN, SEEN, BROKEN = -math.inf, 0.0, math.nan
"""What a function of bools adds to scores; the last where it has no value."""


class _CpuArithmetic:
    """Steps in vectors; floats of 32 bits."""

    floating = "float32"

    def __init__(self, buffers: Sequence[Expr]) -> None:
        self.buffers = buffers
        self._flat = [
            T.decl_buffer([math.prod(buffer.shape, start=T.int64(1))], buffer.dtype, data=buffer.data,
                          elem_offset=buffer.elem_offset)
            for buffer in buffers
        ]  # fmt: skip

    def vector(self, value: Value, lanes: int) -> Value:
        if value.lanes == lanes:
            return value
        return Value(splat(value.expr, lanes), value.dtype, lanes)

    def bind(self, value: Value) -> Value:
        if value.dtype == "bool":
            return value
        return Value(materialize(value.expr, value.dtype, value.lanes), value.dtype, value.lanes)

    def function(self, op: str, x: Value) -> Expr:
        return score_math.computed(op, x.expr, x.lanes)

    def size(self, tensor: int, axis: int) -> Expr:
        return self.buffers[tensor].shape[axis]

    def element(self, tensor: int, indices: Sequence[Value]) -> Value:
        buffer, flat = self.buffers[tensor], self._flat[tensor]
        lanes = max(index.lanes for index in indices)
        place: Expr = None
        for axis, index in enumerate(indices):
            wide = T.cast(index.expr, "int64" if index.lanes == 1 else f"int64x{index.lanes}")
            wide = wide if index.lanes == lanes else splat(wide, lanes)
            place = wide if place is None else place * splat(buffer.shape[axis], lanes) + wide
        value = flat[materialize(place, "int64", lanes)]
        return Value(materialize(value, str(buffer.dtype), lanes), str(buffer.dtype), lanes)


Places = Mapping[str, Value]


class TaskFunction:
    """One function in one task. Scratch is allocated where it is constructed: inside the loop over tasks.

    slots     how many lanes of queries the task has, over all its vectors
    varying   the places that differ from lane to lane; what depends on none of them is one number for all
    """

    def __init__(self, traced: TracedFunction, slots: int, varying: frozenset[str]) -> None:
        function = self.function = traced.function
        self.emission = ScoreEmission(traced, _CpuArithmetic(traced.buffers))
        late_leaves = {"score", "kv_idx"}
        dependences = self.emission.dependences
        numbers = range(len(function.steps))
        self.early = [n for n in numbers if not dependences[n] & late_leaves]
        self.late = [n for n in numbers if dependences[n] & late_leaves]
        read_late = {arg for n in self.late for arg in function.steps[n].args} | {len(function.steps) - 1}
        # Constants stay where they are read, as numbers that LLVM knows.
        waiting = [n for n in self.early if n in read_late and function.steps[n].op != "constant"]
        self.waiting = [n for n in waiting if dependences[n] & varying]
        self.single = [n for n in waiting if not dependences[n] & varying]
        self.constants = [n for n in numbers if function.steps[n].op == "constant"]
        self.slots = slots
        self._numbers: dict[int, Value] = {}
        self._slots_of: dict[int, tuple[Expr, str]] = {}
        self._flags: Expr | None = None

    def prepare(self, slot: int, lanes: int, places: Places) -> None:
        """Computes what waits, of the lanes from `slot` on; `places` are b, h and q_idx."""
        values: dict[int, Value] = {}
        flags: list[Value] = []
        self.emission.emit(self.early, places, values, flags)
        for n in self.single:
            if n not in self._numbers:
                value = values[n]
                number = value if value.dtype == "bool" else Value(materialize(value.expr, value.dtype), value.dtype)
                self._numbers[n] = number
        for n in self.waiting:
            value = values[n]
            if n not in self._slots_of:
                dtype = "int32" if value.dtype == "bool" else value.dtype
                self._slots_of[n] = (scratch((1, self.slots), dtype), value.dtype)
            self._store(self._slots_of[n][0], slot, value, lanes)
        if flags:
            if self._flags is None:
                self._flags = scratch((1, self.slots), "int32")
            self._store(self._flags, slot, _all(flags, lanes), lanes)

    def _store(self, buffer: Expr, slot: int, value: Value, lanes: int) -> None:
        expr = value.expr if value.lanes == lanes else splat(value.expr, lanes)
        if value.dtype == "bool":
            expr = T.Select(expr, splat(T.int32(1), lanes), splat(T.int32(0), lanes))
        store(buffer, [T.int64(0), T.int64(slot)], expr, lanes)

    def _values_of_slot(self, slot: int, lanes: int) -> tuple[dict[int, Value], list[Value]]:
        values, at = dict(self._numbers), [T.int64(0), T.int64(slot)]
        self.emission.emit(self.constants, {}, values, [])
        for n, (buffer, dtype) in self._slots_of.items():
            value = load(buffer, at, lanes)
            values[n] = Value(value != splat(T.int32(0), lanes) if dtype == "bool" else value, dtype, lanes)
        flags = []
        if self._flags is not None:
            flags.append(Value(load(self._flags, at, lanes) != splat(T.int32(0), lanes), "bool", lanes))
        return values, flags

    def bias(self, slot: int, lanes: int, key: Value) -> Expr:
        """HIDDEN, SEEN or BROKEN of the lanes from `slot` on: what a function of bools says of `key`."""
        values, flags = self._values_of_slot(slot, lanes)
        self.emission.emit(self.late, {"kv_idx": key}, values, flags)
        result = values[len(self.function.steps) - 1]
        visible = result.expr if result.lanes == lanes else splat(result.expr, lanes)
        bias = T.Select(visible, constant(SEEN, lanes), constant(HIDDEN, lanes))
        return T.Select(_all(flags, lanes).expr, bias, constant(BROKEN, lanes)) if flags else bias

    def score(self, slot: int, lanes: int, key: Value, score: Expr) -> Expr:
        """What a function makes of the scores of some lanes and `key`, in units of log2 before and after."""
        values, flags = self._values_of_slot(slot, lanes)
        score = materialize(score, "float32", lanes)
        natural = Value(score * constant(math.log(2), lanes), "float32", lanes)
        self.emission.emit(self.late, {"kv_idx": key, "score": natural}, values, flags)
        result = self.emission.scaled(values, Value(score, "float32", lanes), LOG2_E, lanes)
        return T.Select(_all(flags, lanes).expr, result, constant(BROKEN, lanes)) if flags else result


def _all(flags: Sequence[Value], lanes: int) -> Value:
    """Whether all flags hold."""
    whole = None
    for flag in flags:
        expr = flag.expr if flag.lanes == lanes else splat(flag.expr, lanes)
        whole = expr if whole is None else T.And(whole, expr)
    return Value(whole, "bool", lanes)


def number(value: Expr, lanes: int = 1) -> Value:
    """A place as functions of scores take it: of int32."""
    dtype = "int32" if lanes == 1 else f"int32x{lanes}"
    return Value(T.cast(value, dtype), "int32", lanes)

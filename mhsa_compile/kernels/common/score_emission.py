"""A traced score function as expressions of TVM: step by step, of numbers or of vectors of them.

Whole numbers have 32 bits where their bounds show that these are enough, else 64. What must not happen (an index
outside of its tensor, a division by 0) is gathered in a flag beside the value, wherever the bounds do not rule it out;
memory outside is never read. Sums and products that may leave 64 bits wrap: they are computed without a sign, as LLVM
and C know no meaning of a signed one that overflows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tvm import tirx
from tvm.ir import Expr

from mhsa_compile.kernels.common.opaque import opaque_flag, opaque_pair
from mhsa_compile.kernels.interface.ops import AttentionOp, Dim, TensorInput
from mhsa_compile.spec.checks import LONGEST
from mhsa_compile.spec.score_functions import COMPARISONS, LEAVES, WHOLE, Kind, ScoreFunction, Step, constant_value

# What is known of the whole numbers of a function before any call: between which bounds each lies.

Bounds = tuple[int, int]
INT32: Bounds = (-(1 << 31), (1 << 31) - 1)
INT64: Bounds = (-(1 << 63), (1 << 63) - 1)


def place_bounds(op: AttentionOp) -> dict[str, Bounds]:
    """The bounds of the places that the functions of an attention are given."""
    return {
        "b": (0, _last(op.batch)),
        "h": (0, op.num_heads - 1),
        "q_idx": _query_bounds(op),
        "kv_idx": (0, _last(op.kv_length)),
    }


def last_place(op: AttentionOp, leaf: str) -> Dim | None:
    """The size that a place is below at every call, as `AttentionOp` calls it; None where it has no name."""
    sizes = {"b": op.batch, "h": op.num_heads, "kv_idx": op.kv_length}
    if leaf == "q_idx":
        # The last query stands at the last key; the first ones may stand before all, which the bounds tell.
        return op.kv_length if op.from_end else op.q_length
    return sizes[leaf]


def _query_bounds(op: AttentionOp) -> Bounds:
    if not op.from_end:
        return (0, _last(op.q_length))
    counts_keys = op.any_step("counts_keys")
    if isinstance(op.q_length, int) and isinstance(op.kv_length, int):
        first = -op.q_length if counts_keys else op.kv_length - op.q_length
        return (first, op.kv_length - 1)
    if op.q_length == op.kv_length and not counts_keys:
        return (0, LONGEST)
    return (-_last(op.q_length) - 1, _last(op.kv_length))


def _last(size: Dim) -> int:
    return max(0, size - 1) if isinstance(size, int) else LONGEST - 1


def bounds_of(function: ScoreFunction, places: Mapping[str, Bounds]) -> list[Bounds]:
    """The bounds of each step; those of floats and bools mean nothing."""
    bounds: list[Bounds] = []
    for step in function.steps:
        exact = _of_step(function, step, [bounds[arg] for arg in step.args], places)
        bounds.append(exact if _within(exact, INT64) else INT64)
    return bounds


def wrapping(function: ScoreFunction, places: Mapping[str, Bounds]) -> frozenset[int]:
    """The numbers of the steps whose exact value may be one that 64 bits do not hold."""
    bounds = bounds_of(function, places)
    return frozenset(
        number
        for number, step in enumerate(function.steps)
        if not _within(_of_step(function, step, [bounds[arg] for arg in step.args], places), INT64)
    )


def _within(inner: Bounds, outer: Bounds) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _of_step(function: ScoreFunction, step: Step, args: Sequence[Bounds], places: Mapping[str, Bounds]) -> Bounds:
    if step.kind != "int":
        return (0, 1)
    if step.op in places:
        return places[step.op]
    if step.op == "constant":
        value = int(constant_value(step))
        return (value, value)
    if step.op == "load":
        return INT32 if function.tensors[int(step.value)].dtype == "int32" else INT64
    if step.op == "cast":
        return _of_cast(function.steps[step.args[0]].kind, args[0], WHOLE[str(step.value) or "int64"])
    return _OF_OPS[step.op](*args)


def _of_cast(kind: Kind, value: Bounds, dtype: Bounds) -> Bounds:
    if kind == "bool":
        return (0, 1)
    return value if kind == "int" and _within(value, dtype) else dtype


def _corners(combine: Callable[[int, int], int]) -> Callable[[Bounds, Bounds], Bounds]:
    def bounds(one: Bounds, other: Bounds) -> Bounds:
        values = [combine(a, b) for a in one for b in other]
        return min(values), max(values)

    return bounds


def _quotient(one: Bounds, other: Bounds) -> Bounds:
    if other[0] > 0:
        return _corners(lambda a, b: a // b)(one, other)
    most = max(abs(one[0]), abs(one[1]))  # by -1, or by 1
    return (-most, most)


def _remainder(one: Bounds, other: Bounds) -> Bounds:
    return (0, other[1] - 1) if other[0] > 0 else (min(0, other[0] + 1), max(0, other[1] - 1))


def _bits(one: Bounds, other: Bounds) -> Bounds:
    ends = (*one, *other)
    power = 1 << max((~end if end < 0 else end).bit_length() for end in ends)
    return (0 if min(ends) >= 0 else -power, power - 1)


_OF_OPS: dict[str, Callable[..., Bounds]] = {
    "add": lambda one, other: (one[0] + other[0], one[1] + other[1]),
    "sub": lambda one, other: (one[0] - other[1], one[1] - other[0]),
    "mul": _corners(lambda a, b: a * b),
    "min": lambda one, other: (min(one[0], other[0]), min(one[1], other[1])),
    "max": lambda one, other: (max(one[0], other[0]), max(one[1], other[1])),
    "floor_div": _quotient,
    "mod": _remainder,
    "neg": lambda one: (-one[1], -one[0]),
    "abs": lambda one: (0 if one[0] <= 0 <= one[1] else min(map(abs, one)), max(map(abs, one))),
    "where": lambda condition, one, other: (min(one[0], other[0]), max(one[1], other[1])),
    "not": lambda one: (~one[1], ~one[0]),
    **dict.fromkeys(("and", "or", "xor"), _bits),
}


@dataclass(frozen=True)
class Value:
    """The value of a step: of a scalar dtype, in so many lanes."""

    expr: Expr
    dtype: str
    lanes: int = 1


class StepArithmetic(Protocol):
    """What a family of kernels computes steps with."""

    floating: str

    def vector(self, value: Value, lanes: int) -> Value:
        """The value in so many lanes, where it had one."""
        ...

    def bind(self, value: Value) -> Value:
        """The value, computed once and here."""
        ...

    def function(self, op: str, x: Value) -> Expr:
        """The value at x of the function `op`: exp, exp2, log, tanh, sigmoid or sqrt."""
        ...

    def element(self, tensor: int, indices: Sequence[Value]) -> Value:
        """An element, of int32, int64, bool or `floating`; the indices are inside of the tensor."""
        ...

    def size(self, tensor: int, axis: int) -> Expr:
        """The size of one axis of a tensor, as an int64."""
        ...


@dataclass(frozen=True)
class TracedFunction:
    """A function of the scores of an attention, with what it captures: `tensors` say of what kind the `buffers` are."""

    op: AttentionOp
    function: ScoreFunction
    tensors: Sequence[TensorInput]
    buffers: Sequence[Expr]


class ScoreEmission:
    """Emits one function."""

    def __init__(self, traced: TracedFunction, arithmetic: StepArithmetic) -> None:
        op, function = traced.op, traced.function
        self.op, self.function, self.tensors, self.arithmetic = op, function, traced.tensors, arithmetic
        self.bounds = bounds_of(function, place_bounds(op))
        self.wrapping = wrapping(function, place_bounds(op))
        self.dependences = function.dependences()

    def emit(
        self, numbers: Sequence[int], leaves: Mapping[str, Value], values: dict[int, Value], flags: list[Value]
    ) -> None:
        """Puts the values of these steps, which come in their order, into `values`, and into `flags` what must hold."""
        for number in numbers:
            if number in values:
                continue
            step = self.function.steps[number]
            value = self._value(number, step, leaves, [values[arg] for arg in step.args], flags)
            values[number] = self.arithmetic.bind(value) if self._is_shared(number) else value

    def _is_shared(self, number: int) -> bool:
        step = self.function.steps[number]
        return bool(step.args) and sum(later.args.count(number) for later in self.function.steps) > 1

    def _value(
        self, number: int, step: Step, leaves: Mapping[str, Value], args: list[Value], flags: list[Value]
    ) -> Value:
        if step.op in LEAVES:
            return leaves[step.op]
        if step.op == "constant":
            dtype = self._dtype(number)
            return Value(tirx.const(constant_value(step), dtype), dtype)
        if step.op == "load":
            return self._load(step, args, flags)
        if step.op == "cast":
            whole = step.kind == "int"
            return self._cast_to_whole(number, args[0]) if whole else self._cast(args[0], self._dtype(number))
        lanes = max(arg.lanes for arg in args)
        if step.op == "where":
            return self._where(args, self._dtype(number), lanes)
        if step.op in COMPARISONS:
            kind = self._widest(args)
            return Value(self._comparison(step.op, self._alike(args, kind, lanes), kind), "bool", lanes)
        if self.function.steps[number].kind == "bool":
            return self._logical(step.op, args, lanes)
        dtype = self._dtype(number)
        if step.kind == "int":  # also what is computed with must fit
            dtype = "int64" if "int64" in (dtype, self._widest(args)) else "int32"
        operands = self._alike(args, dtype, lanes)
        if step.op in ("floor_div", "mod"):
            operands = self._division(step, operands, dtype, lanes, flags)
        if step.op in ("exp", "exp2", "log", "tanh", "sigmoid", "sqrt"):
            return Value(self.arithmetic.function(step.op, Value(operands[0], dtype, lanes)), dtype, lanes)
        if number in self.wrapping and step.op in ("add", "sub", "mul", "neg", "abs"):
            return Value(self._wrap(step.op, operands, lanes), dtype, lanes)
        return Value(self._evaluate(step.op, operands, dtype, lanes), dtype, lanes)

    def _dtype(self, number: int) -> str:
        kind = self.function.steps[number].kind
        if kind == "int":
            low, high = self.bounds[number]
            return "int32" if INT32[0] <= low and high <= INT32[1] else "int64"
        return "bool" if kind == "bool" else self.arithmetic.floating

    def _widest(self, args: Sequence[Value]) -> str:
        dtypes = {arg.dtype for arg in args}
        for dtype in (self.arithmetic.floating, "int64", "int32"):
            if dtype in dtypes:
                return dtype
        return "bool"

    def _alike(self, args: Sequence[Value], dtype: str, lanes: int) -> list[Expr]:
        """The arguments of one dtype, and in so many lanes."""
        return [self._vector(self._cast(arg, dtype), lanes) for arg in args]

    def _vector(self, value: Value, lanes: int) -> Expr:
        return self.arithmetic.vector(value, lanes).expr

    def _constant(self, value: Any, dtype: str, lanes: int) -> Expr:
        return self._vector(Value(tirx.const(value, dtype), dtype), lanes)

    def _cast(self, value: Value, dtype: str) -> Value:
        lanes = value.lanes
        if value.dtype == dtype:
            return value
        if dtype == "bool":
            zero = self._constant(0, value.dtype, lanes)
            return Value(self._comparison("ne", [value.expr, zero], value.dtype), dtype, lanes)
        if value.dtype == "bool":
            one, zero = (self._constant(number, dtype, lanes) for number in (1, 0))
            return Value(tirx.Select(value.expr, one, zero), dtype, lanes)
        return Value(tirx.Cast(_vector_type(dtype, lanes), value.expr), dtype, lanes)

    def _cast_to_whole(self, number: int, value: Value) -> Value:
        """What a cast to a whole number makes of a value: see Step."""
        step, dtype = self.function.steps[number], self._dtype(number)
        narrow, source = str(step.value) or "int64", step.args[0]
        if value.dtype == "bool":
            return self._cast(value, dtype)
        if value.dtype == self.arithmetic.floating:
            value = self._whole(value, "int64" if narrow == "int64" else "int32")
        elif WHOLE[narrow][0] <= self.bounds[source][0] and self.bounds[source][1] <= WHOLE[narrow][1]:
            return self._cast(value, dtype)
        return self._cast(self._cast(value, narrow), dtype)

    def _whole(self, value: Value, dtype: str) -> Value:
        """A float without what is behind its point; the least number of `dtype` where it holds none near it."""
        lanes, value = value.lanes, self.arithmetic.bind(value)
        least = float(WHOLE[dtype][0])
        low, end = (self._constant(bound, value.dtype, lanes) for bound in (least, -least))
        fits = tirx.And(value.expr > low, value.expr < end)  # NaN does not
        whole = tirx.Cast(_vector_type(dtype, lanes), tirx.Select(fits, value.expr, low))
        return Value(whole, dtype, lanes)

    def _wrap(self, op: str, operands: list[Expr], lanes: int) -> Expr:
        """A sum, a product or a change of sign of whole numbers of 64 bits that wraps."""
        unsigned, signed = (_vector_type(dtype, lanes) for dtype in ("uint64", "int64"))
        numbers = [tirx.Cast(unsigned, operand) for operand in operands]
        if op in ("neg", "abs"):
            numbers.insert(0, self._constant(0, "uint64", lanes))
        result = tirx.Cast(signed, _COMPUTED["sub" if op in ("neg", "abs") else op](*numbers))
        if op != "abs":
            return result
        return tirx.Select(operands[0] < self._constant(0, "int64", lanes), result, operands[0])

    def _where(self, args: Sequence[Value], dtype: str, lanes: int) -> Value:
        condition = self._vector(args[0], lanes)
        one, other = self._alike(args[1:], dtype, lanes)
        return Value(tirx.Select(condition, one, other), dtype, lanes)

    def _comparison(self, op: str, operands: list[Expr], dtype: str) -> Expr:
        """A comparison; of floats one that logic about it leaves as it is, as the opposite of "less" includes NaN."""
        one, other = operands
        if dtype != self.arithmetic.floating:
            return _COMPARED[op](one, other)
        if op == "ne":  # TVM's is false for NaN
            return tirx.Not(opaque_flag(one == other))
        return opaque_flag(_COMPARED[op](one, other))

    def _logical(self, op: str, args: Sequence[Value], lanes: int) -> Value:
        operands = [self._vector(arg, lanes) for arg in args]
        if op == "not":
            return Value(tirx.Not(operands[0]), "bool", lanes)
        if op == "xor":
            one, other = operands
            either = tirx.Or(tirx.And(one, tirx.Not(other)), tirx.And(tirx.Not(one), other))
            return Value(either, "bool", lanes)
        return Value((tirx.And if op == "and" else tirx.Or)(*operands), "bool", lanes)

    def _evaluate(self, op: str, operands: list[Expr], dtype: str, lanes: int) -> Expr:
        if op == "neg":
            return self._constant(0, dtype, lanes) - operands[0]
        if op == "not":
            return self._constant(-1, dtype, lanes) - operands[0]
        if op == "abs":
            x = self.arithmetic.bind(Value(operands[0], dtype, lanes)).expr
            return tirx.Select(x < self._constant(0, dtype, lanes), self._constant(0, dtype, lanes) - x, x)
        one, other = operands
        if op in ("min", "max"):
            one, other = (self.arithmetic.bind(Value(x, dtype, lanes)).expr for x in operands)
            first, second = (one < other, other <= one) if op == "min" else (one > other, other >= one)
            last = one + other if dtype == self.arithmetic.floating else other  # NaN, if either is
            return tirx.Select(first, one, tirx.Select(second, other, last))
        if dtype == self.arithmetic.floating:
            one, other = opaque_pair(one, other)
        return _COMPUTED[op](one, other)

    def _division(self, step: Step, operands: list[Expr], dtype: str, lanes: int, flags: list[Value]) -> list[Expr]:
        """Dividend and divisor of whole numbers. The divisor is 1 where it is 0, and where the least number, which has
        no opposite, is divided by -1: processors trap on both."""
        dividend, divisor = operands
        dividends, divisors = (self.bounds[arg] for arg in step.args)
        one, least = self._constant(1, dtype, lanes), WHOLE[dtype][0]
        if divisors[0] <= 0 <= divisors[1]:
            zero = self._constant(0, dtype, lanes)
            flags.append(Value(divisor != zero, "bool", lanes))
            divisor = tirx.Select(divisor == zero, one, divisor)
        if divisors[0] <= -1 <= divisors[1] and dividends[0] <= least:
            lowest, minus_one = (self._constant(value, dtype, lanes) for value in (least, -1))
            traps = tirx.And(dividend == lowest, divisor == minus_one)
            divisor = tirx.Select(traps, one, divisor)
        return [dividend, divisor]

    def _load(self, step: Step, args: Sequence[Value], flags: list[Value]) -> Value:
        number = int(step.value)
        at = [self._inside(step, axis, arg, flags) for axis, arg in enumerate(args)]
        element = self.arithmetic.element(number, at)
        if step.kind == "int":
            return element
        return self._cast(element, "bool" if step.kind == "bool" else self.arithmetic.floating)

    def _inside(self, step: Step, axis: int, index: Value, flags: list[Value]) -> Value:
        """An index within its tensor, counted from the front."""
        tensor, source = int(step.value), step.args[axis]
        size, (low, high) = self.tensors[tensor].dims[axis], self.bounds[source]
        leaf = self.function.steps[source].op
        if low >= 0 and isinstance(size, int) and high < size:
            return index
        if low >= 0 and leaf in LEAVES[1:] and not isinstance(size, int) and size == last_place(self.op, leaf):
            return index
        lanes = index.lanes
        wide = self.arithmetic.bind(self._cast(index, "int64"))
        end = self._vector(Value(self.arithmetic.size(tensor, axis), "int64"), lanes)
        zero, one = (self._constant(value, "int64", lanes) for value in (0, 1))
        from_front = wide
        if low < 0:
            from_end = tirx.Select(wide.expr < zero, wide.expr + end, wide.expr)
            from_front = self.arithmetic.bind(Value(from_end, "int64", lanes))
        flags.append(Value(tirx.And(from_front.expr >= zero, from_front.expr < end), "bool", lanes))
        inside = tirx.Select(from_front.expr >= end, end - one, from_front.expr)
        return Value(tirx.Select(from_front.expr < zero, zero, inside), "int64", lanes)

    # Results.

    def scaled(self, values: Mapping[int, Value], score: Value, factor: float, lanes: int) -> Expr:
        """The result times `factor`, of a score that comes times it, without a division where that can be. What is put
        on a score and taken off may round it on purpose, so two such sums are left in their units."""
        last = len(self.function.steps) - 1
        scored = [
            ["score" in self.dependences[arg] for arg in step.args]
            for step in self.function.steps
            if step.op in ("add", "sub") and step.kind == "float"
        ]
        if sum(sum(sides) == 1 for sides in scored) > 1:
            return self._vector(values[last], lanes) * self._constant(factor, self.arithmetic.floating, lanes)
        return self._scaled(last, values, score, factor, lanes)

    def _scaled(self, number: int, values: Mapping[int, Value], score: Value, factor: float, lanes: int) -> Expr:
        step = self.function.steps[number]
        floating = self.arithmetic.floating

        def inner(arg: int) -> Expr:
            return self._scaled(arg, values, score, factor, lanes)

        def plain(arg: int) -> Expr:
            return self._vector(values[arg], lanes)

        scored = ["score" in self.dependences[arg] for arg in step.args]
        if step.op == "score":
            return self._vector(score, lanes)
        if not any(scored):
            return plain(number) * self._constant(factor, floating, lanes)
        if step.op in ("add", "sub"):
            return _COMPUTED[step.op](*opaque_pair(inner(step.args[0]), inner(step.args[1])))
        if step.op == "where":
            return tirx.Select(plain(step.args[0]), inner(step.args[1]), inner(step.args[2]))
        if step.op in ("mul", "div") and scored in ([True, False], [False, True]) and (step.op == "mul" or scored[0]):
            sides = [(inner if own else plain)(arg) for arg, own in zip(step.args, scored, strict=True)]
            return _COMPUTED[step.op](*opaque_pair(*sides))
        return plain(number) * self._constant(factor, floating, lanes)


_COMPARED = {name: getattr(operator, name) for name in COMPARISONS}
_COMPUTED: dict[str, Callable[[Expr, Expr], Expr]] = {
    **{name: getattr(operator, name) for name in ("add", "sub", "mul", "xor")},
    "and": operator.and_,
    "or": operator.or_,
    "div": operator.truediv,
    "floor_div": tirx.floordiv,
    "mod": tirx.floormod,
}


def _vector_type(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"

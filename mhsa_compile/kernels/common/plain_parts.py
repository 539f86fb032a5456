"""What attention that no kernel takes asks the steps of scores: single scores in float64, in natural units, as tensor
expressions. A part is the identity where a step does not say otherwise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tvm import te, tirx
from tvm.ir import Expr

from mhsa_compile.kernels.common.score_emission import ScoreEmission, TracedFunction, Value
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.interface.score_step import ScoreStep

EXACT = "float64"


def exact(value: Expr) -> Expr:
    """The value in float64; by way of float32, since TVM lowers no other cast of bfloat16."""
    narrow = value.dtype in ("bfloat16", "float16")
    return tirx.Cast(EXACT, tirx.Cast("float32", value)) if narrow else tirx.Cast(EXACT, value)


class PlainMath:
    """Arithmetic on single scores."""

    unit: ClassVar[float] = 1.0

    def constant(self, value: float) -> Expr:
        return tirx.const(value, EXACT)

    def tanh(self, x: Expr) -> Expr:
        return te.tanh(x)

    def element(self, buffer: Expr, at: Sequence[Expr]) -> Expr:
        return exact(buffer[tuple(at)])


@dataclass(frozen=True)
class Pair:
    """A query and a key: batch entry, head, number of the query, number of the key."""

    b: Expr
    h: Expr
    i: Expr
    j: Expr


@dataclass(frozen=True)
class PlainTask:
    """An attention, with the step's own inputs; `place` is that of query i of batch entry b."""

    op: AttentionOp
    own: Sequence[Expr]
    place: Callable[[Expr, Expr], Expr]


class PlainPart:
    """What a step does to single scores."""

    score_hides = False
    """Whether a score that becomes -inf hides its key."""

    def __init__(self, step: ScoreStep, task: PlainTask) -> None:
        self.step, self.task = step, task

    def score(self, score: Expr, pair: Pair) -> Expr:
        """What becomes of a score."""
        if not self.step.elementwise:
            return score
        factor = self.step.factor(1.0)
        return self.step.score(PlainMath(), score if factor is None else score * tirx.const(factor, EXACT))

    def sees(self, pair: Pair) -> Expr | None:
        """Whether the query sees the key; None: it does."""
        return None

    def no_key(self, h: Expr) -> Expr | None:
        """A score of no key; None where there is none."""
        return None


class _Exact:
    """Steps of functions on single numbers; floats of 64 bits."""

    floating = EXACT

    def __init__(self, tensors: Sequence[te.Tensor]) -> None:
        self.tensors = tensors

    def vector(self, value: Value, lanes: int) -> Value:
        return value

    def bind(self, value: Value) -> Value:
        return value

    def function(self, op: str, x: Value) -> Expr:
        if op == "exp2":
            return tirx.exp(x.expr * tirx.const(math.log(2), self.floating))
        if op == "sigmoid":
            one = tirx.const(1, self.floating)
            return one / (one + tirx.exp(tirx.const(0, self.floating) - x.expr))
        return {"exp": tirx.exp, "log": tirx.log, "tanh": tirx.tanh, "sqrt": tirx.sqrt}[op](x.expr)

    def size(self, tensor: int, axis: int) -> Expr:
        return tirx.Cast("int64", self.tensors[tensor].shape[axis])

    def element(self, tensor: int, indices: Sequence[Value]) -> Value:
        source = self.tensors[tensor]
        return Value(source[tuple(index.expr for index in indices)], str(source.dtype))


def plain_function(traced: TracedFunction, task: PlainTask, pair: Pair, score: Expr | None) -> tuple[Expr, Expr]:
    """(the result of a function of a pair and its score, whether it has one)."""
    emission = ScoreEmission(traced, _Exact(traced.buffers))
    places = {"b": pair.b, "h": pair.h, "q_idx": task.place(pair.b, pair.i), "kv_idx": pair.j}
    leaves = {leaf: Value(tirx.Cast("int32", place), "int32") for leaf, place in places.items()}
    if score is not None:
        leaves["score"] = Value(score, EXACT)
    values: dict[int, Value] = {}
    flags: list[Value] = []
    emission.emit(range(len(emission.function.steps)), leaves, values, flags)
    holds = tirx.all(*[tirx.const(True, "bool"), *(flag.expr for flag in flags)])
    return values[len(emission.function.steps) - 1].expr, holds

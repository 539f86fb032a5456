"""mask_mod and score_mod as tensor expressions in float64, for attention that no kernel takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import te, tirx

from mhsa_compile.kernels.common.score_emission import ScoreEmission, Value
from mhsa_compile.kernels.interface.ops import AttentionOp

Expr = Any  # tirx.PrimExpr
_NAN = tirx.const(math.nan, "float64")


class _Exact:
    """Steps of single numbers; floats of 64 bits."""

    floating = "float64"

    def __init__(self, tensors: Sequence[te.Tensor]) -> None:
        self.tensors = tensors

    def vector(self, value: Value, lanes: int) -> Value:
        return value

    def kept(self, value: Value) -> Value:
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


class PlainFunctions:
    """The functions of an attention; `tensors` are all that they capture."""

    def __init__(self, op: AttentionOp, tensors: Sequence[te.Tensor]) -> None:
        self.emissions = {
            name: ScoreEmission(op, getattr(op, name), op.tensors[part], _Exact(tensors[part]))
            for name, part in op.captured.items()
        }

    def _of(self, name: str, places: Mapping[str, Expr], score: Expr | None) -> tuple[Expr, Expr]:
        """(the result of a function, whether it has one)."""
        emission = self.emissions[name]
        leaves = {leaf: Value(tirx.Cast("int32", place), "int32") for leaf, place in places.items()}
        if score is not None:
            leaves["score"] = Value(score, "float64")
        known: dict[int, Value] = {}
        flags: list[Value] = []
        emission.emit(range(len(emission.function.steps)), leaves, known, flags)
        holds = tirx.all(*[tirx.const(True, "bool"), *(flag.expr for flag in flags)])
        return known[len(emission.function.steps) - 1].expr, holds

    def score(self, places: Mapping[str, Expr], score: Expr) -> Expr:
        """A score as score_mod changes it; NaN where one of the functions has no result."""
        if "score_mod" in self.emissions:
            made, holds = self._of("score_mod", places, score)
            score = tirx.Select(holds, made, _NAN)
        if "mask_mod" in self.emissions:
            _, holds = self._of("mask_mod", places, None)
            score = tirx.Select(holds, score, _NAN)
        return score

    def sees(self, places: Mapping[str, Expr]) -> Expr:
        """Whether mask_mod, where there is one, lets the query see the key."""
        if "mask_mod" not in self.emissions:
            return tirx.const(True, "bool")
        seen, holds = self._of("mask_mod", places, None)
        return tirx.Or(seen, tirx.Not(holds))

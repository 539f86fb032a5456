"""mask_mod and score_mod on a GPU: each thread computes its own cells, number by number.

What depends on neither key nor score is computed once for a row and a tile, the rest with each score. Cells beyond the
last query or key take the last one's place, so that no tensor is read outside; they are hidden after that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_emission import ScoreEmission, Value
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.attention.key_range import BlockKeyRange
from mhsa_compile.kernels.cuda.primitives.inputs import wide
from mhsa_compile.kernels.cuda.primitives.warp import Expr, materialize
from mhsa_compile.kernels.interface.ops import AttentionOp

_FUNCTIONS = {"exp": T.exp, "exp2": T.exp2, "log": T.log, "tanh": T.tanh, "sqrt": T.sqrt}


class _CudaArithmetic:
    """Steps of single numbers; floats of 32 bits."""

    floating = "float32"

    def __init__(self, buffers: Sequence[Expr]) -> None:
        self.buffers = buffers

    def vector(self, value: Value, lanes: int) -> Value:
        return value

    def kept(self, value: Value) -> Value:
        return Value(materialize(value.expr, value.dtype), value.dtype)

    def function(self, op: str, x: Value) -> Expr:
        if op == "sigmoid":
            return T.float32(1) / (T.float32(1) + T.exp(T.float32(0) - x.expr))
        return _FUNCTIONS[op](x.expr)

    def size(self, tensor: int, axis: int) -> Expr:
        return self.buffers[tensor].shape[axis]

    def element(self, tensor: int, indices: Sequence[Value]) -> Value:
        buffer = self.buffers[tensor]
        element = buffer[tuple(T.cast(index.expr, "int64") for index in indices)]
        if str(buffer.dtype) in ("bfloat16", "float16"):
            return Value(materialize(wide(element), "float32"), "float32")
        return Value(materialize(element, str(buffer.dtype)), str(buffer.dtype))


class BlockScoreFunctions:
    """The functions of an attention, for queries of batch entry `b` and head `h`; `tensors` are all that they
    capture."""

    def __init__(self, op: AttentionOp, tensors: Sequence[Expr], b: Expr, h: Expr, key_range: BlockKeyRange) -> None:
        self.op, self.key_range = op, key_range
        self._head = {"b": _place(b), "h": _place(h)}
        self._emissions = {}
        for name, part in op.captured.items():
            arithmetic = _CudaArithmetic(tensors[part])
            self._emissions[name] = ScoreEmission(op, getattr(op, name), op.tensors[part], arithmetic)

    def of_row(self, number: Expr) -> RowScoreFunctions:
        """The functions for the query of this number among all."""
        last = self.key_range.q_length - 1
        place = materialize(T.min(number, last) + self.key_range.shift)
        places = {**self._head, "q_idx": Value(place, "int32")}
        return RowScoreFunctions(self._emissions, places, self.key_range.kv_length - 1)


class RowScoreFunctions:
    """The functions for one query, with what they need to know of it computed here and now."""

    def __init__(self, emissions: dict[str, ScoreEmission], places: dict[str, Value], last_key: Expr) -> None:
        self._emissions, self._last_key = emissions, last_key
        self._known, self._flags = dict[str, dict[int, Value]](), dict[str, list[Value]]()
        for name, emission in emissions.items():
            early = [n for n, leaves in enumerate(emission.dependences) if not leaves & {"score", "kv_idx"}]
            known: dict[int, Value] = {}
            flags: list[Value] = []
            emission.emit(early, places, known, flags)
            steps = emission.function.steps
            self._known[name] = {
                n: value if steps[n].op == "constant" else emission.arithmetic.kept(value) for n, value in known.items()
            }
            self._flags[name] = [emission.arithmetic.kept(flag) for flag in flags]

    def score(self, score: Expr, number: Expr) -> Expr:
        """What becomes of the score of this query and the key of this number, in units of log2 before and after: -inf
        where the key is hidden, NaN where a function has no value."""
        key = Value(materialize(T.min(number, self._last_key)), "int32")
        if (emission := self._emissions.get("score_mod")) is not None:
            score = materialize(score, "float32")
            natural = Value(score * T.float32(math.log(2)), "float32")
            known, holds = self._late("score_mod", {"kv_idx": key, "score": natural})
            made = emission.scaled(known, Value(score, "float32"), LOG2_E, 1)
            score = T.Select(holds, made, T.float32(math.nan)) if holds is not None else made
        if (emission := self._emissions.get("mask_mod")) is not None:
            score = materialize(score, "float32")
            known, holds = self._late("mask_mod", {"kv_idx": key})
            seen = known[len(emission.function.steps) - 1].expr
            score = T.Select(seen, score, T.float32(-math.inf))
            score = T.Select(holds, score, T.float32(math.nan)) if holds is not None else score
        return score

    def _late(self, name: str, leaves: dict[str, Value]) -> tuple[dict[int, Value], Expr | None]:
        """(the values of all steps, whether all that must hold does; None where that is nothing)."""
        emission = self._emissions[name]
        known, flags = dict(self._known[name]), list(self._flags[name])
        emission.emit([n for n in range(len(emission.function.steps)) if n not in known], leaves, known, flags)
        return known, functools.reduce(T.And, (flag.expr for flag in flags)) if flags else None


def _place(value: Expr) -> Value:
    return Value(materialize(T.cast(value, "int32")), "int32")

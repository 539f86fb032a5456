"""Functions of scores on a GPU: each thread computes its own cells, number by number.

What depends on neither key nor score is computed once for a row and a tile, the rest with each score. Cells beyond the
last query or key take the last one's place, so that no tensor is read outside; they are hidden after that.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_emission import ScoreEmission, TracedFunction, Value
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores
from mhsa_compile.kernels.cuda.primitives.inputs import wide
from mhsa_compile.kernels.cuda.primitives.simt import materialize

_FUNCTIONS = {"exp": T.exp, "exp2": T.exp2, "log": T.log, "tanh": T.tanh, "sqrt": T.sqrt}


class _CudaArithmetic:
    """Steps of single numbers; floats of 32 bits."""

    floating = "float32"

    def __init__(self, buffers: Sequence[Expr]) -> None:
        self.buffers = buffers

    def vector(self, value: Value, lanes: int) -> Value:
        return value

    def bind(self, value: Value) -> Value:
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


class ThreadFunction:
    """A function for queries of batch entry `b` and head `h`."""

    def __init__(self, traced: TracedFunction, b: Expr, h: Expr) -> None:
        self._head = {"b": _place(b), "h": _place(h)}
        self._emission = ScoreEmission(traced, _CudaArithmetic(traced.buffers))

    def of_row(self, mask: ThreadScores, row: int) -> RowFunction:
        """The function for a row of the thread."""
        keys = mask.key_range
        place = materialize(T.min(mask.numbers[row], keys.q_length - 1) + keys.shift)
        return RowFunction(self._emission, {**self._head, "q_idx": Value(place, "int32")}, keys.kv_length - 1)


class RowFunction:
    """A function for one query, with what it needs to know of it computed here and now."""

    def __init__(self, emission: ScoreEmission, places: dict[str, Value], last_key: Expr) -> None:
        self._emission, self._last_key = emission, last_key
        early = [n for n, leaves in enumerate(emission.dependences) if not leaves & {"score", "kv_idx"}]
        values: dict[int, Value] = {}
        flags: list[Value] = []
        emission.emit(early, places, values, flags)
        steps, bind = emission.function.steps, emission.arithmetic.bind
        self._values = {n: value if steps[n].op == "constant" else bind(value) for n, value in values.items()}
        self._flags = [bind(flag) for flag in flags]

    def score(self, score: Expr, number: Expr) -> Expr:
        """What becomes of the score of this query and the key of this number, in units of log2 before and after; NaN
        where the function has no value."""
        key = self._key(number)
        score = materialize(score, "float32")
        natural = Value(score * T.float32(math.log(2)), "float32")
        values, holds = self._late({"kv_idx": key, "score": natural})
        return self._where(holds, self._emission.scaled(values, Value(score, "float32"), LOG2_E, 1))

    def hidden(self, score: Expr, number: Expr) -> Expr:
        """A score, -inf where the function says that its key is hidden."""
        key = self._key(number)
        score = materialize(score, "float32")
        values, holds = self._late({"kv_idx": key})
        visible = values[len(self._emission.function.steps) - 1].expr
        return self._where(holds, T.Select(visible, score, T.float32(-math.inf)))

    def _key(self, number: Expr) -> Value:
        return Value(materialize(T.min(number, self._last_key)), "int32")

    def _where(self, holds: Expr | None, score: Expr) -> Expr:
        return score if holds is None else T.Select(holds, score, T.float32(math.nan))

    def _late(self, leaves: dict[str, Value]) -> tuple[dict[int, Value], Expr | None]:
        """(the values of all steps, whether all that must hold does; None where that is nothing)."""
        values, flags = dict(self._values), list(self._flags)
        steps = range(len(self._emission.function.steps))
        self._emission.emit([n for n in steps if n not in values], leaves, values, flags)
        return values, functools.reduce(T.And, (flag.expr for flag in flags)) if flags else None


def _place(value: Expr) -> Value:
    return Value(materialize(T.cast(value, "int32")), "int32")

"""A traced score function in NumPy, at the precision of its inputs: the oracle. It shares no code with nn's or with the
kernels'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mhsa_compile.spec.score_functions import ScoreFunction, Step, constant_value


def evaluate(
    function: ScoreFunction,
    tensors: Sequence[np.ndarray],
    places: Mapping[str, np.ndarray],
    score: np.ndarray | None = None,
) -> np.ndarray:
    """The function's value. The places b, h, q_idx and kv_idx are int64 and broadcast against each other and the score.

    NaN where an index is outside of its tensor or whole numbers are divided by 0, and of a mask True: a pair that is
    seen, so that its score is known to be NaN.
    """
    wide = np.float64 if score is None else np.promote_types(score.dtype, np.float32)
    leaves: dict[str, np.ndarray] = dict(places) if score is None else {**places, "score": score.astype(wide)}
    broken = np.zeros((), np.bool_)
    values: list[np.ndarray] = []
    with np.errstate(all="ignore"):  # NaN and Inf may come, and are carried as IEEE says
        for step in function.steps:
            args = [values[arg] for arg in step.args]
            if step.op == "load":
                value, outside = _loaded(tensors[int(step.value)], args)
                broken = broken | outside
            elif step.op in ("floor_div", "mod"):
                broken = broken | (args[1] == 0)
                value = _COMPUTED[step.op](args[0], np.where(args[1] == 0, 1, args[1]))
            else:
                value = _value(step, leaves, args, wide)
            values.append(value.astype(wide) if value.dtype.kind not in "biu" else value)
    result = values[-1]
    if function.kind == "bool":
        return np.asarray(result | broken)
    return np.asarray(np.where(broken, np.nan, result), wide)


def broken_pairs(
    function: ScoreFunction, tensors: Sequence[np.ndarray], places: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Returns for which pairs a mask_mod has no value: their scores are NaN."""
    steps = function.steps
    as_score = ScoreFunction((*steps, Step("cast", "float", (len(steps) - 1,))), function.tensors)
    return np.asarray(np.isnan(evaluate(as_score, tensors, places)))


def _value(step: Step, leaves: Mapping[str, np.ndarray], args: list[np.ndarray], wide: Any) -> np.ndarray:
    if step.op in leaves:
        return np.asarray(leaves[step.op])
    if step.op == "constant":
        dtype = {"bool": np.bool_, "int": np.int64, "float": wide}[step.kind]
        return np.asarray(constant_value(step), dtype)
    if step.op == "cast":
        if step.kind == "int":
            return _whole(args[0], str(step.value) or "int64")
        return np.asarray(args[0].astype(np.bool_ if step.kind == "bool" else wide))
    return np.asarray(_COMPUTED[step.op](*args))


def _whole(value: np.ndarray, dtype: str) -> np.ndarray:
    """A value as a whole number of `dtype`, held in 64 bits."""
    if value.dtype.kind == "f":
        bits = 63 if dtype == "int64" else 31
        whole = np.trunc(value)
        fits = (whole >= -(2.0**bits)) & (whole < 2.0**bits)
        value = np.where(fits, np.where(fits, whole, 0).astype(np.int64), -(2**bits))
    return np.asarray(value.astype(np.int64).astype(dtype).astype(np.int64))


def _loaded(tensor: np.ndarray, indices: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(the elements, where an index is outside); negative indices count from the end."""
    at, outside = [], np.zeros((), np.bool_)
    for index, size in zip(indices, tensor.shape, strict=True):
        place = np.where(index < 0, index + size, index)
        outside = outside | (place < 0) | (place >= size)
        at.append(np.clip(place, 0, max(size - 1, 0)))
    if tensor.size == 0:
        return np.zeros(np.broadcast_shapes(*(index.shape for index in at)), tensor.dtype), np.ones((), np.bool_)
    values = tensor[tuple(at)]
    return np.asarray(values.astype(np.int64) if values.dtype.kind in "iu" else values), outside


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


_COMPUTED: Mapping[str, Callable[..., Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floor_div": np.floor_divide,
    "mod": np.remainder, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not,
    "neg": np.negative, "abs": np.abs, "exp": np.exp, "exp2": np.exp2, "log": np.log, "tanh": np.tanh,
    "sigmoid": _sigmoid, "sqrt": np.sqrt, "where": np.where,
}  # fmt: skip

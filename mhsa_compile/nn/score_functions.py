"""What a traced mask_mod and score_mod compute, in PyTorch: their eager meaning; and a mask_mod at fixed lengths,
computed once: as a constant mask is, of which no hidden tile is ever visited."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mhsa_compile.errors import SpecError
from mhsa_compile.spec.masks import BoolArray
from mhsa_compile.spec.score_functions import Kind, ScoreFunction, Step, constant_value

MOST_PAIRS = 1 << 28
"""The most pairs, heads times queries times keys, of a mask made once; a mask_mod of more is computed in each call."""
FEW_QUERIES = 12
"""The most queries for which a call itself computes mask_mod: there are no tiles to leave out, and a kernel for few
queries shares out the keys."""
_ROWS = 512


def evaluate(function: ScoreFunction, tensors: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> Tensor:
    """The function's value. `leaves` broadcast against each other: the places, whole numbers, and the score.

    An index that is outside of its tensor raises IndexError, where PyTorch checks it.
    """
    values: list[Any] = []
    for step in function.steps:
        args = [values[arg] for arg in step.args]
        if step.op in leaves:
            values.append(leaves[step.op])
        elif step.op == "constant":
            values.append(constant_value(step))
        elif step.op == "load":
            index = tuple(arg if isinstance(arg, int) else arg.long() for arg in args)
            values.append(tensors[int(step.value)][index])
        elif step.op == "cast":
            values.append(_cast(args[0], step, leaves))
        else:
            floating = _dtype_of("float", leaves)
            values.append(_TORCH[step.op](*(_wide(arg, floating) for arg in args)))
    result = values[-1]
    return result if isinstance(result, Tensor) else torch.full((), result, dtype=_dtype_of(function.kind, leaves))


def _cast(value: Tensor, step: Step, leaves: Mapping[str, Tensor]) -> Tensor:
    """To a float, a bool, or by the narrow dtype that a step names to one of 64 bits."""
    narrow = value.to(getattr(torch, str(step.value))) if step.kind == "int" and step.value else value
    return narrow.to(_dtype_of(step.kind, leaves))


def _wide(arg: Any, floating: torch.dtype) -> Tensor:
    """A constant as a tensor, captured floats in the precision of the score, and whole numbers of 64 bits."""
    if not isinstance(arg, Tensor):
        return torch.tensor(arg, dtype=floating if isinstance(arg, float) else None)
    if arg.dtype == torch.bool:
        return arg
    return arg.to(floating if arg.is_floating_point() else torch.int64)


def _dtype_of(kind: Kind, leaves: Mapping[str, Tensor]) -> torch.dtype:
    if kind == "float":
        return leaves["score"].dtype if "score" in leaves else torch.float32
    return torch.bool if kind == "bool" else torch.int64


_TORCH: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(torch, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")},
    **{name: getattr(torch, name) for name in ("add", "sub", "mul", "div", "where")},
    **{name: getattr(torch, name) for name in ("neg", "abs", "exp", "exp2", "log", "tanh", "sigmoid", "sqrt")},
    "floor_div": torch.floor_divide,
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
}


def fixed_mask(
    name: str, function: ScoreFunction, arrays: Sequence[np.ndarray], *, heads: int, L: int, S: int, offset: int
) -> BoolArray | None:
    """(1 or heads, L, S); query i stands at i + offset, and `arrays` are what the function captures.

    None where calls compute it: it asks for the entry of the batch, there are few queries, or it would be too large.
    Raises SpecError where the function `name` has no value for some pair.
    """
    heads = heads if function.depends_on("h") else 1
    if function.depends_on("b") or L <= FEW_QUERIES or heads * L * S > MOST_PAIRS:
        return None
    tensors = [torch.from_numpy(np.array(array)) for array in arrays]
    mask = np.empty((heads, L, S), np.bool_)
    for first in range(0, L, _ROWS):
        places = torch.arange(first, min(first + _ROWS, L)) + offset
        mask[:, first : first + _ROWS] = _rows(name, function, tensors, heads, places, S).numpy()
    return mask


def _rows(name: str, function: ScoreFunction, tensors: Sequence[Tensor], heads: int, places: Tensor, S: int) -> Tensor:
    leaves = {
        "b": torch.zeros(1, 1, 1, dtype=torch.int64),
        "h": torch.arange(heads).view(-1, 1, 1),
        "q_idx": places.view(-1, 1),
        "kv_idx": torch.arange(S),
    }
    try:
        return evaluate(function, tensors, leaves)
    except (IndexError, RuntimeError) as error:  # an index that is outside, a division by 0
        lengths = f"queries up to {int(places.max())} and keys up to {S - 1}"
        raise SpecError(name, f"a value for {lengths}", str(error).partition("\n")[0]) from error

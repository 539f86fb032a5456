"""A mask_mod at fixed lengths, computed once: as a constant mask is, of which no hidden tile is ever visited."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mhsa_compile.errors import SpecError
from mhsa_compile.nn.score_functions import evaluate
from mhsa_compile.spec.masks import BoolArray
from mhsa_compile.spec.score_functions import ScoreFunction

MOST_PAIRS = 1 << 28
"""The most pairs, heads times queries times keys, of a mask made once; a mask_mod of more is computed in each call."""
FEW_QUERIES = 12
"""The most queries for which a call itself computes mask_mod: there are no tiles to leave out, and a kernel for few
queries shares out the keys."""
_ROWS = 512


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

"""Functions of scores while a module is exported: a mask_mod at fixed lengths, and the lengths that captured tensors
allow."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mhsa_compile.errors import SpecError
from mhsa_compile.nn.score_functions import Functions, computed
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.masks import BoolArray
from mhsa_compile.spec.score_functions import ScoreFunction

MOST_PAIRS = 1 << 28
"""Of heads, queries and keys; a mask_mod of more is computed in each call instead."""
_ROWS = 512


def fixed_mask(spec: AttentionSpec, functions: Functions, L: int, S: int) -> BoolArray | None:
    """A mask_mod at fixed lengths, computed now: as a constant mask, of which no hidden tile is ever visited.

    (L, S), or (H, L, S) where it differs from head to head; None where calls have to compute it: it depends on the
    batch entry, a call brings another mask beside it, or it would be too large.

    Raises SpecError where mask_mod has no value for some pair.
    """
    mask_mod = functions.mask_mod
    if mask_mod is None or mask_mod.depends_on("b") or spec.mask is not None or spec.kv_cache:
        return None
    heads = spec.num_heads if mask_mod.depends_on("h") else 1
    if heads * L * S > MOST_PAIRS:
        return None
    offset = S - L if spec.causal == "bottom_right" else 0
    mask = torch.empty(heads, L, S, dtype=torch.bool)
    for first in range(0, L, _ROWS):
        rows = torch.arange(first, min(first + _ROWS, L))
        mask[:, first : first + _ROWS] = _rows(functions, heads, rows + offset, S)
    found: BoolArray = (mask if heads > 1 else mask[0]).numpy()
    return found


def _rows(functions: Functions, heads: int, places: Tensor, S: int) -> Tensor:
    assert functions.mask_mod is not None
    leaves = {
        "b": torch.zeros(1, 1, 1, dtype=torch.int64),
        "h": torch.arange(heads).view(-1, 1, 1),
        "q_idx": places.view(-1, 1),
        "kv_idx": torch.arange(S),
    }
    try:
        return computed(functions.mask_mod, functions.mask_tensors, leaves)
    except (IndexError, ZeroDivisionError, RuntimeError) as error:
        places_said = f"queries up to {int(places.max())} and keys up to {S - 1}"
        raise SpecError("mask_mod", f"a value for {places_said}", str(error).partition("\n")[0]) from error


def sizes_within(spec: AttentionSpec, functions: Functions, sizes: Mapping[str, int | str]) -> dict[str, int]:
    """Symbol -> the largest size that tensors allow which a function reads by a place itself, such as doc[q_idx].

    sizes   of b, q_idx and kv_idx, fixed or by name. Raises SpecError where a fixed one is too large.
    """
    limits: dict[str, int] = {}
    for name in ("score_mod", "mask_mod"):
        function: ScoreFunction | None = getattr(functions, name)
        for step in () if function is None else function.steps:
            if step.op != "load":
                continue
            kind = function.tensors[int(step.value)]  # type: ignore[union-attr]
            for arg, most in zip(step.args, kind.shape, strict=True):
                leaf = function.steps[arg].op  # type: ignore[union-attr]
                size = spec.num_heads if leaf == "h" else sizes.get(leaf, 0)
                if spec.kv_cache and leaf != "h":  # a cache may be longer than what is visible of it
                    continue
                if isinstance(size, str):
                    limits[size] = min(most, limits.get(size, most))
                elif size > most:
                    got = f"one of {most}, read by {leaf}"
                    raise SpecError(name, f"a captured tensor of at least {size} elements", got)
    return limits

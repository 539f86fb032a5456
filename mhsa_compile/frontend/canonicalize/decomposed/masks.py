"""The masks of a decomposed attention: what they hide, as the operator says it.

- A triangle of causality becomes `is_causal`, where nothing is lost by it.
- A choice between the scores and -inf becomes a bool mask; so does 0 or -inf that is added.
- What is added otherwise stays added, a finite stand-in for -inf included: over a row that it hides whole, the softmax
  is that of the scores as they are.
- A choice between the scores and a finite number hides, too, but a row that is hidden whole gets the mean of the
  values. Half the lowest float32, added, does just that: no score is left beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from mhsa_compile.frontend.canonicalize.decomposed.causal import (
    Flags,
    always,
    conjuncts,
    is_constant,
    is_triangle,
    without_expansion,
)
from mhsa_compile.frontend.canonicalize.decomposed.operands import AttentionOperands
from mhsa_compile.frontend.canonicalize.decomposed.scores import AdditiveMask, NotRecognised, SelectiveMask
from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphView

HIDES = -1e4
"""A fill of at most this hides: beside any usual score its weight is exp(-10000), zero at every dtype."""

LEAST = -(2.0**127)
"""The least fill that is added: no score is left beside it, and it is finite in units of log2, in which kernels add;
float32's lowest is not."""


@dataclass
class Masks:
    """What an Attention is to be given. A place is shown where all of `conditions` hold; all of `added` are added."""

    causal: bool = False
    conditions: list[Flags] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # values of the graph whose shapes, together, are the mask's
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Choice:
    """A mask of two values: where `flags` hold the scores stay; elsewhere `fill` replaces them, or is added to them."""

    flags: Flags
    fill: float
    replaces: bool


def collect(
    rewriter: Rewriter,
    parts: list[AdditiveMask | SelectiveMask],
    operands: AttentionOperands,
) -> Masks:
    """The masks of one attention. Raises NotRecognised."""
    masks, dtype = Masks(), operands.dtype
    for mask in reversed(parts):
        if isinstance(mask, AdditiveMask) and mask.windows:
            masks.added.append(_times(rewriter, _of_each_entry(rewriter, mask, operands), mask.factor, dtype))
            continue
        if isinstance(mask, AdditiveMask) and mask.flat and len(rewriter.graph.dims(mask.name)) == 3:
            masks.added.append(_times(rewriter, _with_heads(rewriter, mask, operands), mask.factor, dtype))
            continue
        choice = _as_choice(rewriter.graph, mask)
        if choice is not None:
            _add_choice(rewriter, masks, choice, dtype)
        elif isinstance(mask, AdditiveMask) and not is_constant(rewriter.graph, mask.name, 0):
            name = _of_dtype(rewriter.graph, without_expansion(rewriter.graph, mask.name), dtype)
            masks.sources.append(name)
            masks.added.append(_times(rewriter, name, mask.factor, dtype))
    return masks


def shifts_all(graph: KnownGraph, mask: AdditiveMask | SelectiveMask) -> bool:
    """Whether a mask adds one number to all scores, which a softmax does not mind, unless something is beside them."""
    number = graph.scalar(mask.name) if isinstance(mask, AdditiveMask) else None
    return number is not None and abs(number) < -HIDES  # of larger ones the sums are rounded


def _of_each_entry(rewriter: Rewriter, mask: AdditiveMask, operands: AttentionOperands) -> str:
    """(B, 1 or H, L, S) of a mask of W windows: entry b has that of window b mod W. Raises NotRecognised."""
    graph, name, windows = rewriter.graph, mask.name, mask.windows
    dims = graph.shape(name)
    if dims not in {(1, windows, heads, *operands.scores[2:]) for heads in (1, operands.scores[1])}:
        expected = f"(1, {windows}, 1 or H, L, S) in full"
        raise NotRecognised(f"the mask {name!r} of {windows} windows is {dims}, not {expected}")
    if graph.dtype(name) != operands.dtype:
        raise NotRecognised(f"the mask {name!r} of windows is {graph.dtype(name)}, the queries are {operands.dtype}")
    zero, one, axis = (rewriter.constant(value, "int64") for value in (0, 1, [0]))
    batch = rewriter.node("Squeeze", rewriter.node("Shape", operands.query, start=0, end=1), axis)
    window = rewriter.node("Mod", rewriter.node("Range", zero, batch, one), rewriter.constant(windows, "int64"))
    return rewriter.node("Gather", rewriter.node("Squeeze", name, axis), window, axis=0)


def _with_heads(rewriter: Rewriter, mask: AdditiveMask, of: AttentionOperands) -> str:
    """(B or 1, H or 1, 1 or L, S) of a mask (B * H or 1, 1 or L, S). Raises NotRecognised."""
    name = _of_dtype(rewriter.graph, mask.name, of.dtype)
    whole = rewriter.node("Unsqueeze", name, rewriter.constant([0], "int64"))
    if rewriter.graph.dims(name)[0] == 1:
        return whole
    return rewriter.node("Reshape", whole, rewriter.constant([-1, of.scores[1], 0, 0], "int64"))


def _as_choice(graph: KnownGraph, mask: AdditiveMask | SelectiveMask) -> _Choice | None:
    """A mask of two values: one that hides and, if it is added, zero. None for any other."""
    if isinstance(mask, SelectiveMask):
        return _Choice(Flags(mask.name, mask.positive), mask.fill, replaces=True)
    where = graph.producer(without_expansion(graph, mask.name), "Where")
    if where is None:
        return None
    one, other = (graph.scalar(branch) for branch in where.input[1:])
    if one == 0 and other is not None and other <= HIDES:
        return _Choice(Flags(where.input[0], True), other * mask.factor, replaces=False)
    if other == 0 and one is not None and one <= HIDES:
        return _Choice(Flags(where.input[0], False), one * mask.factor, replaces=False)
    return None


def _add_choice(rewriter: Rewriter, masks: Masks, choice: _Choice, dtype: str) -> None:
    graph, fill = rewriter.graph, choice.fill
    if fill > HIDES:
        raise NotRecognised(f"masked scores are replaced by {fill:g}, which does not hide them")
    parts = [part for part in conjuncts(graph, choice.flags) if not always(graph, part)]
    others = [part for part in parts if not is_triangle(graph, part)]
    if fill > -1e30 and (choice.replaces or not others):
        masks.notes.append(f"what is masked with {fill:g} is taken to weigh nothing beside any score")
    if np.isneginf(fill) or not others:  # under a triangle alone every query sees a key, and what is hidden weighs zero
        masks.causal |= len(others) < len(parts)
        masks.conditions += others
        masks.sources += [part.name for part in others]
        return
    if choice.replaces:
        if dtype == "float16":
            raise NotRecognised(f"masked scores are replaced by {fill:g} in float16; -inf would be a mask")
        fill = float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]
    fill = max(fill, LEAST)
    masks.sources += [part.name for part in parts]
    condition = _all_of(rewriter, parts)
    masks.added.append(rewriter.node("Where", condition, rewriter.constant(0, dtype), rewriter.constant(fill, dtype)))


def _of_dtype(graph: GraphView, name: str, dtype: str) -> str:
    """The mask, or what it was cast from, at the dtype of the queries. Raises NotRecognised."""
    if graph.dtype(name) == dtype:
        return name
    cast = graph.producer(name, "Cast")
    if cast is None or graph.dtype(cast.input[0]) != dtype:
        raise NotRecognised(f"the mask {name!r} is {graph.dtype(name)}, the queries are {dtype}")
    return str(cast.input[0])


def _times(rewriter: Rewriter, name: str, factor: float, dtype: str) -> str:
    return name if factor == 1 else rewriter.node("Mul", name, rewriter.constant(factor, dtype))


def one_mask(rewriter: Rewriter, masks: Masks, dtype: str) -> str:
    """One mask made of all of `masks`, or an empty name where there are none."""
    added = masks.added[0] if masks.added else ""
    for name in masks.added[1:]:
        added = rewriter.node("Add", added, name)
    if not masks.conditions:
        return added
    condition = _all_of(rewriter, masks.conditions)
    return rewriter.node("Where", condition, added, rewriter.constant(-np.inf, dtype)) if added else condition


def _all_of(rewriter: Rewriter, parts: list[Flags]) -> str:
    names = [part.name if part.positive else rewriter.node("Not", part.name) for part in parts]
    result = names[0]
    for name in names[1:]:
        result = rewriter.node("And", result, name)
    return result

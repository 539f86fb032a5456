"""What queries see of the keys, and what becomes of their scores, in NumPy and at the arrays' own dtype.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.field_notes import formulas_of
from mhsa_compile.spec.outputs import SoftmaxOutputs
from mhsa_compile.spec.score_functions import ScoreFunction
from mhsa_compile.verification.oracle import score_functions, softmax_outputs

FORMULAS = formulas_of(AttentionSpec)
FUNCTIONS = ("score_mod", "mask_mod")
"""Attributes that are functions of scores, in the order of what they capture."""
LARGEST_FILL = -1e4
"""What is added to hide a key is no more than this."""


@dataclass(frozen=True)
class ScoreModOfPairs:
    """What becomes of the scores of some queries and keys. A score is NaN where `broken`, too."""

    function: ScoreFunction | None
    tensors: Sequence[np.ndarray]
    places: Mapping[str, np.ndarray]
    broken: np.ndarray

    def of_keys(self, keys: slice) -> ScoreModOfPairs:
        places = {**self.places, "kv_idx": self.places["kv_idx"][keys]}
        return replace(self, places=places, broken=self.broken[..., keys] if self.broken.ndim else self.broken)

    def __call__(self, scores: np.ndarray) -> np.ndarray:
        result = scores
        if self.function is not None:
            result = score_functions.evaluate(self.function, self.tensors, self.places, scores)
        return np.where(self.broken, np.nan, np.broadcast_to(result, scores.shape)).astype(scores.dtype)


@dataclass(frozen=True)
class Scoring:
    """How some queries' scores of some keys become weights.

    visible  bool (1 or B, 1 or H, queries, keys)
    bias     what is added to the scores, as `visible` but for its dtype; -inf hides
    limits   numbers by the names of the formulas of AttentionSpec that they are of
    no_key   (H,): for each head one more score, of no value; None is none
    score_function   what becomes of scores after the formulas; one of -inf hides its key
    """

    visible: np.ndarray
    bias: np.ndarray | None
    scale: float
    limits: Mapping[str, float]
    no_key: np.ndarray | None
    score_function: ScoreModOfPairs | None = None

    @property
    def sight(self) -> np.ndarray:
        """`visible`, and not hidden by the bias either."""
        return self.visible if self.bias is None else self.visible & ~np.isneginf(self.bias)

    @property
    def filled(self) -> np.ndarray | None:
        """Rows that see no key but through a finite fill, bool (1 or B, 1 or H, queries, 1); None if there is none.

        Added to all scores of a row it hides none of them: what is left of the scores is their rounding.
        """
        if self.bias is None:
            return None
        largest = np.where(self.visible, self.bias, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
        rows: np.ndarray = np.isfinite(largest) & (largest <= LARGEST_FILL)
        return rows if rows.any() else None

    def of_keys(self, keys: slice) -> Scoring:
        bias = None if self.bias is None else _take(self.bias, 3, keys)
        function = None if self.score_function is None else self.score_function.of_keys(keys)
        return replace(self, visible=self.visible[..., keys], bias=bias, score_function=function)


@dataclass(frozen=True)
class View:
    """Attention of S keys, as a node says it.

    offset      query i stands at i + offset among the keys; (B, 1, 1, 1) where it is each entry's own
    inputs      those of `mhsa.Attention` that there are, by its names; the mask of four axes, over all S keys
    captured    what functions of scores capture, by their names
    """

    S: int
    offset: int | np.ndarray
    inputs: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]
    captured: Mapping[str, Sequence[np.ndarray]]

    @classmethod
    def of(
        cls,
        inputs: Mapping[str, np.ndarray],
        attributes: Mapping[str, Any],
        captured: Mapping[str, Sequence[np.ndarray]],
        *,
        L: int,
        S: int,
        pads: bool,
    ) -> View:
        """`pads` is whether a mask over fewer keys hides the rest, as from opset 24 on."""
        offset: int | np.ndarray = 0
        if (lengths := inputs.get("nonpad_kv_seqlen")) is not None:
            offset = lengths.reshape(-1, 1, 1, 1) - L
        if (past := inputs.get("past_key")) is not None:
            offset = past.shape[2]
        if (mask := inputs.get("attn_mask")) is not None:
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            inputs = {**inputs, "attn_mask": _padded(mask, S) if pads else mask}
        return cls(S, offset, inputs, attributes, captured)

    def scoring(self, rows: slice, B: int, H: int, scale: float) -> Scoring:
        """What becomes of these queries' scores of all S keys."""
        pairs = Pairs(self, rows, B, H)
        masks = [array for hides in HIDING if (array := hides(pairs)) is not None]
        biases = [array for adds in ADDING if (array := adds(pairs)) is not None]
        limits = {name: self.attributes[name] for name in FORMULAS if self.attributes.get(name)}
        bias = functools.reduce(np.add, biases) if biases else None
        visible, no_key = functools.reduce(np.logical_and, masks), self.inputs.get("sinks")
        return Scoring(visible, bias, scale, limits, no_key, _score_mod(pairs))

    def function(self, name: str) -> ScoreFunction | None:
        text = self.attributes.get(name)
        return ScoreFunction.from_json(name, text) if text else None


@dataclass(frozen=True)
class Pairs:
    """Some queries and all S keys of an attention; what is said of them is (1 or B, 1 or H, rows, S)."""

    view: View
    rows: slice
    B: int
    H: int

    @functools.cached_property
    def distance(self) -> np.ndarray:
        """How far query i, which stands at i + offset among the keys, is behind each key."""
        queries = np.arange(self.rows.start, self.rows.stop)[:, np.newaxis]
        distance: np.ndarray = queries + self.view.offset - np.arange(self.view.S)
        return distance if distance.ndim == 4 else distance[np.newaxis, np.newaxis]

    @property
    def places(self) -> dict[str, np.ndarray]:
        """What functions are told of a pair."""
        q_idx = np.arange(self.rows.start, self.rows.stop)[:, np.newaxis] + self.view.offset
        return {
            "b": np.arange(self.B).reshape(-1, 1, 1, 1),
            "h": np.arange(self.H).reshape(-1, 1, 1),
            "q_idx": np.asarray(q_idx, np.int64),
            "kv_idx": np.arange(self.view.S),
        }


def _band(pairs: Pairs) -> np.ndarray:
    """Causality and windows."""
    left, right = (pairs.view.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    distance = pairs.distance
    visible = np.ones((1, 1, *distance.shape[-2:]), dtype=np.bool_)
    if pairs.view.attributes.get("is_causal"):
        visible = visible & (distance >= 0)
    if left is not None and left >= 0:
        visible = visible & (distance <= left)
    if right is not None and right >= 0:
        visible = visible & (-distance <= right)
    return visible


def _mask_mod(pairs: Pairs) -> np.ndarray | None:
    function = pairs.view.function("mask_mod")
    if function is None:
        return None
    return score_functions.evaluate(function, pairs.view.captured["mask_mod"], pairs.places)


def _lengths(pairs: Pairs) -> np.ndarray | None:
    lengths = pairs.view.inputs.get("nonpad_kv_seqlen")
    return None if lengths is None else np.arange(pairs.view.S) < lengths.reshape(-1, 1, 1, 1)


def _call_mask(pairs: Pairs, *, bool_mask: bool) -> np.ndarray | None:
    mask = pairs.view.inputs.get("attn_mask")
    return None if mask is None or (mask.dtype == np.bool_) != bool_mask else _take(mask, 2, pairs.rows)


def _slopes(pairs: Pairs) -> np.ndarray | None:
    """slope * (key - place of the query), (1 or B, H, rows, S); at least in float32."""
    slopes = pairs.view.inputs.get("slopes")
    if slopes is None:
        return None
    wide = slopes.astype(np.promote_types(np.float32, slopes.dtype))
    alibi: np.ndarray = (wide.reshape(-1, 1, 1) * -pairs.distance).astype(slopes.dtype)
    return alibi


HIDING: Sequence[Callable[[Pairs], np.ndarray | None]] = (
    _band,
    _mask_mod,
    _lengths,
    partial(_call_mask, bool_mask=True),
)
"""What hides keys: each says which pairs it leaves, bool; None is all."""
ADDING: Sequence[Callable[[Pairs], np.ndarray | None]] = (partial(_call_mask, bool_mask=False), _slopes)
"""What is added to scores; None is nothing."""


def _score_mod(pairs: Pairs) -> ScoreModOfPairs | None:
    view = pairs.view
    score_mod, mask_mod = view.function("score_mod"), view.function("mask_mod")
    if score_mod is None and mask_mod is None:
        return None
    broken = np.zeros((), np.bool_)
    if mask_mod is not None:
        broken = score_functions.broken_pairs(mask_mod, view.captured["mask_mod"], pairs.places)
    return ScoreModOfPairs(score_mod, view.captured.get("score_mod", ()), pairs.places, broken)


def _padded(mask: np.ndarray, S: int) -> np.ndarray:
    """Extends a mask over fewer than S keys to all S, and hides the rest."""
    widths = [(0, 0)] * (mask.ndim - 1) + [(0, S - mask.shape[-1])]
    return np.pad(mask, widths, constant_values=False if mask.dtype == np.bool_ else -np.inf)


def stages(q: np.ndarray, k: np.ndarray, scoring: Scoring) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Scores, capped, with bias and masked, and as weights: the operator's qk_matmul_output 0 to 3; (B, H, L, S)."""
    visible, bias, no_key, sight = scoring.visible, scoring.bias, scoring.no_key, scoring.sight
    scale = q.dtype.type(scoring.scale)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf may come, and are carried as IEEE says
        raw = (q * scale) @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3)
        capped = raw
        for name, formula in FORMULAS.items():
            if name in scoring.limits:
                capped = formula(np, capped, q.dtype.type(scoring.limits[name]))
        modified = capped if scoring.score_function is None else scoring.score_function(capped)
        biased = np.where(visible, modified if bias is None else modified + bias, -np.inf)
        if bias is not None:
            biased = np.where(np.isneginf(bias), -np.inf, biased)
        sighted = sight.any(axis=-1, keepdims=True) & ~np.isneginf(biased).all(axis=-1, keepdims=True)
        largest = np.where(sighted, biased.max(axis=-1, keepdims=True, initial=-np.inf), 0)
        if no_key is not None:
            largest = np.maximum(largest, no_key.reshape(-1, 1, 1))
        exponents = np.exp(biased - largest)
        total = exponents.sum(axis=-1, keepdims=True)
        if no_key is not None:
            total = total + np.exp(no_key.reshape(-1, 1, 1) - largest)
        weights = np.where(sight, exponents / np.where(sighted, total, 1), 0)
    return raw.astype(q.dtype), capped.astype(q.dtype), biased.astype(q.dtype), weights.astype(q.dtype)


def attend_exactly(q: np.ndarray, k: np.ndarray, v: np.ndarray, scoring: Scoring) -> np.ndarray:
    """Attention (B, H, L, F); a non-finite value is added key by key, to the queries that see it."""
    _, _, biased, weights = stages(q, k, scoring)
    v = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    sight = np.broadcast_to(scoring.sight, weights.shape)
    if scoring.score_function is not None:  # whose scores of -inf hide, too
        sight = sight & ~np.isneginf(biased)
    broken = ~np.isfinite(v).all(axis=(0, 1, 3))
    y = weights @ np.where(broken[:, np.newaxis], 0, v)
    with np.errstate(invalid="ignore"):
        for key in np.flatnonzero(broken):
            term = weights[..., key, np.newaxis] * v[..., key, np.newaxis, :]
            y = y + np.where(sight[..., key, np.newaxis], term, 0)
    return np.asarray(y)


def look_exactly(q: np.ndarray, k: np.ndarray, scoring: Scoring, request: SoftmaxOutputs) -> dict[str, np.ndarray]:
    return softmax_outputs.softmax_outputs_of_rows(stages(q, k, scoring)[2], scoring.no_key, request)


def _take(array: np.ndarray, axis: int, part: slice) -> np.ndarray:
    """A part of an axis, or all of it where it broadcasts."""
    return array if array.shape[axis] == 1 else array[(slice(None),) * axis + (part,)]

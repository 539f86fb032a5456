"""What queries see of the keys, and what becomes of their scores, in NumPy and at the arrays' own dtype.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mhsa_compile.spec.outputs import SoftmaxOutputs
from mhsa_compile.spec.score_functions import ScoreFunction
from mhsa_compile.verification.oracle import score_functions, softmax_outputs

Array = np.ndarray
LARGEST_FILL = -1e4
"""What is added to hide a key is no more than this."""


@dataclass(frozen=True)
class ViewFunctions:
    """mask_mod and score_mod of `mhsa.Attention`, and what each captures."""

    mask_mod: ScoreFunction | None
    score_mod: ScoreFunction | None
    mask_tensors: Sequence[Array]
    score_tensors: Sequence[Array]


@dataclass(frozen=True)
class ScoreMod:
    """What becomes of the scores of some queries and keys. A score is NaN where `broken`, too."""

    function: ScoreFunction | None
    tensors: Sequence[Array]
    places: Mapping[str, Array]
    broken: Array

    def of_keys(self, keys: slice) -> ScoreMod:
        places = {**self.places, "kv_idx": self.places["kv_idx"][keys]}
        return replace(self, places=places, broken=self.broken[..., keys] if self.broken.ndim else self.broken)

    def __call__(self, scores: Array) -> Array:
        made = scores
        if self.function is not None:
            made = score_functions.evaluated(self.function, self.tensors, self.places, scores)
        return np.where(self.broken, np.nan, np.broadcast_to(made, scores.shape)).astype(scores.dtype)


@dataclass(frozen=True)
class Scoring:
    """How some queries' scores of some keys become weights.

    visible  bool (1 or B, 1 or H, queries, keys)
    bias     what is added to the scores, as `visible` but for its dtype; -inf hides
    softcap  0 is none
    sinks    (H,)
    score_mod   what becomes of scores within their softcap; one of -inf hides its key
    """

    visible: Array
    bias: Array | None
    scale: float
    softcap: float
    sinks: Array | None
    score_mod: ScoreMod | None = None

    @property
    def seen(self) -> Array:
        """`visible`, and not hidden by the bias either."""
        return self.visible if self.bias is None else self.visible & ~np.isneginf(self.bias)

    @property
    def filled(self) -> Array | None:
        """Rows that see no key but through a finite fill, bool (1 or B, 1 or H, queries, 1); None if there is none.

        Added to all scores of a row it hides none of them: what is left of the scores is their rounding.
        """
        if self.bias is None:
            return None
        largest = np.where(self.visible, self.bias, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
        rows: Array = np.isfinite(largest) & (largest <= LARGEST_FILL)
        return rows if rows.any() else None

    def of_keys(self, keys: slice) -> Scoring:
        bias = None if self.bias is None else _take(self.bias, 3, keys)
        score_mod = None if self.score_mod is None else self.score_mod.of_keys(keys)
        return replace(self, visible=self.visible[..., keys], bias=bias, score_mod=score_mod)


@dataclass(frozen=True)
class View:
    """What queries see of S keys, and what their scores gain; as inputs and attributes of ONNX Attention say it.

    offset   query i stands at i + offset among the keys; (B, 1, 1, 1) where it is each entry's own
    lengths  (B,): the number of keys of each entry
    mask     of four axes, over all S keys
    slopes   (H,), as in `mhsa.Attention`
    """

    S: int
    offset: int | Array
    lengths: Array | None
    mask: Array | None
    slopes: Array | None
    attributes: Mapping[str, Any]
    functions: ViewFunctions

    def of(self, rows: slice, B: int, H: int) -> tuple[Array, Array | None]:
        """What these queries see, bool (1 or B, 1 or H, rows, S), and what is added to their scores."""
        visible = self._band(rows)
        mask_mod = self.functions.mask_mod
        if mask_mod is not None:
            places = self._places(rows, B, H)
            visible = visible & score_functions.evaluated(mask_mod, self.functions.mask_tensors, places)
        if self.lengths is not None:
            visible = visible & (np.arange(self.S) < self.lengths.reshape(-1, 1, 1, 1))
        bias = None if self.mask is None else _take(self.mask, 2, rows)
        if bias is not None and bias.dtype == np.bool_:
            visible, bias = visible & bias, None
        return visible, bias if self.slopes is None else self._with_slopes(bias, rows, self.slopes)

    def score_mod(self, rows: slice, B: int, H: int) -> ScoreMod | None:
        """What becomes of these queries' scores of all S keys."""
        given = self.functions
        if given.score_mod is None and given.mask_mod is None:
            return None
        places, broken = self._places(rows, B, H), np.zeros((), np.bool_)
        if given.mask_mod is not None:
            broken = score_functions.broken_pairs(given.mask_mod, given.mask_tensors, places)
        return ScoreMod(given.score_mod, given.score_tensors, places, broken)

    def _places(self, rows: slice, B: int, H: int) -> dict[str, Array]:
        """What functions are told of a pair, each broadcastable to (B, H, rows, S)."""
        q_idx = np.arange(rows.start, rows.stop)[:, np.newaxis] + self.offset
        return {
            "b": np.arange(B).reshape(-1, 1, 1, 1),
            "h": np.arange(H).reshape(-1, 1, 1),
            "q_idx": np.asarray(q_idx, np.int64),
            "kv_idx": np.arange(self.S),
        }

    def _band(self, rows: slice) -> Array:
        """Causality and windows, (1 or B, 1, rows, S)."""
        distance = self._distance(rows)
        left, right = (self.attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
        visible = np.ones((1, 1, *distance.shape[-2:]), dtype=np.bool_)
        if self.attributes.get("is_causal"):
            visible = visible & (distance >= 0)
        if left is not None and left >= 0:
            visible = visible & (distance <= left)
        if right is not None and right >= 0:
            visible = visible & (-distance <= right)
        return visible

    def _distance(self, rows: slice) -> Array:
        """(1 or B, 1, rows, S): how far query i, which stands at i + offset among the keys, is behind each key."""
        distance: Array = np.arange(rows.start, rows.stop)[:, np.newaxis] + self.offset - np.arange(self.S)
        return distance if distance.ndim == 4 else distance[np.newaxis, np.newaxis]

    def _with_slopes(self, bias: Array | None, rows: slice, slopes: Array) -> Array:
        """The bias with slope * (key - place of the query) on top, (1 or B, H, rows, S); at least in float32."""
        wide = slopes.astype(np.promote_types(np.float32, slopes.dtype))
        alibi = (wide.reshape(-1, 1, 1) * -self._distance(rows)).astype(slopes.dtype)
        result: Array = alibi if bias is None else bias + alibi
        return result


def padded(mask: Array, S: int) -> Array:
    """Extends a mask over fewer than S keys to all S: from opset 24 on, it masks the rest."""
    widths = [(0, 0)] * (mask.ndim - 1) + [(0, S - mask.shape[-1])]
    return np.pad(mask, widths, constant_values=False if mask.dtype == np.bool_ else -np.inf)


def stages(q: Array, k: Array, scoring: Scoring) -> tuple[Array, Array, Array, Array]:
    """Scores, capped, with bias and masked, and as weights: the operator's qk_matmul_output 0 to 3; (B, H, L, S)."""
    visible, bias, sinks, seen = scoring.visible, scoring.bias, scoring.sinks, scoring.seen
    scale, softcap = q.dtype.type(scoring.scale), q.dtype.type(scoring.softcap)
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf may come, and are carried as IEEE says
        raw = (q * scale) @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3)
        capped = np.tanh(raw / softcap) * softcap if scoring.softcap else raw
        modified = capped if scoring.score_mod is None else scoring.score_mod(capped)
        biased = np.where(visible, modified if bias is None else modified + bias, -np.inf)
        if bias is not None:
            biased = np.where(np.isneginf(bias), -np.inf, biased)
        sighted = seen.any(axis=-1, keepdims=True) & ~np.isneginf(biased).all(axis=-1, keepdims=True)
        largest = np.where(sighted, biased.max(axis=-1, keepdims=True, initial=-np.inf), 0)
        if sinks is not None:
            largest = np.maximum(largest, sinks.reshape(-1, 1, 1))
        exponents = np.exp(biased - largest)
        total = exponents.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks.reshape(-1, 1, 1) - largest)
        weights = np.where(seen, exponents / np.where(sighted, total, 1), 0)
    return raw.astype(q.dtype), capped.astype(q.dtype), biased.astype(q.dtype), weights.astype(q.dtype)


def attend_exactly(q: Array, k: Array, v: Array, scoring: Scoring) -> Array:
    """Attention (B, H, L, F); a non-finite value is added key by key, to the queries that see it."""
    _, _, biased, weights = stages(q, k, scoring)
    v = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    seen = np.broadcast_to(scoring.seen, weights.shape)
    if scoring.score_mod is not None:  # whose scores of -inf hide, too
        seen = seen & ~np.isneginf(biased)
    broken = ~np.isfinite(v).all(axis=(0, 1, 3))
    y = weights @ np.where(broken[:, np.newaxis], 0, v)
    with np.errstate(invalid="ignore"):
        for key in np.flatnonzero(broken):
            term = weights[..., key, np.newaxis] * v[..., key, np.newaxis, :]
            y = y + np.where(seen[..., key, np.newaxis], term, 0)
    return np.asarray(y)


def look_exactly(q: Array, k: Array, scoring: Scoring, wanted: SoftmaxOutputs) -> dict[str, Array]:
    return softmax_outputs.softmax_outputs_of_rows(stages(q, k, scoring)[2], scoring.sinks, wanted)


def _take(array: Array, axis: int, part: slice) -> Array:
    """A part of an axis, or all of it where it broadcasts."""
    return array if array.shape[axis] == 1 else array[(slice(None),) * axis + (part,)]

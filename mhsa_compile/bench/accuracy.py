"""Whether a timed run was right: sampled rows of the output against float64, within the error budget of `verify`.

The oracle of `verify` computes every row, which at L = 16384 takes longer than everything that is timed. A row of
attention depends on its own query and on all the keys, so some rows, computed in full, judge all the keys: the first,
the last and others at random, of every head, in the first and the last batch entry.
Notation: B batch, L query length, S key length, D embed, H heads, F value head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from mhsa_compile.nn.functional import attend, to_numpy, to_torch
from mhsa_compile.nn.score_features import EagerScoring
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.verification.error_budget import budget, in_float64, max_error, share_of_budget
from mhsa_compile.verification.oracle.evaluate import eager, oracle
from mhsa_compile.verification.precision import Precision
from mhsa_compile.verification.random_inputs import Arrays
from mhsa_compile.verification.stored_model import stored_model

if TYPE_CHECKING:
    from torch import Tensor

    from mhsa_compile.runtime.artifact.artifact import Artifact

ROWS = 64
"""Query rows that are sampled; all of them where there are no more."""

_PLAIN = {
    *("embed_dim", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "kv_embed_dim", "v_embed_dim", "bias"),
    *("dtype", "causal", "window", "static_mask", "mask", "scale", "outputs"),
}
"""Fields of a spec that the sampled rows know, and peers, which are written after it."""


def beyond_plain(spec: AttentionSpec) -> list[str]:
    """What a spec asks for beyond plain attention with masks."""
    return [name for name in spec.__struct_fields__ if name not in _PLAIN and getattr(spec, name)]


@dataclass(frozen=True)
class Truth:
    """Some rows of the outputs in float64, and the largest error that is allowed there.

    entries  of the batch, and `rows` of the queries; None is all of both, for a model that is known as a graph only
    """

    expected: tuple[np.ndarray, ...]
    budgets: tuple[float, ...]
    entries: list[int] | None
    rows: list[int] | None

    def share(self, outputs: list[np.ndarray]) -> float:
        """The largest error as a share of its budget: above 1 is wrong."""
        pairs = zip(self.expected, outputs, self.budgets, strict=True)
        return max(share_of_budget(max_error(truth, self._sample(output)), budget) for truth, output, budget in pairs)

    @property
    def budget(self) -> float:
        """The largest error allowed, of the output with the least."""
        return min(self.budgets)

    def _sample(self, output: np.ndarray) -> np.ndarray:
        if self.entries is None or self.rows is None:
            return output
        return np.asarray(output)[self.entries][..., self.rows, :]


def returns_y_alone(artifact: Artifact) -> bool:
    spec = artifact.manifest.spec
    return spec is None or spec.outputs == ("y",)


def truth(artifact: Artifact, inputs: Arrays, weights: Arrays, seed: int = 0) -> Truth:
    """What an artifact's outputs must be on these inputs, and how far off they may be."""
    spec = artifact.manifest.spec
    precision = Precision.of(artifact.manifest)
    if spec is None or not precision.is_plain or beyond_plain(spec):
        return _whole(artifact, inputs, precision)
    query = inputs["q"] if "q" in inputs else inputs["x"]
    B, L = query.shape[0], query.shape[-2]
    entries = sorted({0, B - 1})
    rows = _sampled_rows(L, seed)
    rounded, exact = ({**inputs, **weights}, {n: in_float64(a) for n, a in {**inputs, **weights}.items()})
    expected, yardstick = (np.stack([_rows(spec, arrays, e, rows) for e in entries]) for arrays in (exact, rounded))
    return Truth((expected,), (budget(expected, yardstick, spec.dtype),), entries, rows)


def _whole(artifact: Artifact, inputs: Arrays, precision: Precision) -> Truth:
    """The truth of all rows, by the oracle and the yardstick of `verify` themselves."""
    model = stored_model(artifact)
    expected = oracle(model, inputs)
    yardstick = eager(model, inputs, precision)
    budgets = [budget(e, y, str(y.dtype)) for e, y in zip(expected, yardstick, strict=True)]
    return Truth(tuple(expected), tuple(budgets), None, None)


def _sampled_rows(L: int, seed: int) -> list[int]:
    if L <= ROWS:
        return list(range(L))
    between = 1 + np.random.default_rng(seed).choice(L - 2, ROWS - 2, replace=False)
    return [0, *sorted(int(row) for row in between), L - 1]


def _rows(spec: AttentionSpec, arrays: Arrays, entry: int, rows: list[int]) -> np.ndarray:
    """Rows of one batch entry's output, at the dtype of the arrays, PyTorch's arithmetic: (n, D) or (H, n, F)."""

    def tensor(name: str) -> Tensor:
        return to_torch(arrays[name][entry : entry + 1])

    if "q" in arrays:
        q, k, v = tensor("q")[:, :, rows], tensor("k"), tensor("v")
    else:
        x, *sources = (tensor(name) for name in ("x", *spec.sources))
        H, G, E, F = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
        inputs = ("q", x[:, rows], (H, E)), ("k", sources[0], (G, E)), ("v", sources[1], (G, F))
        q, k, v = (torch.unflatten(_linear(arrays, n, a), -1, width).transpose(1, 2) for n, a, width in inputs)
    L = arrays["q" if "q" in arrays else "x"].shape[-2]
    visible, bias = _visible_and_bias(spec, arrays, entry, rows, L, k.shape[2])
    y = attend(q, k, v, EagerScoring(visible, bias), spec.head_dim**-0.5 if spec.scale is None else spec.scale)
    return to_numpy((y if "q" in arrays else _linear(arrays, "out", y.transpose(1, 2).flatten(2)))[0])


def _linear(arrays: Arrays, part: str, x: Tensor) -> Tensor:
    bias = f"{part}_proj.bias"
    weight = to_torch(arrays[f"{part}_proj.weight"])
    return torch.nn.functional.linear(x, weight, to_torch(arrays[bias]) if bias in arrays else None)


def _visible_and_bias(
    spec: AttentionSpec, arrays: Arrays, entry: int, rows: list[int], L: int, S: int
) -> tuple[Tensor | None, Tensor | None]:
    """What these queries see, bool, and what is added to their scores; broadcastable to (1, H, n, S)."""
    places = spec.visible(rows, L, S)
    masks = [] if places is None else [places]
    bias, mask = None, arrays.get("mask")
    if mask is not None:
        mask = mask[:, np.newaxis, np.newaxis, :] if spec.mask == "key_padding" else mask
        mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        mask = mask[entry : entry + 1] if mask.shape[0] > 1 else mask
        mask = mask[:, :, rows] if mask.shape[2] > 1 else mask
        bias = to_torch(mask) if spec.mask == "additive" else None
        masks += [] if spec.mask == "additive" else [mask]
    return (to_torch(np.logical_and.reduce(np.broadcast_arrays(*masks))) if masks else None), bias

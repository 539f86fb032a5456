"""What a peer is, and what it is given to compute.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from mhsa_compile.bench.accuracy import beyond_plain
from mhsa_compile.bench.timing import Call
from mhsa_compile.errors import ModelError
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.verification.random_inputs import Arrays

DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
SCORES_SHARE = 4
"""A peer that writes all scores down may use a quarter of the memory for them: it often needs them twice."""
WRONG = 10
"""An error of so many budgets is no rounding: a mask was ignored, or a query that sees nothing became NaN."""


@dataclass(frozen=True)
class Problem:
    """An artifact's graph with its weights.

    inputs       sets of arrays by input name, of equal shapes
    error_share  the largest error of the outputs for the first set, as a share of the budget
    """

    artifact: Artifact
    inputs: Sequence[Arrays]
    error_share: Callable[[list[np.ndarray]], float] = lambda outputs: 0.0

    def check(self, outputs: list[np.ndarray]) -> float:
        """The error of outputs for the first set of inputs. Raises ModelError where they are simply wrong."""
        share = self.error_share(outputs)
        if not share <= WRONG:
            raise ModelError("peer", "the same computation", f"outputs that are wrong by {share:.0f} times the budget")
        return share

    @cached_property
    def manifest_spec(self) -> AttentionSpec | None:
        """The spec; None for an artifact of a foreign .onnx: what it computes is known as a graph only."""
        return self.artifact.manifest.spec

    @cached_property
    def spec(self) -> AttentionSpec:
        """The spec, which peers need. Raises ModelError where there is none, or it asks for more than they know."""
        if self.manifest_spec is None:
            raise ModelError("peer", "an artifact compiled from a spec", "one of a foreign .onnx, without a spec")
        if beyond := beyond_plain(self.manifest_spec):
            raise ModelError("peer", "plain attention with masks", f"one with {', '.join(beyond)}")
        return self.manifest_spec

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by PyTorch's names, in PyTorch's layouts; none for the core alone."""
        return self.artifact.weights() if self.artifact.manifest.weights else {}

    @property
    def is_core(self) -> bool:
        """Whether q, k and v are given: attention without projections."""
        return "q" in self.inputs[0]

    @property
    def float_dtype(self) -> str:
        """What activations and weights are stored as: the first of the inputs and outputs that is no number or flag."""
        manifest = self.artifact.manifest
        return next((info.dtype for info in (*manifest.inputs, *manifest.outputs) if info.dtype in DTYPES), "float32")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of floats, as NumPy's."""
        return DTYPES[self.float_dtype]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """The sizes B, L and S."""
        arrays = self.inputs[0]
        query = arrays["q"] if self.is_core else arrays["x"]
        source = arrays["k"] if self.is_core else arrays.get("context", arrays.get("key", query))
        return {"B": query.shape[0], "L": query.shape[-2], "S": source.shape[-2]}

    @cached_property
    def visible(self) -> np.ndarray | None:
        """(L, S) bool, True takes part: what causality, a window and a constant mask leave together; None is all."""
        L, S = self.sizes["L"], self.sizes["S"]
        return self.spec.visible(range(L), L, S)

    def joined_mask(self, arrays: Arrays) -> np.ndarray | None:
        """All masks as one, broadcastable to (B, H, L, S): bool, or additive where the call's own is; None is none."""
        mask = arrays.get("mask")
        if mask is not None and self.spec.mask == "key_padding":
            mask = mask[:, np.newaxis, np.newaxis, :]
        if mask is None or self.visible is None:
            return self.visible if mask is None else mask
        return mask & self.visible if mask.dtype == np.bool_ else np.where(self.visible, mask, mask.dtype.type(-np.inf))

    def additive_mask(self, arrays: Arrays) -> np.ndarray | None:
        """`joined_mask` as what is added to the scores, 0 or -inf for a bool one: (B or 1, H or 1, L, S)."""
        if "mask" not in arrays:
            return self._constant_additive_mask  # one for all sets: it may be large
        return self._as_bias(self.joined_mask(arrays))

    @cached_property
    def _constant_additive_mask(self) -> np.ndarray | None:
        return self._as_bias(self.visible)

    def _as_bias(self, mask: np.ndarray | None) -> np.ndarray | None:
        if mask is None:
            return None
        bias = np.where(mask, self.dtype.type(0), self.dtype.type(-np.inf)) if mask.dtype == np.bool_ else mask
        leading = ((1,) * (4 - bias.ndim) + bias.shape)[:2]
        # A copy, since OpenVINO takes no array that is read-only; whole rows, since ONNX Runtime's operators want them.
        return np.array(np.broadcast_to(bias, (*leading, self.sizes["L"], self.sizes["S"])), order="C")

    def check_scores_fit(self) -> None:
        """Raises ModelError where all scores, (B, H, L, S) of float32, are too much for a peer that keeps them."""
        scores = 4 * self.spec.num_heads * self.sizes["B"] * self.sizes["L"] * self.sizes["S"]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if scores > memory // SCORES_SHARE:
            raise ModelError("peer", "room for all scores at once", f"{scores / 1e9:.1f} GB of them")


@dataclass(frozen=True)
class Opened:
    """A peer that is ready.

    calls         one for each set of inputs
    arrays        what a call returned -> NumPy arrays in the order of the graph's outputs; not timed
    form          which of several ways to write the computation was the fastest, for a peer that has some
    caller_works  whether the calling thread computes beside the peer's workers, or waits for them
    """

    calls: Sequence[Call]
    arrays: Callable[[Any], list[np.ndarray]]
    form: str = ""
    caller_works: bool = True


class Peer(Protocol):
    """One way to run a problem."""

    name: str

    def open(self, problem: Problem, threads: int) -> AbstractContextManager[Opened]:
        """Ready to run for as long as the context is open. Raises whatever says why it cannot."""
        ...

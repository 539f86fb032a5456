"""What the heads of one layer do, gathered over any number of calls.

Notation: B batch, L query length, S key length, D embed, H heads, F value head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from mhsa_analysis.attention_rows import RowSums
from mhsa_analysis.head_report import HeadReport, report_of
from mhsa_analysis.layer_weights import as_array, weights_of
from mhsa_analysis.moments import Moments, ShuffledMoments
from mhsa_analysis.output_fit import PARTS
from mhsa_compile.errors import InputError, SpecError
from mhsa_compile.spec.outputs import array_names

_WORDS = 'layer.with_outputs("y", "heads", "entropy", "weights") asks for them.'
_OTHER_LAYER = 0.1
"""How far y may be from what the heads and W_O give, relative to its size: projections in eight bits are off by 0.02,
the weights of another layer by 1."""


class HeadStatistics:
    """Sums over calls of one layer; `report()` says what they show. float64, in memory of 6 (H F)^2 whatever is added.

    layer    a MultiHeadAttention, or an artifact of one: its W_O says what each head adds to y
    seed     of the shuffles that tell dependence from chance

    Raises ModelError for what is no such layer, SpecError for one that writes into a cache.

    >>> import mhsa_compile as mhsa, torch
    >>> spec = mhsa.AttentionSpec(embed_dim=16, num_heads=4, outputs=("y", "heads", "weights"))
    >>> layer, x = mhsa.MultiHeadAttention(spec), torch.randn(3, 20, 16)
    >>> report = HeadStatistics(layer).add(x, layer(x)).report()
    >>> report.tokens, report.cka.shape, len(report.roles)
    (60, (4, 4), 4)
    """

    def __init__(self, layer: Any, *, seed: int = 0) -> None:
        self._layer = weights_of(layer)
        self.spec = spec = self._layer.spec
        if spec.kv_cache:
            got = "a layer with kv_cache=True"
            raise SpecError("layer", "calls of whole sequences", got, "Compile it without its cache to look into it.")
        width = spec.num_heads * spec.v_head_dim
        self._moments = ShuffledMoments(width, seed)
        self._parts = [Moments(width) for _ in range(PARTS)]
        self._sequences = 0
        self._rows = RowSums(spec.num_heads, spec.sinks)

    @property
    def tokens(self) -> int:
        """Valid tokens so far."""
        return self._moments.count

    @property
    def tokens_needed(self) -> int:
        """4 F: twice the dims of a pair of heads. With fewer, any two heads look dependent."""
        return 4 * self.spec.v_head_dim

    def add(self, x: Any, outputs: Any, valid: Any = None, *, separators: Any = None) -> Self:
        """One call: x (B, L, D), what the layer or its artifact returned, and which tokens are no padding. Of all
        sequences of all calls every fourth is one that no pruning is fitted on.

        outputs      with "heads" and "weights", all of them; "entropy" is taken if it is there
        valid        (B, L) bool, or None: all are. What is not valid counts nowhere
        separators   (B, L) bool: tokens that only divide, such as [SEP]; for the role of that name

        Raises InputError: shapes, NaN, outputs of another layer, a mask that hides everything.
        """
        spec = self.spec
        x_array = as_array(x)
        if x_array.ndim != 3 or x_array.shape[2] != spec.embed_dim:
            raise InputError("x", f"shape (B, L, {spec.embed_dim})", str(x_array.shape))
        B, L = x_array.shape[:2]
        counts = _tokens("valid", valid, (B, L))
        if not counts.any():
            raise InputError("valid", "at least one valid token", f"none of {B} x {L}: the mask hides everything")
        apart = None if separators is None else _tokens("separators", separators, (B, L))
        arrays = self._by_name(outputs)
        heads = self._of_shape(arrays, "heads", (B, spec.num_heads, L, spec.v_head_dim))
        length = arrays["weights"].shape[-1] if spec.is_cross and arrays["weights"].ndim == 4 else L
        weights = self._of_shape(arrays, "weights", (B, spec.num_heads, L, length))
        entropy = self._of_shape(arrays, "entropy", (B, spec.num_heads, L)) if "entropy" in arrays else None
        by_token = heads.transpose(0, 2, 1, 3)[counts].astype(np.float64)  # (n, H, F)
        by_name = {"x": x_array[counts], "outputs.heads": by_token, "outputs.weights": weights.swapaxes(1, 2)[counts]}
        for name, array in by_name.items():
            if not np.isfinite(array).all():
                raise InputError(
                    name, "finite numbers at all valid tokens", "NaN or infinities", "Say in `valid` what is padding."
                )
        if "y" in arrays:
            self._check_layer(by_token, self._of_shape(arrays, "y", x_array.shape)[counts])
        rows = by_token.reshape(len(by_token), -1)
        self._moments.add(rows)
        for sequence in np.split(rows, np.cumsum(counts.sum(axis=1))[:-1]):
            if len(sequence):
                self._parts[self._sequences % PARTS].add(sequence)
                self._sequences += 1
        self._rows.add(weights, entropy, counts, apart, is_self_attention=not spec.is_cross)
        return self

    def report(self) -> HeadReport:
        """What the heads do, by what was added. Raises InputError for too few tokens."""
        if self.tokens < self.tokens_needed:
            expected = f"statistics of at least {self.tokens_needed} valid tokens, 4 times the value head dim"
            raise InputError("stats", expected, str(self.tokens), "Add more batches.")
        return report_of(self._layer, self._moments, self._parts, self._rows)

    def _by_name(self, outputs: Any) -> Mapping[str, np.ndarray]:
        """The arrays by name, from a named tuple, a mapping, or a tuple in the order of the layer's outputs. Raises
        InputError."""
        if hasattr(outputs, "_asdict"):
            outputs = outputs._asdict()
        elif isinstance(outputs, list | tuple) and len(outputs) == len(names := array_names(self.spec.outputs)):
            outputs = dict(zip(names, outputs, strict=True))
        if not isinstance(outputs, Mapping):
            raise InputError(
                "outputs", 'what a call returns, with "heads" and "weights"', type(outputs).__name__, _WORDS
            )
        for name in ("heads", "weights"):
            if name not in outputs:
                raise InputError("outputs", 'also "heads" and "weights"', ", ".join(outputs) or "none", _WORDS)
        return {name: as_array(outputs[name]) for name in ("y", "heads", "entropy", "weights") if name in outputs}

    def _of_shape(self, arrays: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...]) -> np.ndarray:
        array = arrays[name]
        if array.shape != shape:
            hint = 'Ask for all heads and rows: "weights" alone.' if name == "weights" else ""
            raise InputError(f"outputs.{name}", f"shape {shape}, of x and the layer", str(array.shape), hint)
        return array

    def _check_layer(self, heads: np.ndarray, y: np.ndarray) -> None:
        """Raises InputError unless y (n, D) is what heads (n, H, F) give by this layer's W_O."""
        own = np.einsum("nhf,hfd->nd", heads, self._layer.out_blocks, optimize=True) + self._layer.out_bias
        if np.linalg.norm(own - y) > _OTHER_LAYER * np.linalg.norm(y):
            expected = "outputs of this layer: y = sum of heads[i] W_O[i] + b"
            raise InputError(
                "outputs", expected, "a y that this layer's W_O does not give", "Are the weights the same?"
            )


def _tokens(name: str, value: Any, shape: tuple[int, int]) -> np.ndarray:
    """(B, L) bool from bool, or from integers 0 and 1. Raises InputError."""
    if value is None:
        return np.ones(shape, bool)
    array = as_array(value)
    if array.shape != shape or array.dtype.kind not in "bui":
        raise InputError(name, f"bool of shape (B, L) = {shape}", f"{array.dtype} of shape {array.shape}")
    if array.dtype != bool and not np.isin(array, (0, 1)).all():
        raise InputError(name, "bool, or integers 0 and 1", f"numbers from {array.min()} to {array.max()}")
    return array.astype(bool)

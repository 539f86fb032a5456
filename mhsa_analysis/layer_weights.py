"""The weights of one layer as float64 arrays, from a module or an artifact, without importing PyTorch; and how the
subspaces lie that its heads read from and write into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.spec.attention_spec import AttentionSpec

PROJECTIONS = ("q", "k", "v", "out")


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """A spec, and its arrays by PyTorch's names, float64: q_proj.weight (H*E, D), out_proj.weight (D, H*F), ..."""

    spec: AttentionSpec
    arrays: Mapping[str, np.ndarray]

    @property
    def out_bias(self) -> np.ndarray:
        """b (D,), zeros where the layer has none."""
        return self.arrays.get("out_proj.bias", np.zeros(self.spec.embed_dim))

    @property
    def out_blocks(self) -> np.ndarray:
        """(H, F, D): W_O^(i), so that head i contributes heads[i] @ W_O^(i) to y."""
        spec = self.spec
        return self.arrays["out_proj.weight"].T.reshape(spec.num_heads, spec.v_head_dim, spec.embed_dim)

    def blocks(self, projection: str) -> np.ndarray:
        """(heads, dims of a head, width): the rows of the weight of "q", "k" or "v", or the columns of "out", by head.

        Their span is the part of x that a head reads, or of y that it writes. Keys and values have G heads.
        """
        if projection == "out":
            return self.out_blocks
        heads = self.spec.num_heads if projection == "q" else self.spec.num_kv_heads
        weight = self.arrays[f"{projection}_proj.weight"]
        return weight.reshape(heads, -1, weight.shape[1])


def weights_of(layer: Any) -> LayerWeights:
    """The weights of a MultiHeadAttention, or of an Artifact compiled from one or from a spec. Raises ModelError."""
    if isinstance(layer, LayerWeights):
        return layer
    if isinstance(layer, Artifact):
        spec = layer.manifest.spec
        arrays = {} if spec is None else layer.weights()
    else:
        spec = getattr(layer, "spec", None)
        parameters = layer.named_parameters() if hasattr(layer, "named_parameters") else ()
        arrays = {name: as_array(value) for name, value in parameters}
    if not isinstance(spec, AttentionSpec) or "out_proj.weight" not in arrays:
        expected = "a MultiHeadAttention, or an artifact that was compiled from one"
        raise ModelError("layer", expected, type(layer).__name__, "from_torch and from_transformers make one.")
    return LayerWeights(spec, {name: array.astype(np.float64) for name, array in arrays.items()})


def as_array(value: Any) -> np.ndarray:
    """A NumPy array of what may be a torch tensor, also one that requires grad; numbers of 16 bits become float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().resolve_neg()
        small = value.is_floating_point() and value.dtype.itemsize == 2
        value = (value.float() if small else value).numpy()
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype in (np.float16, ml_dtypes.bfloat16) else array


def principal_angles(a: Any, b: Any) -> np.ndarray:
    """The angles between the spans of the columns of a (n, p) and b (n, q), in radians, the smallest first.

    min(p, q) of them, between 0 (a common direction) and pi / 2 (orthogonal). Source: Björck and Golub, "Numerical
    methods for computing angles between linear subspaces" (1973), with the sine where the cosine is near 1.

    >>> principal_angles(np.eye(4)[:, :2], np.eye(4)[:, 1:3]).round(3).tolist()
    [0.0, 1.571]
    """
    first, second = (_basis(np.asarray(value, np.float64)) for value in (a, b))
    if first.shape[1] < second.shape[1]:
        first, second = second, first
    cosines = first.T @ second
    sines = np.linalg.svd(second - first @ cosines, compute_uv=False)[::-1]  # ascending, as the angles
    cos = np.clip(np.linalg.svd(cosines, compute_uv=False), 0.0, 1.0)
    angles: np.ndarray = np.where(cos**2 < 0.5, np.arccos(cos), np.arcsin(np.clip(sines, 0.0, 1.0)))
    return angles


def subspace_overlap(layer: Any, projection: str) -> np.ndarray:
    """(H, H), of keys and values (G, G): the mean squared cosine of the principal angles of two heads' subspaces.

    projection    "q", "k" or "v": what a head reads of x; "out": where it writes in y
    1 is the same subspace, 0 an orthogonal one; by chance it is about E / D. It does not depend on a head's basis.
    Raises InputError and ModelError.

    >>> import mhsa_compile as mhsa
    >>> layer = mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=32, num_heads=4))
    >>> subspace_overlap(layer, "v").diagonal().round(6).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    if projection not in PROJECTIONS:
        raise InputError("projection", f"one of {', '.join(PROJECTIONS)}", repr(projection))
    bases = [_basis(block.T) for block in weights_of(layer).blocks(projection)]
    rank = [[min(a.shape[1], b.shape[1]) for b in bases] for a in bases]
    return np.array([[((a.T @ b) ** 2).sum() for b in bases] for a in bases]) / np.maximum(rank, 1)


def _basis(columns: np.ndarray) -> np.ndarray:
    """Orthonormal columns of the same span."""
    left, values, _ = np.linalg.svd(columns, full_matrices=False)
    basis: np.ndarray = left[:, values > values.max(initial=0.0) * max(columns.shape) * np.finfo(float).eps]
    return basis

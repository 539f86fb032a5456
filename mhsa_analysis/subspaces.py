"""How the subspaces lie that heads read from and write into."""

from __future__ import annotations

from typing import Any

import numpy as np

from mhsa_analysis.layer_weights import PROJECTIONS, weights_of
from mhsa_compile.errors import InputError


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

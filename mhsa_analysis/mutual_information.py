"""Mutual information of Gaussians, from samples."""

from __future__ import annotations

from typing import Any

import numpy as np

from mhsa_analysis.layer_weights import as_array
from mhsa_analysis.moments import information, whitener
from mhsa_compile.errors import InputError

_SHUFFLES = 8  # the mean of so many is off by a third of what one is


def gaussian_information(a: Any, b: Any, *, shuffles: int = _SHUFFLES, seed: int = 0) -> float:
    """The mutual information of a (n, p) and b (n, q), in nats, as of Gaussians with their second moments.

    I = -1/2 sum ln(1 - r_k^2) over the canonical correlations r_k (Kullback, "Information Theory and Statistics", 1959,
    chapter 10; Hotelling, "Relations between two sets of variates", 1936). It is the second-order part: for Gaussians
    it is all, of other variables it does not see what is not linear. A sample of n rows shows about p q / 2n nats where
    there are none; that is measured on rows that are shuffled, and taken off. What remains is at least 0.

    Raises InputError: NaN, another number of rows, fewer than 2 (p + q) of them.

    >>> random = np.random.default_rng(0)
    >>> a = random.standard_normal((50_000, 1))
    >>> b = 0.8 * a + 0.6 * random.standard_normal((50_000, 1))
    >>> round(gaussian_information(a, b), 2)     # -1/2 ln(1 - 0.8^2) = 0.511
    0.51
    """
    first, second = _rows("a", a), _rows("b", b)
    n, dims = len(first), first.shape[1] + second.shape[1]
    if len(second) != n:
        raise InputError("b", f"{n} rows, as a has", str(len(second)))
    if n < 2 * dims:
        raise InputError("a", f"at least {2 * dims} rows, twice the dims of a and b together", str(n))
    first, second = first - first.mean(axis=0), second - second.mean(axis=0)
    whiteners = whitener(first.T @ first / n), whitener(second.T @ second / n)
    random = np.random.default_rng(seed)
    chance = [information(first.T @ second[random.permutation(n)] / n, *whiteners) for _ in range(shuffles)]
    return max(information(first.T @ second / n, *whiteners) - float(np.mean(chance)), 0.0)


def _rows(name: str, value: Any) -> np.ndarray:
    array = as_array(value).astype(np.float64)
    if array.ndim != 2:
        raise InputError(name, "shape (rows, dims)", str(array.shape))
    if not np.isfinite(array).all():
        raise InputError(name, "finite numbers", "NaN or infinities")
    return array

"""Means and second moments of rows that come in batches, and how alike two blocks of their columns are; those of what
heads put out, and what they say about y; and mutual information of Gaussians, from samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mhsa_analysis.layer_weights import LayerWeights, as_array
from mhsa_compile.errors import InputError

LEAST_VARIANCE = 1e-10
"""The least variance of a direction that counts, relative to the largest of its block: float32's rounding is below."""
_LARGEST_CORRELATION = 1.0 - 2.0**-50


class Moments:
    """Sums over rows (n, width): how many, their mean, and their centred second moments.

    Batches are joined as by Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979), so that a large mean costs no digits.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = np.zeros(width)
        self.scatter = np.zeros((width, width))
        """sum over rows of (row - mean)^T (row - mean)"""

    def add(self, rows: np.ndarray) -> None:
        """Adds rows (n, width), float64."""
        n = len(rows)
        mean = rows.mean(axis=0)
        centred = rows - mean
        off = mean - self.mean
        self.scatter += centred.T @ centred + np.outer(off, off) * (self.count * n / (self.count + n))
        self.count += n
        self.mean = self.mean + off * (n / self.count)

    @property
    def covariance(self) -> np.ndarray:
        """(width, width), over n, not n - 1."""
        return self.scatter / self.count

    @property
    def second(self) -> np.ndarray:
        """(width, width): mean over rows of row^T row, the means left in."""
        return self.covariance + np.outer(self.mean, self.mean)


class ShuffledMoments(Moments):
    """Moments of rows, and how rows go along with other rows of their batch."""

    def __init__(self, width: int, seed: int = 0) -> None:
        super().__init__(width)
        self.shuffled = np.zeros((width, width))
        """The scatter between rows and other rows of their batch, by chance: what a sample of this size shows of
        columns that have nothing to do with each other."""
        self._random = np.random.default_rng(seed)

    def add(self, rows: np.ndarray) -> None:
        super().add(rows)
        centred = rows - rows.mean(axis=0)
        self.shuffled += centred.T @ centred[self._random.permutation(len(rows))]


def blocks_of(matrix: np.ndarray, blocks: int) -> np.ndarray:
    """(blocks * n, blocks * n) -> (blocks, blocks, n, n)."""
    n = len(matrix) // blocks
    return matrix.reshape(blocks, n, blocks, n).swapaxes(1, 2)


def whitener(covariance: np.ndarray) -> np.ndarray:
    """(n, r): what makes rows of that covariance uncorrelated, of variance 1, in the r directions that vary."""
    values, vectors = np.linalg.eigh(covariance)
    varying = values > LEAST_VARIANCE * max(values[-1], np.finfo(float).tiny)
    directions: np.ndarray = vectors[:, varying] / np.sqrt(values[varying])
    return directions


def information(cross: np.ndarray, whitener_a: np.ndarray, whitener_b: np.ndarray) -> float:
    """-1/2 sum ln(1 - r^2) over the canonical correlations r of two blocks of covariance `cross`, in nats."""
    correlations = np.linalg.svd(whitener_a.T @ cross @ whitener_b, compute_uv=False)
    return float(-0.5 * np.log1p(-(np.minimum(correlations, _LARGEST_CORRELATION) ** 2)).sum())


@dataclass(frozen=True, eq=False)
class HeadMoments:
    """The moments of rows (n, H F), each token's heads side by side: mean (H F,) and covariance (H F, H F) over
    `tokens` rows."""

    layer: LayerWeights
    tokens: int
    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def of(cls, layer: LayerWeights, moments: Moments) -> HeadMoments:
        return cls(layer, moments.count, moments.mean, moments.covariance)

    @property
    def heads(self) -> int:
        return self.layer.spec.num_heads

    @property
    def out(self) -> np.ndarray:
        """W_O (H F, D)."""
        return self.layer.arrays["out_proj.weight"].T

    @cached_property
    def cost(self) -> np.ndarray:
        """G (H, H): the mean of <C_i - mean, C_j - mean> over the tokens, C_i = heads[i] W_O^(i)."""
        blocks = self.layer.out_blocks
        gram = np.einsum("ifd,jgd->ijfg", blocks, blocks, optimize=True)
        cost: np.ndarray = np.einsum("ijfg,ijfg->ij", blocks_of(self.covariance, self.heads), gram, optimize=True)
        return cost

    @cached_property
    def size(self) -> float:
        """The mean of |y|^2, the bias in it."""
        mean = self.mean @ self.out + self.layer.out_bias
        return float(self.cost.sum() + mean @ mean)

    def columns(self, heads: Sequence[int]) -> np.ndarray:
        """The columns of these heads, int (len(heads) F,)."""
        F = self.layer.spec.v_head_dim
        return (np.asarray(heads, int)[:, None] * F + np.arange(F)).reshape(-1)

    def missed(self, out: np.ndarray, centre: np.ndarray) -> float:
        """The mean of |(rows - centre) out|^2 over the tokens, out (H F, D)."""
        off = self.mean - centre
        return float(np.einsum("kd,kd->", out, self.covariance @ out) + np.square(off @ out).sum())

    def bias(self, heads: Sequence[int], out: np.ndarray) -> np.ndarray:
        """(D,): the bias with which these heads, by `out` (len(heads) F, D), have y's mean."""
        bias: np.ndarray = self.layer.out_bias + self.mean @ self.out - self.mean[self.columns(heads)] @ out
        return bias


def joined(parts: Sequence[HeadMoments]) -> HeadMoments:
    """The moments of the tokens of all parts."""
    tokens = sum(part.tokens for part in parts)
    mean = sum((part.tokens / tokens * part.mean for part in parts), np.zeros_like(parts[0].mean))
    covariance = np.zeros_like(parts[0].covariance)
    for part in parts:
        off = part.mean - mean
        covariance += part.tokens / tokens * (part.covariance + np.outer(off, off))
    return HeadMoments(parts[0].layer, tokens, mean, covariance)


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

"""Second moments of what heads put out, and what they say about y."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mhsa_analysis.layer_weights import LayerWeights
from mhsa_analysis.moments import LEAST_VARIANCE, blocked


@dataclass(frozen=True, eq=False)
class HeadMoments:
    """The moments of rows (n, H F), each token's heads side by side: mean (H F,) and covariance (H F, H F) over
    `tokens` rows."""

    layer: LayerWeights
    tokens: int
    mean: np.ndarray
    covariance: np.ndarray

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
        found: np.ndarray = np.einsum("ijfg,ijfg->ij", blocked(self.covariance, self.heads), gram, optimize=True)
        return found

    @cached_property
    def size(self) -> float:
        """The mean of |y|^2, the bias in it."""
        mean = self.mean @ self.out + self.layer.out_bias
        return float(self.cost.sum() + mean @ mean)

    def columns(self, heads: Sequence[int]) -> np.ndarray:
        """The columns of these heads, int (len(heads) F,)."""
        F = self.layer.spec.v_head_dim
        return (np.asarray(heads, int)[:, None] * F + np.arange(F)).reshape(-1)

    def refit(self, kept: Sequence[int]) -> np.ndarray:
        """W (len(kept) F, D): what makes of the kept heads, around their means, the nearest to y in the mean square."""
        columns = self.columns(kept)
        own = self.covariance[np.ix_(columns, columns)]
        inverse = np.linalg.pinv(own, rcond=LEAST_VARIANCE, hermitian=True)
        found: np.ndarray = inverse @ (self.covariance[columns] @ self.out)
        return found

    def refit_cost(self, kept: Sequence[int]) -> float:
        """The mean square of what the refit misses, on the tokens that it was fitted on."""
        columns, fitted = self.columns(kept), self.refit(kept)
        explained = np.einsum("kd,kd->", fitted, self.covariance[columns] @ self.out)
        return max(float(self.cost.sum() - explained), 0.0)

    def bias(self, kept: Sequence[int], out: np.ndarray) -> np.ndarray:
        """(D,): the bias with which the kept heads, by `out` (len(kept) F, D), have y's mean."""
        found: np.ndarray = self.layer.out_bias + self.mean @ self.out - self.mean[self.columns(kept)] @ out
        return found

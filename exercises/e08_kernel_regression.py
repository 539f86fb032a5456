"""Nadaraya and Watson estimate a value at x by sum_j K(x, x_j) v_j / sum_j K(x, x_j).

Given q (L, d_k), k (S, d_k) and v (S, d_v) of one head, return that estimate, (L, d_v), with
K(q, k_j) = exp(q . k_j / sqrt(d_k)).
"""

import numpy as np


def kernel_regression(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    raise NotImplementedError("K is a matrix (L, S); each of its rows is divided by its own sum")

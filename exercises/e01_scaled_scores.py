"""Scores. A query q and a key k match by q . k. Their variance grows with d_k, so the texts divide by sqrt(d_k).

q (L, d_k) and k (S, d_k) are the rows of one head. Return the scores, (L, S), that its softmax is of.
"""

import numpy as np


def scaled_scores(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    raise NotImplementedError("a row of the result belongs to a query; d_k is the number of columns of q")

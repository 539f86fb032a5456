"""Causal masks. A decoder's token sees itself and what comes before it, and nothing behind it.

Given scaled scores (L, L) of one head, a row for each query, return the weights (L, L).
"""

import numpy as np


def causal_weights(scores: np.ndarray) -> np.ndarray:
    raise NotImplementedError("np.tril says who sees whom; what is hidden has to be so before the softmax")

"""Saturation. Where scores spread too far, the softmax gives everything to one key, and no gradient flows back.

The Jacobian of a row a of weights, by its scores, is diag(a) - a a^T. Its trace says how much gradient is left.
Given weights (L, S), return the trace of each row, (L,).
"""

import numpy as np


def gradient_left(weights: np.ndarray) -> np.ndarray:
    raise NotImplementedError("the trace of diag(a) is 1, and that of a a^T is a sum of squares")

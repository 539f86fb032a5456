"""Symmetry. Heads that start alike stay alike: their gradients are the same. What makes them differ is how they start.

Return W (d_model, d_model), whose rows i d to (i + 1) d are head i's, h heads of d = d_model / h, from `random`: such
that heads learn different things, and that x @ W.T has the variance of x, where the columns of x are independent.
"""

import numpy as np


def initial_weights(d_model: int, h: int, random: np.random.Generator) -> np.ndarray:
    raise NotImplementedError("a sum of d_model products of variance v has the variance d_model v")

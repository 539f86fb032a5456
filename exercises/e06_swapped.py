"""Order. "man bites dog" has the tokens of "dog bites man". A layer without positions gave y (L, D) for x (L, D).

Return what it gives for the tokens x[order], without running it. `order` is a permutation of 0 to L - 1.
"""

import numpy as np


def swapped(y: np.ndarray, order: np.ndarray) -> np.ndarray:
    raise NotImplementedError("attention sees a set: each token gets what it got before, wherever it stands now")

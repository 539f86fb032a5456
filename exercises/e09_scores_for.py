"""The library. A reader gives 80 % of the time to one book, 15 % to another, 5 % to a third.

Given such shares (S,), which are positive and sum to 1, return scores (S,) whose softmax they are.
"""

import numpy as np


def scores_for(shares: np.ndarray) -> np.ndarray:
    raise NotImplementedError("the softmax takes exponentials, and does not see a constant that is added to all")

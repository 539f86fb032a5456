"""5.2.4. A text makes W_Q block-diagonal: head i reads columns i d to (i + 1) d of x alone, d = d_model / h. That is
not multi-head attention, but a case of it with 1/h of the parameters.

Given blocks (h, d, d), so that head i has the queries x[:, i d : (i + 1) d] @ blocks[i].T, return the W_Q
(d_model, d_model) of an ordinary layer, Q = x @ W_Q.T, that computes the same.
"""

import numpy as np


def block_diagonal(blocks: np.ndarray) -> np.ndarray:
    raise NotImplementedError("rows i d to (i + 1) d of W_Q are head i's; which of their columns are not 0?")

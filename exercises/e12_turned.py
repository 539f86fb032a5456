"""5.2.6. A text compares heads by rho, the cosine of their outputs. It is no property of what the layer computes.

Given W_v (d_model, d_model), whose rows i d to (i + 1) d are head i's, and W_o (d_model, d_model), which multiplies the
heads side by side from the left, y = concat @ W_o.T: return a W_v and a W_o with which y is the same, and the cosine of
head 0 with every other head has the other sign.
"""

import numpy as np


def turned(W_v: np.ndarray, W_o: np.ndarray, d: int) -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError("turn the sign of what head 0 says, and that of what W_o makes of it")

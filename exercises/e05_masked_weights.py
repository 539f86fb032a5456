"""Rows that see nothing. The texts hide by `masked_fill(mask == 0, -1e9)`. Where a row sees nothing at all, as in
padding, that is wrong, and -inf is worse. Here, and in ONNX's standard, such a row is zeros.

Given scaled scores (L, S) and mask (L, S), True where a query sees a key, return the weights (L, S).
"""

import numpy as np


def masked_weights(scores: np.ndarray, mask: np.ndarray) -> np.ndarray:
    raise NotImplementedError("put the weights of hidden pairs to 0 once more, behind a softmax that is never NaN")

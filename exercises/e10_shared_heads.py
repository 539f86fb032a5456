"""Grouped queries. h heads share G keys (and values): the first h / G heads the first, and so on. With G = 1 it is MQA.

Given k (B, G, S, d), return what heads without sharing would have, (B, h, S, d).
"""

import numpy as np


def shared_heads(k: np.ndarray, h: int) -> np.ndarray:
    raise NotImplementedError("head i has the keys of group i // (h / G)")

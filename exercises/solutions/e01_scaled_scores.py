"""The artifact's own scores are read off its softmax: ln(weights) + lse."""

import numpy as np

from exercises.artifacts import core, normal


def scaled_scores(q, k):
    return q @ k.T / np.sqrt(q.shape[1])


def cases():
    return [(normal(5, 8), normal(7, 8, seed=1)), (normal(6, 8), normal(6, 8, seed=1))]


def expected(q, k):
    result = core()(q[None, None], k[None, None], k[None, None])
    return np.log(result.weights[0, 0]) + result.lse[0, 0][:, None]


MISTAKES = {
    "the scores are not scaled: divide by sqrt(d_k)": lambda q, k: q @ k.T,
    "the scores are divided by d_k: that is the variance, its root is wanted": lambda q, k: q @ k.T / q.shape[1],
    "the scores are multiplied by sqrt(d_k)": lambda q, k: q @ k.T * np.sqrt(q.shape[1]),
    "the root is of the number of keys, not of the columns d_k": lambda q, k: q @ k.T / np.sqrt(len(k)),
    "rows belong to keys: q and k are exchanged": lambda q, k: k @ q.T / np.sqrt(q.shape[1]),
}

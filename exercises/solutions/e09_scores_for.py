"""The scores become keys of an artifact, and what it reads is compared: scores are right up to a constant."""

import numpy as np

from exercises.artifacts import core


def scores_for(shares):
    return np.log(shares)


def cases():
    return [(np.array([0.80, 0.15, 0.05]),), (np.array([0.1, 0.2, 0.3, 0.4]),)]


def expected(shares):
    return shares


def observed(scores, shares):
    query, books = np.zeros((1, 1, 1, 8), np.float32), np.zeros((1, 1, len(shares), 8), np.float32)
    query[..., 0], books[0, 0, :, 0] = np.sqrt(8), scores  # the artifact divides by sqrt(8)
    return core()(query, books, books).weights[0, 0, 0]


MISTAKES = {
    "the shares themselves: the softmax of 0.8, 0.15, 0.05 is nearly even": lambda shares: shares,
    "a logarithm of base 2: the softmax is of base e": np.log2,
    "a logarithm of base 10: the softmax is of base e": np.log10,
    "the sign: a large share is a large score": lambda shares: -np.log(shares),
    "the logits of single shares, ln(p / (1 - p)): that is for a sigmoid": lambda shares: np.log(shares / (1 - shares)),
    "percents: e^80 leaves nothing to the others": lambda shares: 100 * shares,
}

"""An artifact compiled with causal="top_left" is what is right."""

import numpy as np

from exercises.artifacts import core, normal, softmax


def causal_weights(scores):
    return softmax(np.where(np.tril(np.ones_like(scores)) > 0, scores, -np.inf))


def cases():
    return [(scores_of(6),), (scores_of(9),)]


def scores_of(L):
    return normal(L, 8) @ normal(L, 8, seed=1).T / np.sqrt(8)


def expected(scores):
    L = len(scores)
    q, k = normal(L, 8)[None, None], normal(L, 8, seed=1)[None, None]
    return core(causal="top_left")(q, k, k).weights[0, 0]


def _after(scores):
    return softmax(scores) * np.tril(np.ones_like(scores))


def _strictly(scores):
    with np.errstate(invalid="ignore"):
        return softmax(np.where(np.tril(np.ones_like(scores), -1) > 0, scores, -np.inf))


MISTAKES = {
    "nothing is hidden": softmax,
    "tokens see what is behind them, not before: the mask is transposed": lambda s: softmax(
        np.where(np.triu(np.ones_like(s)) > 0, s, -np.inf)
    ),
    "a token does not see itself, so the first sees nothing: the diagonal belongs to the mask": _strictly,
    "hidden scores are 0, which is a score like others: e^0 = 1; take -inf": lambda s: softmax(np.tril(s)),
    "the mask comes after the softmax: rows no longer sum to 1": _after,
    "the softmax goes over queries: columns sum to 1, rows should": lambda s: softmax(
        np.where(np.tril(np.ones_like(s)) > 0, s, -np.inf), axis=0
    ),
}

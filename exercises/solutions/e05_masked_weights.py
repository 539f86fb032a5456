"""An artifact compiled with mask="bool" is what is right: rows that see nothing are zeros in it."""

import numpy as np

from exercises.artifacts import core, normal, softmax


def masked_weights(scores, mask):
    return np.where(mask, softmax(np.where(mask, scores, -1e9)), 0)


def cases():
    mask = np.arange(7) < np.array([[7], [3], [0], [1], [0]])
    return [(normal(5, 8) @ normal(7, 8, seed=1).T / np.sqrt(8), mask)]


def expected(scores, mask):
    q, k = normal(5, 8)[None, None], normal(7, 8, seed=1)[None, None]
    return core(mask="bool")(q, k, k, mask=mask[None, None]).weights[0, 0]


def _infinite(scores, mask):
    with np.errstate(invalid="ignore"):
        return softmax(np.where(mask, scores, -np.inf))


MISTAKES = {
    "rows that see nothing are spread over all keys, 1 / S each: that is what -1e9 does, as every score is alike": (
        lambda s, mask: softmax(np.where(mask, s, -1e9))
    ),
    "rows that see nothing are NaN: -inf less -inf": _infinite,
    "the mask is read the other way round: True sees": lambda s, mask: np.where(
        mask, 0, softmax(np.where(mask, -1e9, s))
    ),
    "the mask comes after the softmax: the rest of a row no longer sums to 1": lambda s, mask: softmax(s) * mask,
    "nothing is hidden": lambda s, mask: softmax(s),
    "the mask is added as 0 and 1: that prefers what is seen, and hides nothing": lambda s, mask: softmax(s + mask),
}

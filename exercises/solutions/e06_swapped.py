"""A compiled layer runs on x[order]."""

import numpy as np

from exercises.artifacts import layer, normal

_ORDER = np.array([2, 0, 3, 1, 4])


def swapped(y, order):
    return y[order]


def _layer():
    names = ("W_q", "W_k", "W_v", "W_o")
    return layer(4, **{name: normal(32, 32, seed=i) / np.sqrt(32) for i, name in enumerate(names)})


def cases():
    return [(_layer()(normal(1, 5, 32)).y[0], _ORDER)]


def expected(y, order):
    return _layer()(normal(1, 5, 32)[:, order]).y[0]


MISTAKES = {
    "y is as before: attention is equivariant, not invariant; y moves with the tokens": lambda y, order: y,
    "the inverse permutation: token order[i] stands at i now": lambda y, order: y[np.argsort(order)],
    "every token has the mean of all: that is a pooled sentence": lambda y, order: np.tile(y.mean(axis=0), (len(y), 1)),
    "the columns are permuted; tokens are rows": lambda y, order: np.concatenate(
        [y[:, order], y[:, len(order) :]], axis=1
    ),
}

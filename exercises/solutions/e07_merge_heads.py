"""A compiled layer whose W_O is the identity puts out its heads side by side."""

import numpy as np

from exercises.artifacts import layer, normal


def merge_heads(heads):
    B, h, L, d = heads.shape
    return heads.transpose(0, 2, 1, 3).reshape(B, L, h * d)


def _result():
    matrices = {name: normal(32, 32, seed=i) / np.sqrt(32) for i, name in enumerate(("W_q", "W_k", "W_v"))}
    return layer(4, **matrices, W_o=np.eye(32))(normal(2, 5, 32))


def cases():
    return [(_result().heads,)]


def expected(heads):
    return _result().y


def _straight(heads):
    B, h, L, d = heads.shape
    return heads.reshape(B, L, h * d)


def _interleaved(heads):
    B, h, L, d = heads.shape
    return heads.transpose(0, 2, 3, 1).reshape(B, L, h * d)


MISTAKES = {
    "reshape without transpose: rows mix tokens, since heads lie before tokens": _straight,
    "columns of heads are interleaved: column 0 of each head comes first": _interleaved,
    "heads are added up; they are concatenated": lambda heads: heads.sum(axis=1),
    "the heads stand in the order of the last first": lambda heads: merge_heads(heads[:, ::-1]),
    "still four axes: (B, L, h, d), the last two are to be joined": lambda heads: heads.transpose(0, 2, 1, 3),
}

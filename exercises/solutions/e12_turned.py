"""Both are weights of a compiled layer; its y and the cosines of its heads are compared."""

import numpy as np

from exercises.artifacts import layer, normal

_H, _D = 4, 32


def turned(W_v, W_o, d):
    W_v[:d] *= -1
    W_o[:, :d] *= -1
    return W_v, W_o


def cases():
    return [(normal(_D, _D, seed=2) / np.sqrt(_D), normal(_D, _D, seed=3) / np.sqrt(_D), _D // _H)]


def observed(answer, W_v, W_o, d):
    matrices = {name: normal(_D, _D, seed=i) / np.sqrt(_D) for i, name in enumerate(("W_q", "W_k"))}
    result = layer(_H, **matrices, W_v=answer[0], W_o=answer[1])(normal(1, 5, _D))
    heads = result.heads[0].reshape(_H, -1).astype(np.float64)
    size = np.linalg.norm(heads, axis=1)
    return result.y, heads[0] @ heads[1:].T / (size[0] * size[1:])


def expected(W_v, W_o, d):
    y, cosines = observed((W_v, W_o), W_v, W_o, d)
    return y, -cosines


def _rows_of_out(W_v, W_o, d):
    W_v[:d] *= -1
    W_o[:d] *= -1
    return W_v, W_o


def _columns_of_values(W_v, W_o, d):
    W_v[:, :d] *= -1
    W_o[:, :d] *= -1
    return W_v, W_o


def _values_alone(W_v, W_o, d):
    W_v[:d] *= -1
    return W_v, W_o


def _out_alone(W_v, W_o, d):
    W_o[:, :d] *= -1
    return W_v, W_o


MISTAKES = {
    "rho is as it was: no head is turned, or all are; turn head 0 alone": lambda W_v, W_o, d: (W_v, W_o),
    "y changes: W_o has to take back what W_v turned": _values_alone,
    "y changes and rho does not: W_v is not turned": _out_alone,
    "y changes: what W_o makes of head 0 are its columns, not its rows": _rows_of_out,
    "y changes: head 0's values are rows of W_v; columns are what all heads read": _columns_of_values,
}

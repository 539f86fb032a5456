"""It is a head: a compiled one gives the same."""

import numpy as np

from exercises.artifacts import core, normal


def _kernel(q, k, scale=None):
    return np.exp(q @ k.T / (np.sqrt(q.shape[1]) if scale is None else scale))


def kernel_regression(q, k, v):
    K = _kernel(q, k)
    return K @ v / K.sum(axis=1, keepdims=True)


def cases():
    return [(normal(5, 8), normal(7, 8, seed=1), normal(7, 8, seed=2))]


def expected(q, k, v):
    return core()(q[None, None], k[None, None], v[None, None]).y[0, 0]


def _unscaled(q, k, v):
    K = _kernel(q, k, scale=1)
    return K @ v / K.sum(axis=1, keepdims=True)


def _by_queries(q, k, v):
    K = _kernel(q, k)
    return (K / K.sum(axis=0)) @ v


def _linear(q, k, v):
    K = q @ k.T / np.sqrt(q.shape[1])
    return K @ v / K.sum(axis=1, keepdims=True)


MISTAKES = {
    "the kernel is not normalised: divide by its sum over keys": lambda q, k, v: _kernel(q, k) @ v,
    "K is not scaled: sqrt(d_k) is missing": _unscaled,
    "the sum goes over queries: each query divides by its own sum over keys": _by_queries,
    "one sum for all queries: keepdims is for each": lambda q, k, v: _kernel(q, k) @ v / _kernel(q, k).sum(),
    "K is the scores themselves: the exponential is missing": _linear,
    "the mean of the values: the kernel is not used": lambda q, k, v: np.tile(v.mean(axis=0), (len(q), 1)),
}

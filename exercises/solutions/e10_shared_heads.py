"""The answer is keys and values of an artifact without sharing; what is right is of one compiled with num_kv_heads."""

import numpy as np

from exercises.artifacts import core, normal


def shared_heads(k, h):
    return np.repeat(k, h // k.shape[1], axis=1)


def cases():
    return [(normal(2, G, 5, 8), 4) for G in (2, 1)]


def _queries(h):
    return normal(2, h, 5, 8, seed=3)


def expected(k, h):
    return core(h, num_kv_heads=k.shape[1])(_queries(h), k, k).y


def observed(answer, k, h):
    shape = (len(k), h, *k.shape[2:])
    if np.shape(answer) != shape:
        return answer  # not what an artifact takes
    keys = np.ascontiguousarray(answer, np.float32)
    return core(h)(_queries(h), keys, keys).y


MISTAKES = {
    "head i has group i % G: neighbours share, so repeat each group, do not tile": lambda k, h: np.tile(
        k, (1, h // k.shape[1], 1, 1)
    ),
    "all heads have group 0: that is MQA, whatever G is": lambda k, h: np.repeat(k[:, :1], h, axis=1),
    "all heads have the mean of the groups": lambda k, h: np.repeat(k.mean(axis=1, keepdims=True), h, axis=1),
    "the groups stand in the order of the last first": lambda k, h: np.repeat(k[:, ::-1], h // k.shape[1], axis=1),
    "still G heads: repeat them along axis 1": lambda k, h: k,
    "keys are repeated, not heads: the axis of heads is 1": lambda k, h: np.repeat(k, h // k.shape[1], axis=2),
}

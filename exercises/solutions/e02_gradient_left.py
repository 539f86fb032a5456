"""The weights are an artifact's, with scaling and without; the Jacobian is PyTorch's, by autograd in float64."""

import numpy as np
import torch

from exercises.artifacts import core, normal


def gradient_left(weights):
    return 1 - (weights**2).sum(axis=1)


def cases():
    q, k = normal(1, 1, 5, 8), normal(1, 1, 7, 8)
    return [(core()(factor * q, k, k).weights[0, 0],) for factor in (1, 8)]


def expected(weights):
    scores = torch.log(torch.from_numpy(weights).double())
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: torch.softmax(row, dim=0)))(scores)
    return jacobian.diagonal(dim1=1, dim2=2).sum(dim=1).numpy()


MISTAKES = {
    "a sum over the queries: each row of weights has a Jacobian of its own": lambda a: 1 - (a**2).sum(axis=0),
    "that is what is lost, the sum of squares: what is left is 1 less it": lambda a: (a**2).sum(axis=1),
    "1 - sum of a is 0 for every row: the trace of a a^T takes squares": lambda a: 1 - a.sum(axis=1),
    "only the largest weight is taken: every key adds its a (1 - a)": lambda a: 1 - a.max(axis=1) ** 2,
    "the entropy also says how spread a row is, but it is not the trace": lambda a: -(a * np.log(a)).sum(axis=1),
}

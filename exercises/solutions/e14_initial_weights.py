"""A layer starts with W for queries, keys and values, and learns three steps by SGD: how many heads differ then?"""

import numpy as np
import torch

import mhsa_compile as mhsa
from exercises.artifacts import normal


def initial_weights(d_model, h, random):
    return random.standard_normal((d_model, d_model)) / np.sqrt(d_model)


def cases():
    return [(256, 8, np.random.default_rng(0))]


def expected(d_model, h, random):
    return h, 1


def observed(W, d_model, h, random):
    """How many heads are different after three steps, and the variance of x @ W.T to a power of 2."""
    if np.shape(W) != (d_model, d_model):
        return W
    layer = mhsa.MultiHeadAttention(mhsa.AttentionSpec(embed_dim=d_model, num_heads=h, bias=False)).double()
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            projection.weight.copy_(torch.from_numpy(np.asarray(W, np.float64)))
        layer.out_proj.weight.copy_(torch.eye(d_model // h).tile(h, h) / d_model)  # the same for every head
    x, target = (torch.from_numpy(normal(1, 9, d_model, seed=i)).double() for i in range(2))
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(3):
        optimiser.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimiser.step()
    heads = layer.v_proj.weight.detach().reshape(h, -1)
    different = len({tuple(head.tolist()) for head in heads.round(decimals=9)})
    variance = (normal(2000, d_model, seed=5) @ np.asarray(W, np.float64).T).var()
    return different, 2.0 ** np.round(np.log2(variance)) if variance > 0 else 0


MISTAKES = {
    "all weights are 0: heads are alike and stay so, and say nothing": lambda D, h, random: np.zeros((D, D)),
    "every head starts with the same rows: their gradients are the same, so they never differ": lambda D, h, random: (
        np.tile(random.standard_normal((D // h, D)) / np.sqrt(D), (h, 1))
    ),
    "deviation 1: what comes out has d_model times the variance": lambda D, h, random: random.standard_normal((D, D)),
    "variance 1 / d: the sum has d_model terms, whatever h is": lambda D, h, random: (
        random.standard_normal((D, D)) / np.sqrt(D // h)
    ),
    "deviation 1 / d_model: that is the variance that is wanted, take its root": lambda D, h, random: (
        random.standard_normal((D, D)) / D
    ),
}

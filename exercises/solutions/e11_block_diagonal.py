"""The answer is W_Q of a compiled layer, whose weights are compared with those of the text's own formula."""

import numpy as np

from exercises.artifacts import layer, normal, softmax

_H, _D = 4, 32


def block_diagonal(blocks):
    h, d, _ = blocks.shape
    W = np.zeros((h * d, h * d))
    for i, block in enumerate(blocks):
        W[i * d : (i + 1) * d, i * d : (i + 1) * d] = block
    return W


def cases():
    return [(normal(_H, _D // _H, _D // _H),)]


def _x():
    return normal(1, 5, _D)


def expected(blocks):
    x, keys = _x()[0].astype(np.float64), normal(_D, _D, seed=1) / np.sqrt(_D)
    d = _D // _H
    heads = [slice(i * d, (i + 1) * d) for i in range(_H)]
    return np.stack(
        [softmax(x[:, of] @ block.T @ (x @ keys[of].T).T / np.sqrt(d)) for of, block in zip(heads, blocks, strict=True)]
    )


def observed(W, blocks):
    if np.shape(W) != (_D, _D):
        return W  # not what a layer takes
    keys = normal(_D, _D, seed=1) / np.sqrt(_D)
    return layer(_H, W_q=W, W_k=keys, W_v=np.eye(_D), W_o=np.eye(_D))(_x()).weights[0]


def _stacked(blocks):
    h, d, _ = blocks.shape
    return np.concatenate([blocks.reshape(h * d, d), np.zeros((h * d, h * d - d))], axis=1)


MISTAKES = {
    "the blocks stand below each other in the first columns: every head reads the same d columns": _stacked,
    "the blocks are transposed: Q = x @ W_Q.T": lambda blocks: block_diagonal(blocks.transpose(0, 2, 1)),
    "the blocks fill every place: each head reads all of x, which is 5.2.2": lambda blocks: np.concatenate(
        [np.tile(block, (1, len(blocks))) for block in blocks]
    ),
    "the blocks stand on the other diagonal: head i reads the columns of head h - 1 - i": lambda blocks: np.concatenate(
        np.split(block_diagonal(blocks[::-1]), len(blocks))[::-1]
    ),
    "the blocks alone, one below the other: W_Q is (d_model, d_model), zeros included": lambda blocks: blocks.reshape(
        -1, blocks.shape[2]
    ),
}

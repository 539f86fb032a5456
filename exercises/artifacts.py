"""The compiled attention that answers are held against, compiled once in a process."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

import mhsa_compile as mhsa


@cache
def core(heads: int = 1, d_k: int = 8, **fields: Any) -> Any:
    """softmax(q k^T / sqrt(d_k)) v alone: called with q (B, H, L, d_k), k and v; gives y, lse and weights."""
    words = ("y", "lse", "weights")
    spec = mhsa.AttentionSpec(embed_dim=heads * d_k, num_heads=heads, outputs=words, **fields)
    return mhsa.load(mhsa.compile(mhsa.ScaledDotProductAttention(spec)))


@cache
def _layer(d_model: int, heads: int) -> Any:
    spec = mhsa.AttentionSpec(embed_dim=d_model, num_heads=heads, bias=False, outputs=("y", "heads", "weights"))
    return mhsa.compile(mhsa.MultiHeadAttention(spec))


def layer(heads: int, **matrices: np.ndarray) -> Any:
    """A layer with these W_q, W_k, W_v, W_o (d_model, d_model), without biases: called with x (B, L, d_model); gives y,
    heads and weights."""
    names = {"W_q": "q_proj", "W_k": "k_proj", "W_v": "v_proj", "W_o": "out_proj"}
    arrays = {f"{names[key]}.weight": np.float32(matrix) for key, matrix in matrices.items()}
    return mhsa.load(_layer(len(matrices["W_q"]), heads), weights=arrays)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def softmax(scores: np.ndarray, axis: int = -1) -> np.ndarray:
    exponentials: np.ndarray = np.exp(scores - scores.max(axis=axis, keepdims=True))
    return exponentials / exponentials.sum(axis=axis, keepdims=True)

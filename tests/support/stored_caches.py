"""A layer whose cache stores keys and values in fewer bits, beside the same in float64 over exactly what is stored."""

from __future__ import annotations

import copy

import numpy as np
import torch

import mhsa_compile as mhsa
from mhsa_compile.nn.functional import attention, rotate, to_torch
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.runtime.kv_cache import KVCache
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.verification.error_budget import budget, max_error

HALF_STEPS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # of a number, relative
FLOAT = 2.0**-18  # of the largest key or value: a few roundings of float32 in its projection


class Layer:
    """A module, compiled for any L and for L = 1, and the same in float64."""

    def __init__(self, spec: AttentionSpec) -> None:
        torch.manual_seed(5)
        self.module = MultiHeadAttention(spec).eval()
        self.spec, self.exact = spec, copy.deepcopy(self.module).double()
        self.artifacts = mhsa.compile(self.module), mhsa.compile(self.module, dims={"L": 1})
        self.prefill, self.step = (mhsa.load(artifact, threads=1) for artifact in self.artifacts)

    def heads(self, module: MultiHeadAttention, x: np.ndarray, first: np.ndarray) -> list[torch.Tensor]:
        """q, k and v (B, heads, L, width) of rows at places first[b] and behind."""
        spec, rows = self.spec, to_torch(x).to(module.q_proj.weight.dtype)
        counts = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        projections = module.q_proj, module.k_proj, module.v_proj
        q, k, v = (
            project(rows).unflatten(-1, (heads, -1)).transpose(1, 2)
            for project, heads in zip(projections, counts, strict=True)
        )
        if spec.rope is not None:
            places = torch.from_numpy(first)[:, None] + torch.arange(x.shape[1])
            cos, sin = (table[places].unsqueeze(-3) for table in (module.rope_cos, module.rope_sin))
            q, k = (rotate(one, cos, sin, spec.rope.interleaved) for one in (q, k))
        return [q, k, v]

    def over(self, module: MultiHeadAttention, x: np.ndarray, cache: KVCache, first: np.ndarray) -> np.ndarray:
        """y by PyTorch, at the module's dtype, over what the cache stores."""
        q, *_ = self.heads(module, x, first)
        k, v = (to_torch(array).to(q.dtype) for array in read(cache))
        lengths = torch.from_numpy(first + x.shape[1])
        y, _ = attention(self.spec, q, k, v, None, module.feature_tensors, lengths=lengths)
        return module.out_proj(y.transpose(1, 2).flatten(2)).detach().double().numpy()

    def share_of_budget(self, y: np.ndarray, x: np.ndarray, cache: KVCache, first: np.ndarray) -> float:
        exact, yardstick = (self.over(module, x, cache, first) for module in (self.exact, self.module))
        return max_error(exact, y) / budget(exact, yardstick, self.spec.dtype)


def read(cache: KVCache) -> list[np.ndarray]:
    """Keys and values in float64, as they are stored."""
    arrays = [np.asarray(array, np.float64) for array in (cache.key, cache.value)]
    return [a * s[..., None] for a, s in zip(arrays, cache.scales, strict=True)] if cache.scales else arrays


def half_steps(dtype: str, truth: np.ndarray) -> np.ndarray:
    """How far a number of rows of float64 may be from what a cache of `dtype` stores: half a step of its own, and what
    float32 loses before."""
    largest = np.abs(truth).max(-1, keepdims=True)
    half = largest / 254 if dtype == "int8" else np.abs(truth) * HALF_STEPS.get(dtype, 0.0)
    return np.asarray(half + FLOAT * largest)

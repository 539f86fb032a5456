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

    def over(
        self, module: MultiHeadAttention, x: np.ndarray, stored: list[np.ndarray], first: np.ndarray
    ) -> np.ndarray:
        """y by PyTorch, at the module's dtype, over keys and values as a cache stores them."""
        q, *_ = self.heads(module, x, first)
        k, v = (to_torch(array).to(q.dtype) for array in stored)
        lengths = torch.from_numpy(first + x.shape[1])
        y, _ = attention(self.spec, q, k, v, None, module.feature_tensors, lengths=lengths)
        return module.out_proj(y.transpose(1, 2).flatten(2)).detach().double().numpy()

    def share_of_budget(self, y: np.ndarray, x: np.ndarray, cache: KVCache, first: np.ndarray) -> float:
        stored = read(cache)
        return max_error(self.over(self.exact, x, stored, first), y) / self.budget(x, stored, first)

    def budget(self, x: np.ndarray, stored: list[np.ndarray], first: np.ndarray) -> float:
        """How far y may be from float64 over the same stored numbers. What the format loses is no part of it: both read
        rounded numbers, so that only float arithmetic differs, of which PyTorch's error is the measure."""
        exact, yardstick = (self.over(module, x, stored, first) for module in (self.exact, self.module))
        return budget(exact, yardstick, self.spec.dtype)

    def shares_of_controls(self, y: np.ndarray, x: np.ndarray, cache: KVCache, first: np.ndarray) -> dict[str, float]:
        """The error of y by its budget, were other numbers stored: values larger by a part in 64, and, where an entry
        has two or more, rows one place further on."""
        stored, lengths = read(cache), first + x.shape[1]
        controls = {"values larger by 1/64": [stored[0], stored[1] * (1 + 1 / 64)]}
        if lengths.max() > 1:
            controls["rows shifted by one"] = [rotated(array, lengths) for array in stored]
        allowed = self.budget(x, stored, first)
        return {
            name: max_error(self.over(self.exact, x, other, first), y) / allowed for name, other in controls.items()
        }


def read(cache: KVCache) -> list[np.ndarray]:
    """Keys and values in float64, as they are stored."""
    arrays = [np.asarray(array, np.float64) for array in (cache.key, cache.value)]
    return [a * s[..., None] for a, s in zip(arrays, cache.scales, strict=True)] if cache.scales else arrays


def rotated(array: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Rows (B, G, C, width), of which those of each entry are a place further on, the last one first."""
    shifted = array.copy()
    for b, end in enumerate(lengths):
        shifted[b, :, :end] = np.roll(array[b, :, :end], 1, axis=1)
    return shifted


def half_steps(dtype: str, truth: np.ndarray) -> np.ndarray:
    """How far a number of rows of float64 may be from what a cache of `dtype` stores: half a step of its own, and what
    float32 loses before."""
    largest = np.abs(truth).max(-1, keepdims=True)
    half = largest / 254 if dtype == "int8" else np.abs(truth) * HALF_STEPS.get(dtype, 0.0)
    return np.asarray(half + FLOAT * largest)

"""A workload as tensors of PyTorch's, the same for every candidate, whether an output is right, and what the GPU can do
at best, measured beside the candidates: its matrix units, and its memory.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gpu_bench.workloads import work
from mhsa_compile.bench import accuracy
from mhsa_compile.bench.workloads import Workload
from mhsa_compile.nn.functional import to_numpy
from mhsa_compile.runtime.artifact.artifact import Artifact

LEAST_SETS, MOST_SETS = 2, 16
BEYOND_CACHE = 2
"""What calls go through is so many times the GPU's last-level cache, so that none finds its own inputs there."""


@dataclass(frozen=True)
class GpuProblem:
    """sets  inputs by name, as the artifact takes them, on the device; weights  by PyTorch's names, there too"""

    workload: Workload
    sets: tuple[dict[str, Tensor], ...]
    weights: dict[str, Tensor]

    @property
    def is_core(self) -> bool:
        return self.workload.kind == "core"

    @property
    def device(self) -> torch.device:
        return next(iter(self.sets[0].values())).device

    @cached_property
    def visible(self) -> Tensor | None:
        """(L, S) bool, True takes part: a band and a constant mask together; None where all see all."""
        spec, L, S = self.workload.spec, self.workload.L, self.workload.S
        pairs = spec.visible(range(L), L, S)
        return None if pairs is None else torch.from_numpy(pairs).to(self.device)

    def error_share(self, artifact: Artifact, output: Tensor) -> float:
        """The largest error of sampled rows, for the first set, as a share of the budget. Of the batch the first and
        the last entry are looked at: only these go to the host."""
        last = self.workload.B - 1
        entries = sorted({0, last})
        inputs = {name: to_numpy(tensor[entries].cpu()) for name, tensor in self.sets[0].items()}
        weights = {name: to_numpy(tensor.cpu()) for name, tensor in self.weights.items()}
        truth = accuracy.truth(artifact, inputs, weights)
        return truth.share([to_numpy(output[entries].contiguous().cpu())])


def draw(workload: Workload, weights: dict[str, Tensor], device: str, cache_bytes: int) -> GpuProblem:
    """Normal inputs, drawn on the device, in as many sets as it takes to be beyond its cache."""
    spec, (B, L, S) = workload.spec, (workload.B, workload.L, workload.S)
    H, G, E, F = spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.v_head_dim
    shapes: dict[str, tuple[int, ...]]
    if workload.kind == "core":
        shapes = {"q": (B, H, L, E), "k": (B, G, S, E), "v": (B, G, S, F)}
    else:
        shapes = {"x": (B, L, spec.embed_dim)}
    count = min(MOST_SETS, max(LEAST_SETS, -(-BEYOND_CACHE * cache_bytes // work(workload).bytes)))
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    sets = tuple(
        {name: torch.randn(shape, generator=generator, device=device).to(dtype) for name, shape in shapes.items()}
        for _ in range(count)
    )
    return GpuProblem(workload, sets, {name: tensor.to(device) for name, tensor in weights.items()})


def first(result: Any) -> Tensor:
    """What a candidate's call returned, without what some return beside it."""
    tensor: Tensor = result[0] if isinstance(result, tuple | list) else result
    return tensor


MATRIX = 8192
"""Rows and columns: 1.1 TFLOP, a millisecond and more, and so many to each byte that memory is no part of it."""
COPY = 1 << 30
"""The bytes that are copied: many times any cache."""


@dataclass(frozen=True)
class Ceiling:
    """A call, and what it does: FLOPs, or bytes."""

    call: Callable[[], Any]
    amount: int


def matrix_product(device: str, size: int = MATRIX) -> Ceiling:
    """A product of square bfloat16 matrices through PyTorch, on random data: on zeros it would be faster."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return Ceiling(partial(torch.mm, left, right, out=torch.empty_like(left)), 2 * size**3)


def large_copy(device: str, size: int = COPY) -> Ceiling:
    """A copy of one array to another; what is read and what is written both count."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    return Ceiling(partial(torch.empty_like(source).copy_, source), 2 * size)

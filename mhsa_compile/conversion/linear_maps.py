"""The matrix and the bias of a function that is linear, read off from what it gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from mhsa_compile.conversion.agreement import agrees

_ROWS = 1024  # of an identity that are given at once


@dataclass(frozen=True, eq=False)
class LinearMap:
    """y = x W^T + b in float64: weight (out, in), bias (out,)."""

    weight: Tensor
    bias: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def read_maps(function: Callable[[Tensor], tuple[Tensor, ...]], width: int) -> list[LinearMap]:
    """The map of each result (n, out) of `function(x)`, x (n, width) in float64.

    The columns of W are what unit vectors give, less what zeros give. Where the weights are of a shorter dtype, that
    is exact but for what float64 rounds, and so the very weights once rounded to their dtype.
    """
    zeros = torch.zeros(1, width, dtype=torch.float64)
    biases = [result[0].double() for result in function(zeros)]
    parts: list[list[Tensor]] = [[] for _ in biases]
    for begin in range(0, width, _ROWS):
        rows = min(_ROWS, width - begin)
        units = torch.zeros(rows, width, dtype=torch.float64)
        units[torch.arange(rows), begin + torch.arange(rows)] = 1
        for found, bias, result in zip(parts, biases, function(units), strict=True):
            found.append(result.double() - bias)
    return [LinearMap(torch.cat(found).T.contiguous(), bias) for found, bias in zip(parts, biases, strict=True)]


def is_linear(found: LinearMap, x: Tensor, result: Tensor) -> bool:
    """Whether the map gives `result` for x (n, in), as closely as float32 computes it."""
    return agrees(found(x), found(x.float()), result)

"""What the GPU can do at best, measured beside the candidates: its matrix units, and its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

MATRIX = 8192
"""Rows and columns: 1.1 TFLOP, a millisecond and more, and so many to each byte that memory is no part of it."""
COPY = 1 << 30
"""The bytes that are copied: many times any cache."""


@dataclass(frozen=True)
class Ceiling:
    """A call, and what it does: FLOPs, or bytes."""

    call: Callable[[], Any]
    amount: int


def matrix(device: str, size: int = MATRIX) -> Ceiling:
    """A product of square bfloat16 matrices through PyTorch, on random data: on zeros it would be faster."""
    left, right = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return Ceiling(partial(torch.mm, left, right, out=torch.empty_like(left)), 2 * size**3)


def copy(device: str, size: int = COPY) -> Ceiling:
    """A copy of one array to another; what is read and what is written both count."""
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    return Ceiling(partial(torch.empty_like(source).copy_, source), 2 * size)

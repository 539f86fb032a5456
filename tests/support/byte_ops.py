"""Linears of bytes that a file stores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mhsa_compile.kernels.interface.ops import QuantisedLinearOp


def of_bytes(
    in_features: int, widths: tuple[int, ...], x: str, stored: tuple[str, ...], **other: Any
) -> QuantisedLinearOp:
    """Of up to three weights side by side, transposed and biased in turn; `other` are fields that differ."""
    n = len(widths)
    op = QuantisedLinearOp(
        ("B", "L"), in_features, widths, biased=(True, False, True)[:n], transposed=(True, False, True)[:n],
        x_dtype=x, stored=stored,  # type: ignore[arg-type]
    )  # fmt: skip
    return replace(op, **other)


def whole_numbers(rng: np.random.Generator, dtype: str, *dims: int) -> np.ndarray:
    """The smallest and the largest more often than others: with these, sums of pairs of bytes pass 16 bits."""
    bounds = np.iinfo(dtype)
    extremes = rng.choice([bounds.min, bounds.max], dims)
    return np.where(rng.random(dims) < 0.5, extremes, rng.integers(bounds.min, bounds.max + 1, dims)).astype(dtype)

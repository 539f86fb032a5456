"""Matrices in four bits by blocks: which numbers and scales lose least, and what they stand for.

Of each block that scale is taken which loses least: a few clips are tried, and for each the scale of least squares (as
llama.cpp's `make_qx_quants` does).

Notation: a matrix is (N, K), with n blocks a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhsa_compile.spec.weight_words import Int4Weights

MIDDLE, LARGEST = 8, 15
_CLIPS = (0.0, -0.9, -0.7, -0.5, -0.3, -0.15, 0.15, 0.3, 0.5)
"""Of weights without zero points: the number that the largest of a block becomes is MIDDLE + clip."""
_SHRINKS = (1.0, 0.975, 0.95, 0.925, 0.9, 0.85, 0.8)
"""Of weights with zero points: the part of a block's range that is kept."""
_AT_ONCE = 1 << 18  # numbers that are tried together: what a cache holds


class Int4Blocks(NamedTuple):
    """numbers  (N, n, block / 2) uint8, two a byte, the first in its lower bits
    scales      (N, n) float32
    zeros       (N, ceil(n / 2)) uint8, two a byte as well; None where all are the middle"""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None

    def named(self, name: str) -> dict[str, Tensor]:
        """What takes the place of a weight of this name in an artifact."""
        parts = self._asdict().items()
        return {f"{name}.{part}": values for part, values in parts if values is not None}

    def floats(self, K: int) -> Tensor:
        """(N, K) float32: (number - zero) scale."""
        N, n = self.scales.shape
        zeros = torch.full((N, n), MIDDLE) if self.zeros is None else _apart(self.zeros)[:, :n]
        wide = (_apart(self.numbers).float() - zeros[..., None]) * self.scales[..., None]
        return wide.reshape(N, -1)[:, :K]


def _apart(packed: Tensor) -> Tensor:
    """(..., bytes) -> (..., numbers)"""
    return torch.stack([packed & LARGEST, packed >> 4], -1).flatten(-2)


def rounded(x: Tensor, block: int) -> Tensor:
    """x (..., K) in eight bits by blocks, as products with weights of them may take it: 127 steps are the largest
    magnitude of a block."""
    K = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, -K % block))
    blocks = padded.view(*x.shape[:-1], -1, block)
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    whole = torch.round(blocks / torch.where(steps > 0, steps, 1.0))
    result: Tensor = (whole * steps).view(padded.shape)[..., :K]
    return result


def in_blocks(weight: Tensor, form: Int4Weights) -> Int4Blocks:
    """A matrix (N, K) float32 in four bits."""
    N, K = weight.shape
    n = -(-K // form.block)
    blocks = torch.zeros(N * n, form.block)
    blocks.view(N, n * form.block)[:, :K] = weight
    rows = max(1, _AT_ONCE // form.block)
    best = _with_zeros if form.zeros else _around_the_middle
    parts = [best(blocks[first : first + rows]) for first in range(0, len(blocks), rows)]
    numbers, scales, zeros = (torch.cat(values) for values in zip(*parts, strict=True))
    packed = _in_bytes(numbers).view(N, n, form.block // 2)
    return Int4Blocks(packed, scales.view(N, n), _in_bytes(zeros.view(N, n)) if form.zeros else None)


def _in_bytes(numbers: Tensor) -> Tensor:
    """Rows of numbers in uint8, two a byte; the last of an odd row stands alone."""
    even = torch.nn.functional.pad(numbers, (0, numbers.shape[1] % 2))
    return even[:, ::2] | (even[:, 1::2] << 4)


def _around_the_middle(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, scales, zeros) of blocks (count, block), whose zeros are the middle."""
    place = blocks.abs().argmax(1, keepdim=True)
    largest = blocks.gather(1, place)
    factors = [torch.where(largest == 0, 0.0, -(MIDDLE + clip) / largest) for clip in _CLIPS]
    middle = torch.full_like(largest, MIDDLE)
    numbers, scales, _ = _choice(blocks, [(factor, middle) for factor in factors])
    return numbers, scales, middle[:, 0].to(torch.uint8)


def _with_zeros(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the zeros that fit each block's range, of which 0 is a part."""
    low, high = blocks.amin(1, keepdim=True).clamp(max=0), blocks.amax(1, keepdim=True).clamp(min=0)
    candidates = []
    for shrink in _SHRINKS:
        factor = torch.where(high > low, LARGEST / ((high - low) * shrink), 0.0)
        candidates.append((factor, torch.round(-low * shrink * factor).clamp(0, LARGEST)))
    zeros = torch.stack([zero for _, zero in candidates])
    numbers, scales, choice = _choice(blocks, candidates)
    return numbers, scales, zeros.gather(0, choice[None, :, None])[0, :, 0].to(torch.uint8)


def _choice(blocks: Tensor, candidates: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, scales, which) of the candidates, (1 / scale, zero) of each block, that lose least: the scale that is
    then best, sum w d / sum d d of d = number - zero, leaves sum w w - (sum w d)^2 / sum d d."""
    gain, which = torch.full((len(blocks),), -1.0), torch.zeros(len(blocks), dtype=torch.long)
    numbers, scales = torch.zeros(blocks.shape, dtype=torch.uint8), torch.zeros(len(blocks))
    for i, (factor, zero) in enumerate(candidates):
        q = torch.round(blocks * factor + zero).clamp(0, LARGEST)
        d = q - zero
        product, square = (blocks * d).sum(1), (d * d).sum(1)
        scale = torch.where(square > 0, product / square, 0.0)
        better = product * scale > gain
        gain, which = torch.where(better, product * scale, gain), torch.where(better, i, which)
        scales = torch.where(better, scale, scales)
        numbers = torch.where(better[:, None], q.to(torch.uint8), numbers)
    return numbers, scales, which

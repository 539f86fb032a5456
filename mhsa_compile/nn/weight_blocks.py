"""Matrices in a few bits by blocks: which numbers and scales lose least, and what they stand for.

Of each block that scale is taken which loses least: a few clips are tried, and for each the scale of least squares (as
llama.cpp's `make_qx_quants` does).

Notation: a matrix is (N, K), with n blocks a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhsa_compile.spec.weight_words import BlockForm

_CLIPS = (0.0, -0.9, -0.7, -0.5, -0.3, -0.15, 0.15, 0.3, 0.5)
"""Of weights without zero points: the number that the largest of a block becomes is the middle + clip."""
_SHRINKS = (1.0, 0.975, 0.95, 0.925, 0.9, 0.85, 0.8)
"""Of weights with zero points: the part of a block's range that is kept."""
_ROUNDING = 2.0**-22
"""Of the largest weight: by so much two tools may differ in what they make of a number, its scale and its zero."""
_AT_ONCE = 1 << 18  # numbers that are tried together: what a cache holds


class WeightBlocks(NamedTuple):
    """numbers  (N, n, block bits / 8) uint8, the first of a byte in its lower bits
    scales      (N, n) float32
    zeros       (N, bytes of n numbers) uint8, packed as numbers are; (N, n) float32; None where all are the middle
    bits        of a number: 4 or 8"""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None
    bits: int = 4

    @property
    def block(self) -> int:
        """Terms of a block."""
        return self.numbers.shape[-1] * 8 // self.bits

    def form(self, *, rounds_x: bool = True) -> BlockForm:
        """What the arrays are, to be multiplied by x in eight bits or as it is. Zeros that are floats go with x as it
        is."""
        kind = "" if self.zeros is None else "bytes" if self.zeros.dtype == torch.uint8 else "floats"
        return BlockForm(self.bits, self.block, kind, rounds_x and kind != "floats")  # type: ignore[arg-type]

    def named(self, name: str) -> dict[str, Tensor]:
        """What takes the place of a weight of this name in an artifact."""
        parts = {"numbers": self.numbers, "scales": self.scales, "zeros": self.zeros}
        return {f"{name}.{part}": values for part, values in parts.items() if values is not None}

    def floats(self, K: int | None = None) -> Tensor:
        """(N, K) float32: (number - zero) scale; all terms that blocks have where no K is stated."""
        wide = (apart(self.numbers, self.bits).float() - self.points()[..., None]) * self.scales[..., None]
        return wide.reshape(len(wide), -1)[:, :K]

    def of_rows(self, order: Tensor) -> WeightBlocks:
        """The rows in this order."""
        zeros = None if self.zeros is None else self.zeros[order]
        return self._replace(numbers=self.numbers[order], scales=self.scales[order], zeros=zeros)

    def points(self) -> Tensor:
        """The zero points, (N, n) float32."""
        N, n = self.scales.shape
        if self.zeros is None:
            return torch.full((N, n), float(middle(self.bits)))
        return apart(self.zeros, self.bits)[:, :n].float() if self.zeros.dtype == torch.uint8 else self.zeros


def stands_for(blocks: WeightBlocks, weight: Tensor) -> bool:
    """Whether a weight (N, K) is what the blocks say, as another tool computed it in float32."""
    N, K = weight.shape
    if (N, -(-K // blocks.block)) != tuple(blocks.scales.shape):
        return False
    return bool(((blocks.floats(K) - weight).abs() <= _ROUNDING * weight.abs().max()).all())


def middle(bits: int) -> int:
    """What stands for 0 where no zero points are stored."""
    return 1 << (bits - 1)


def largest(bits: int) -> int:
    return (1 << bits) - 1


def apart(packed: Tensor, bits: int) -> Tensor:
    """(..., bytes) -> (..., numbers)"""
    return packed if bits == 8 else torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def together(numbers: Tensor, bits: int) -> Tensor:
    """(..., numbers) uint8 -> (..., bytes); the last of an odd row of four bits stands alone."""
    if bits == 8:
        return numbers
    even = torch.nn.functional.pad(numbers, (0, numbers.shape[-1] % 2))
    return even[..., ::2] | (even[..., 1::2] << 4)


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


def in_blocks(weight: Tensor, form: BlockForm) -> WeightBlocks:
    """A matrix (N, K) float32 in few bits."""
    N, K = weight.shape
    n = -(-K // form.block)
    blocks = torch.zeros(N * n, form.block)
    blocks.view(N, n * form.block)[:, :K] = weight
    rows = max(1, _AT_ONCE // form.block)
    best = _with_zeros if form.zeros else _around_the_middle
    parts = [best(blocks[first : first + rows], form) for first in range(0, len(blocks), rows)]
    numbers, scales, points = (torch.cat(values) for values in zip(*parts, strict=True))
    packed, points = together(numbers, form.bits).view(N, n, -1), points.view(N, n)
    zeros = {"": None, "floats": points, "bytes": together(points.to(torch.uint8), form.bits)}[form.zeros]
    return WeightBlocks(packed, scales.view(N, n), zeros, form.bits)


def _around_the_middle(blocks: Tensor, form: BlockForm) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, scales, zeros) of blocks (count, block), whose zeros are the middle."""
    place = blocks.abs().argmax(1, keepdim=True)
    most = blocks.gather(1, place)
    factors = [torch.where(most == 0, 0.0, -(middle(form.bits) + clip) / most) for clip in _CLIPS]
    zero = torch.full_like(most, middle(form.bits))
    numbers, scales, _ = _choice(blocks, [(factor, zero) for factor in factors], form)
    return numbers, scales, zero[:, 0]


def _with_zeros(blocks: Tensor, form: BlockForm) -> tuple[Tensor, Tensor, Tensor]:
    """The same with the zeros that fit each block's range, of which 0 is a part where zeros are numbers."""
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    if form.zeros == "bytes":
        low, high = low.clamp(max=0), high.clamp(min=0)
    candidates = []
    for shrink in _SHRINKS:
        factor = torch.where(high > low, largest(form.bits) / ((high - low) * shrink), 0.0)
        zero = torch.where(high > low, -low * shrink * factor, -1.0)  # a block of one number: (0 + 1) scale
        whole = torch.round(-low * shrink * factor).clamp(0, largest(form.bits))
        candidates.append((factor, whole if form.zeros == "bytes" else zero))
    zeros = torch.stack([zero for _, zero in candidates])
    numbers, scales, choice = _choice(blocks, candidates, form)
    return numbers, scales, zeros.gather(0, choice[None, :, None])[0, :, 0]


def _choice(blocks: Tensor, candidates: list[tuple[Tensor, Tensor]], form: BlockForm) -> tuple[Tensor, Tensor, Tensor]:
    """(numbers, scales, which) of the candidates, (1 / scale, zero) of each block, that lose least: the scale that is
    then best, sum w d / sum d d of d = number - zero, leaves sum w w - (sum w d)^2 / sum d d."""
    gain, which = torch.full((len(blocks),), -1.0), torch.zeros(len(blocks), dtype=torch.long)
    numbers, scales = torch.zeros(blocks.shape, dtype=torch.uint8), torch.zeros(len(blocks))
    for i, (factor, zero) in enumerate(candidates):
        q = torch.round(blocks * factor + zero).clamp(0, largest(form.bits))
        d = q - zero
        product, square = (blocks * d).sum(1), (d * d).sum(1)
        scale = torch.where(square > 0, product / square, 0.0)
        better = product * scale > gain
        gain, which = torch.where(better, product * scale, gain), torch.where(better, i, which)
        scales = torch.where(better, scale, scales)
        numbers = torch.where(better[:, None], q.to(torch.uint8), numbers)
    return numbers, scales, which

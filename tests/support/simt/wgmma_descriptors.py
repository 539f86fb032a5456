"""wgmma for the SIMT interpreter: where its descriptors say that elements lie, and products that end when they are
waited for.

A product reads its operands as late as it may, when its group is waited for, and until then its accumulators hold NaN:
who releases or overwrites something too early, or reads a sum too early, gets garbage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.simt.memory import Array, SimtError
from support.simt.tensor_map import swizzled

DEPTH = 16  # of a product of 16-bit elements
_SPANS = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes, by bits 62 and 63


@dataclass(frozen=True)
class Descriptor:
    """A matrix in shared memory: PTX ISA 9.7.15.5.1.2.2, "Matrix Descriptor Format"."""

    start: int
    leading: int
    stride: int
    span: int

    @classmethod
    def of(cls, word: int) -> Descriptor:
        fields = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62
        if word & ~fields:
            raise SimtError(f"wgmma: descriptor {word:#x} has a base offset, or bits that mean nothing")
        start, leading, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        descriptor = cls(start, leading, stride, _SPANS[word >> 62])
        if descriptor.span > 16 and start % (8 * descriptor.span) // 128:
            raise SimtError(f"wgmma: a matrix from address {start} on, where the pattern of its swizzle does not begin")
        return descriptor

    def addresses(self, rows: int, *, is_transposed: bool) -> Array:
        """Where elements (row, depth) of 2 bytes lie, (rows, 16): the canonical layouts of PTX ISA 9.7.15.5.1.2.1.3.

        Rows are those of A, or the columns of B. `is_transposed`: they, and not the depth, are neighbours; of the last
        pattern of a swizzle there may be fewer than it has, as in NVIDIA's Fuser (`hopper_tma`).
        """
        row, depth = np.arange(rows)[:, None], np.arange(DEPTH)[None]
        if is_transposed:
            width = self.span // 2
            if self.span == 16:
                at = row // 8 * self.stride + depth // 8 * self.leading + depth % 8 * 16 + row % 8 * 2
            else:
                at = row // width * self.leading + depth // 8 * self.stride + depth % 8 * self.span + row % width * 2
        elif self.span == 16:
            at = row // 8 * self.stride + row % 8 * 16 + depth // 8 * self.leading + depth % 8 * 2
        else:
            if self.start % self.span + 2 * DEPTH > self.span:
                raise SimtError("wgmma: a row of 16 elements leaves its span")
            at = row // 8 * self.stride + row % 8 * self.span + depth * 2
        return swizzled(self.start + at, self.span)


@dataclass
class Product:
    """One wgmma of a warpgroup in some blocks, issued. `sums` and `left` are registers, (register, its rows)."""

    blocks: list[int]
    sums: tuple[Any, Array]  # Registers, the numbers of the accumulators
    begin: Array | None  # what the accumulators held, where they were not in flight yet
    left: Callable[[], Array] | list[Descriptor]  # (registers, N) words, or the descriptor of each block
    right: list[Descriptor]
    adds: bool
    dtype: Any
    transposed: tuple[bool, bool]
    active: Array


def accumulators(rows: Array) -> Array:
    """Registers (N / 2, blocks, 128) of accumulators -> (blocks, 64, N): register 4 n + 2 h + e of lane 4 g + q of warp
    w is row 16 w + g + 8 h, column 8 n + 2 q + e (PTX ISA 9.7.15.5.1.1.1, figure of matrix D)."""
    tiles = rows.shape[0] // 4
    split = rows.reshape(tiles, 2, 2, -1, 4, 8, 4)  # n h e b w g q
    return split.transpose(3, 4, 1, 5, 0, 6, 2).reshape(rows.shape[1], 64, 8 * tiles)


def fragments(matrix: Array) -> Array:
    """The inverse of `accumulators`."""
    blocks, _, columns = matrix.shape
    split = matrix.reshape(blocks, 4, 2, 8, columns // 8, 4, 2)  # b w h g n q e
    return split.transpose(4, 2, 6, 0, 1, 3, 5).reshape(columns // 2, blocks, 128)


def left_operand(words: Array, dtype: Any) -> Array:
    """Words (4, blocks, 128) -> A (blocks, 64, 16): word i holds columns 2 q + 8 (i // 2) and the next of row g + 8 (i
    % 2) of a warp's 16 (figure of matrix A)."""
    pairs = np.ascontiguousarray(words)[..., None].view(dtype)  # i b lane e
    split = pairs.reshape(2, 2, -1, 4, 8, 4, 2)  # i // 2, i % 2, b w g q e
    return split.transpose(2, 3, 1, 4, 0, 5, 6).reshape(words.shape[1], 64, DEPTH).astype(np.float32)

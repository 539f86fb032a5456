"""MatMulNBits of ONNX Runtime: x times a weight in few bits, by blocks of a scale and a zero each.

`MatMulNBits` is what the file says, in the dtype of x; `RoundedMatMulNBits` what an accuracy level of 4 lets others do:
x is rounded to eight bits first, by the same blocks. Source: ONNX Runtime's docs/ContribOperators.md.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun

_ROUNDING_LEVEL = 4


class MatMulNBits(OpRun):  # type: ignore[misc]
    op_domain = "com.microsoft"

    def _run(
        self,
        x: np.ndarray,
        packed: np.ndarray,
        scales: np.ndarray,
        zeros: np.ndarray | None = None,
        groups: np.ndarray | None = None,
        bias: np.ndarray | None = None,
        *,
        K: int,
        N: int,
        block_size: int,
        bits: int = 4,
        accuracy_level: int = 0,
        **_others: Any,
    ) -> tuple[np.ndarray]:
        n = math.ceil(K / block_size)
        zero = np.full((N, n, 1), 1 << (bits - 1), scales.dtype)
        if zeros is not None:
            rows = zeros.reshape(N, -1)
            zero = (_numbers(rows, bits) if zeros.dtype == np.uint8 else rows)[:, :n, None].astype(scales.dtype)
        q = _numbers(packed.reshape(N, n, -1), bits).astype(scales.dtype)
        weight = ((q - zero) * scales.reshape(N, n, 1)).reshape(N, n * block_size)[:, :K]
        if accuracy_level == _ROUNDING_LEVEL:
            x = self._rounded(x, block_size)
        y = x @ weight.T
        return (y if bias is None else y + bias,)

    def _rounded(self, x: np.ndarray, block: int) -> np.ndarray:
        return x


class RoundedMatMulNBits(MatMulNBits):
    def _rounded(self, x: np.ndarray, block: int) -> np.ndarray:
        """127 steps of a block are its largest magnitude."""
        K = x.shape[-1]
        padded = np.zeros((*x.shape[:-1], math.ceil(K / block) * block), np.float32)
        padded[..., :K] = x
        blocks = padded.reshape(*x.shape[:-1], -1, block)
        steps = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
        whole = np.rint(blocks / np.where(steps > 0, steps, 1))
        return np.asarray((whole * steps).reshape(padded.shape)[..., :K].astype(x.dtype))


def _numbers(packed: np.ndarray, bits: int) -> np.ndarray:
    """(..., bytes) -> (..., numbers), the first of a byte from its lowest bits."""
    apart = packed[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    return np.asarray(apart.reshape(*packed.shape[:-1], -1))


RoundedMatMulNBits.__name__ = "MatMulNBits"  # the evaluator goes by these names

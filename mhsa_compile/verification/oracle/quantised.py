"""QuantizeLinear and DequantizeLinear of opsets that onnx's evaluator does not know: bytes, by one scale or several."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference.op_run import OpRun

_KNOWN = 19
"""The opset from which on onnx's evaluator has both; it hands on attributes of later ones, none of which is set."""


def quantised_operators(model: onnx.ModelProto) -> tuple[type[OpRun], ...]:
    """The operators that a model's evaluation lacks."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), _KNOWN)
    return (_QuantizeLinear, _DequantizeLinear) if opset < _KNOWN else ()


class _QuantizeLinear(OpRun):  # type: ignore[misc]
    def _run(
        self, x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None, axis: int = 1, **_later: Any
    ) -> tuple[np.ndarray]:
        zero = np.zeros((), np.uint8) if zero is None else zero
        bounds = np.iinfo(zero.dtype)
        y = np.rint(x / _along(scale, x, axis)) + _along(zero, x, axis).astype(np.int64)
        return (np.clip(y, bounds.min, bounds.max).astype(zero.dtype),)


class _DequantizeLinear(OpRun):  # type: ignore[misc]
    def _run(
        self, x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None, axis: int = 1, **_later: Any
    ) -> tuple[np.ndarray]:
        whole = x.astype(np.int64) - (0 if zero is None else _along(zero, x, axis).astype(np.int64))
        return (np.asarray(whole * _along(scale, x, axis)).astype(scale.dtype),)


def _along(numbers: np.ndarray, x: np.ndarray, axis: int) -> np.ndarray:
    """One number, or one for each place of an axis of x."""
    if numbers.size == 1:
        return numbers.reshape(())
    return numbers.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


_QuantizeLinear.__name__ = "QuantizeLinear"  # the evaluator goes by these names
_DequantizeLinear.__name__ = "DequantizeLinear"

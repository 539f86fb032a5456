"""Caches of another dtype than activations, in onnx's evaluator: exact, for the oracle rounds nothing, or rounded, for
the yardstick."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_tensor_scatter import TensorScatter

from mhsa_compile.nn.row_operators import DEQUANTIZE, QUANTIZE
from mhsa_compile.spec.attention_spec import DOMAIN


def _steps(rows: np.ndarray) -> np.ndarray:
    steps: np.ndarray = np.abs(rows).max(-1) / rows.dtype.type(127)
    return steps


class _ExactRows(OpRun):  # type: ignore[misc]
    """Numbers of steps as they are, between whole numbers."""

    op_domain = DOMAIN

    def _run(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        steps = _steps(x)
        return x / np.where(steps > 0, steps, 1)[..., np.newaxis], steps


class _RoundedRows(OpRun):  # type: ignore[misc]
    op_domain = DOMAIN

    def _run(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        wide = x.astype(np.float32)
        steps = _steps(wide)
        return np.rint(wide / np.where(steps > 0, steps, np.float32(1))[..., np.newaxis]).astype(np.int8), steps


class _ExactFloats(OpRun):  # type: ignore[misc]
    op_domain = DOMAIN

    def _run(self, q: np.ndarray, steps: np.ndarray, to: int = 1) -> tuple[np.ndarray]:
        return (q * steps[..., np.newaxis],)


class _RoundedFloats(OpRun):  # type: ignore[misc]
    op_domain = DOMAIN

    def _run(self, q: np.ndarray, steps: np.ndarray, to: int = 1) -> tuple[np.ndarray]:
        from onnx.helper import tensor_dtype_to_np_dtype

        return ((q * steps[..., np.newaxis]).astype(tensor_dtype_to_np_dtype(to)),)


class _ExactScatter(TensorScatter):  # type: ignore[misc]
    """One that keeps what lies between whole numbers."""

    def _run(self, cache: np.ndarray, update: np.ndarray, *indices: Any, **attributes: Any) -> Any:
        return super()._run(cache.astype(np.result_type(cache, update)), update, *indices, **attributes)


for _operator, _name in (
    (_ExactRows, QUANTIZE), (_RoundedRows, QUANTIZE), (_ExactFloats, DEQUANTIZE), (_RoundedFloats, DEQUANTIZE),
    (_ExactScatter, "TensorScatter"),
):  # fmt: skip
    _operator.__name__ = _name  # the evaluator goes by these names
EXACT_ROWS: tuple[type[OpRun], ...] = (_ExactRows, _ExactFloats, _ExactScatter)
"""Those of a float64 evaluation."""
ROUNDED_ROWS: tuple[type[OpRun], ...] = (_RoundedRows, _RoundedFloats)
"""Those of an evaluation at a graph's own dtypes."""

"""Products of two activations, by the letters of their axes: b and h of the batch, A (m, k), B (k, n)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from mhsa_compile.kernels.interface.ops import ProductOp, ProductOperand

NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
ORDERS = {  # as A and B are stored
    "in order": "bmk,bkn->bmn",
    "B turned": "bmk,bnk->bmn",
    "A turned": "bkm,bkn->bmn",
    "both turned": "bkm,bnk->bmn",
    "heads": "bmhk,bnhk->bhmn",
    "heads, A turned": "bkhm,bkhn->bhmn",
    "a shared B": "bmk,kn->bmn",
    "a shared A": "mk,bkn->bmn",
    "a batch of each": "bmk,hkn->bhmn",
}


def operation(equation: str, sizes: dict[str, Any], kind: str = "bfloat16", result: str | None = None) -> ProductOp:
    """`sizes`: of each letter, or its name."""
    left, right, y = equation.replace("->", ",").split(",")

    def operand(axes: str, rows: str, columns: str) -> ProductOperand:
        batch = tuple(axes.index(axis) if axis in axes else None for axis in y[:-2])
        return ProductOperand(tuple(sizes[axis] for axis in axes), batch, axes.index(rows), axes.index(columns))

    dtype, word = (kind, "ieee") if kind in NARROW else ("float32", kind)
    batch = tuple(sizes[axis] for axis in y[:-2])
    operands = operand(left, "m", "k"), operand(right, "k", "n")
    return ProductOp(batch, sizes["m"], sizes["k"], sizes["n"], *operands, dtype, result or dtype, word)


def matrices(equation: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both as (batch, M, K) and (batch, K, N), in the batch's order, 1 where they have none."""
    left, right, y = equation.replace("->", ",").split(",")

    def ordered(array: np.ndarray, axes: str, last: str) -> np.ndarray:
        wanted = [axis for axis in y[:-2] if axis in axes] + list(last)
        array = array.transpose([axes.index(axis) for axis in wanted])
        return array.reshape([array.shape[wanted.index(x)] if x in axes else 1 for x in y[:-2] + last])

    return ordered(a, left, "mk"), ordered(b, right, "kn")

"""Writes into a cache: operations, inputs, and what NumPy makes of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mhsa_compile.kernels.interface.ops import HeadLayout, KvScatterOp

DTYPES = [
    *map(np.dtype, ("f4", "f2", "f8", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?")),
    np.dtype(ml_dtypes.bfloat16),
]

INT64 = np.iinfo(np.int64)


def scattered(cache: np.ndarray, update: np.ndarray, indices: np.ndarray, axis: int) -> np.ndarray:
    """The cache with an update written as the standard's reference does it, row by row; beyond the last row it goes on
    at the first."""
    result = np.moveaxis(cache.copy(), axis, 1)
    rows = np.moveaxis(update, axis, 1)
    for b, index in enumerate(indices):
        for j in range(rows.shape[1]):
            result[b, (int(index) + j) % result.shape[1]] = rows[b, j]
    return np.moveaxis(result, 1, axis)


def drawn(rng: np.random.Generator, dtype: np.dtype, *shape: int) -> np.ndarray:
    """Any bits but those of NaN: what compares equal is equal."""
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    return rng.integers(0, 100, shape).astype(dtype)


def call_of(op: KvScatterOp, rng: np.random.Generator, B: int, L: int, S: int) -> tuple[list[np.ndarray], np.ndarray]:
    """(the arrays of a call: cache, update, indices; the result)."""
    sizes = {"B": B, "S": S, "X": 13}
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in op.cache]
    cache = drawn(rng, np.dtype("f4"), *shape)
    update = drawn(rng, np.dtype("f4"), *(L if i == op.axis else size for i, size in enumerate(shape)))
    ends = (INT64.min, INT64.max) if op.circular else (0, S - L)
    indices = rng.integers(*ends, B, endpoint=True) if op.indexed else np.zeros(B, np.int64)
    operand = update
    if op.update is not None:
        rows = update.swapaxes(1, 2) if update.ndim == 4 else update
        operand = np.full((B, L, op.update.width), np.nan, np.float32)
        operand[:, :, op.update.offset :][:, :, : rows[0, 0].size] = rows.reshape(B, L, -1)
    return [cache, operand, *([indices] if op.indexed else [])], scattered(cache, update, indices, op.axis)


BASE = KvScatterOp(
    cache=("B", 3, "S", 10), axis=2, length="L", update=None, circular=False, indexed=True, in_place=False
)  # fmt: skip

SHAPES = {
    "heads": {},
    "two axes": {"cache": ("B", "S"), "axis": 1},
    "rows": {"cache": ("B", "S", 21), "axis": 1},
    "last": {"cache": ("B", 3, 5, "S"), "axis": 3},
    "free row": {"cache": ("B", "S", "X", 3), "axis": 1},
    "five axes": {"cache": ("B", 2, 3, "S", 9), "axis": 3},
    "heads of rows": {"update": HeadLayout(1, "rows", 47, 11)},
    "row of rows": {"cache": ("B", "S", 21), "axis": 1, "update": HeadLayout(1, "rows", 40, 3)},
    "from the first": {"indexed": False},
}

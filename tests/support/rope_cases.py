"""Rotary embeddings: operations, inputs, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from mhsa_compile.kernels.interface.ops import HeadLayout, RotaryOp
from mhsa_compile.verification.error_budget import budget, max_error

NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

TABLE = 41  # positions in it


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, rotary_dim: int, interleaved: bool) -> np.ndarray:
    """Turns x (B, L, H, E) by angles (B or 1, L, R/2 or R), in the arrays' own dtype."""
    part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    cos, sin = cos[:, :, np.newaxis], sin[:, :, np.newaxis]
    whole = cos.shape[-1] == rotary_dim  # each element of a pair has its own
    apart = (lambda table: (table[..., 0::2], table[..., 1::2])) if interleaved else (lambda t: np.split(t, 2, axis=-1))
    one, two = apart(part)
    (cos1, cos2), (sin1, sin2) = (apart(table) if whole else (table, table) for table in (cos, sin))
    pair = (cos1 * one - sin1 * two, sin2 * one + cos2 * two)
    part = np.stack(pair, axis=-1).reshape(part.shape) if interleaved else np.concatenate(pair, axis=-1)
    return np.concatenate((part, rest), axis=-1)


def assert_right(y: np.ndarray, x: np.ndarray, cos: np.ndarray, sin: np.ndarray, R: int, interleaved: bool) -> None:
    """Asserts that `y` (B, L, H, E) is within the budget, whose yardstick is the same arithmetic at the dtype."""
    expected = turned(*(array.astype(np.float64) for array in (x, cos, sin)), R, interleaved)
    eager = turned(x, cos, sin, R, interleaved)
    assert y.dtype == eager.dtype == x.dtype
    assert max_error(expected, y) <= budget(expected, eager, str(x.dtype))


def angles(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    turns = rng.uniform(-np.pi, np.pi, shape)
    return np.cos(turns).astype(NUMPY[dtype]), np.sin(turns).astype(NUMPY[dtype])


def turn(
    op: RotaryOp, run: Callable[..., np.ndarray], rng: np.random.Generator, B: int, L: int, places: np.ndarray
) -> tuple[np.ndarray, ...]:
    """(y, x, cos, sin) of a run, which is given its output: y and x (B, L, H, E), the tables as they were given. What
    lies between the heads is NaN, and so is the output before."""
    H, E, dtype = op.num_heads, op.head_dim, NUMPY[op.dtype]
    columns = op.rotary_dim if op.whole_angles else op.rotary_dim // 2
    tables = angles(rng, *((TABLE,) if op.max_positions else places.shape), columns, dtype=op.dtype)
    x = rng.standard_normal((B, L, H, E)).astype(dtype)
    if op.x.layout == "rows":
        operand = np.full((B, L, op.x.width), np.nan, dtype)
        operand[:, :, op.x.offset : op.x.offset + H * E] = x.reshape(B, L, H * E)
    else:
        operand = np.ascontiguousarray(x.swapaxes(1, 2))
    empty = np.full((B, H, L, E) if op.output.layout == "heads" else (B, L, H * E), np.nan, dtype)
    y = run(operand, *tables, *([places] if op.max_positions else []), empty)
    return y.swapaxes(1, 2) if op.output.layout == "heads" else y.reshape(B, L, H, E), x, *tables


def check(op: RotaryOp, run: Callable[..., np.ndarray], sizes: Sequence[tuple[int, int]]) -> None:
    """Asserts that a run is right for each (B, L)."""
    rng = np.random.default_rng(0)
    for B, L in sizes:
        places = rng.integers(0, TABLE, (1 if op.shared_angles else B, L))
        y, x, *tables = turn(op, run, rng, B, L, places)
        cos, sin = (table[places] if op.max_positions else table for table in tables)
        assert_right(y, x, cos, sin, op.rotary_dim, op.interleaved)


BASE = RotaryOp(
    batch="B", length="L", num_heads=3, head_dim=26, rotary_dim=26, interleaved=False, max_positions="P",
    x=HeadLayout(0, "rows", 101, 7), output=HeadLayout(0, "rows", 78),
)  # fmt: skip

SHAPES = {
    "halves": {},
    "interleaved": {"interleaved": True},
    "part": {"rotary_dim": 14},
    "part, interleaved": {"rotary_dim": 14, "interleaved": True},
    "least": {"rotary_dim": 2, "interleaved": True, "num_heads": 1, "head_dim": 3, "output": HeadLayout(0, "rows", 3)},
    "wide": {"head_dim": 128, "rotary_dim": 128, "x": HeadLayout(0, "rows", 384), "output": HeadLayout(0, "rows", 384)},
    "heads to heads": {"x": HeadLayout(0, "heads", 78), "output": HeadLayout(0, "heads", 78)},
    "rows to heads": {"output": HeadLayout(0, "heads", 78), "interleaved": True},
    "of each place": {"max_positions": None},
    "one for all": {"shared_angles": True},
    "whole": {"whole_angles": True, "rotary_dim": 14},
    "whole, interleaved": {"whole_angles": True, "rotary_dim": 14, "interleaved": True},
    "whole, of each place": {"whole_angles": True, "max_positions": None},
    "of each place, one for all": {"max_positions": None, "shared_angles": True},
}

"""What the attention kernels for GPUs are tested with: operations, and the check of one against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fuzz.attention import NUMPY, Operands, draw_operands, evaluated, farthest, poison, reordered
from support.attention_ops import attention_of

from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout
from mhsa_compile.verification.parity import Draw, judge

ORDERS = 8
"""The number of orders in which PyTorch's sums are taken, where one may be luck."""
Sizes = tuple[int, int, int]  # B, L, S
Run = Callable[[AttentionOp, Operands, Sizes], np.ndarray]


def operation(heads: tuple[int, int] = (4, 2), widths: tuple[int, int] = (24, 40), **fields: Any) -> AttentionOp:
    """An attention with heads first and apart, rows out, in bfloat16, with symbolic sizes, unless `fields` say
    otherwise."""
    (H, G), (E, F) = heads, widths
    places = {role: HeadLayout(i, "heads", 0) for i, role in enumerate(("query", "key", "value"))}
    rest = {"band": None, "mask": None, "output": HeadLayout(0, "rows", H * F), "dtype": "bfloat16", "scale": E**-0.5}
    return attention_of("B", "L", "S", H, G, E, F, **{**rest, **places, **fields})


def check(run: Run, op: AttentionOp, sizes: Sizes, *, poisoned: bool = False) -> None:
    """Asserts that a run is within the budget of `parity`: PyTorch's eager attention at this dtype is the yardstick."""

    def draw(turn: int, orders: int) -> list[Draw]:
        operands = draw_operands(np.random.default_rng((17, turn)), op, sizes, 1.0, turn)
        truth, narrow = evaluated(op, operands, torch.float64), getattr(torch, op.dtype)
        yardstick = farthest(truth, [evaluated(op, reordered(operands, i), narrow) for i in range(orders)])
        if poisoned:
            poison(op, operands)
        return [(truth, yardstick.astype(NUMPY[op.dtype]), run(op, operands, sizes))]

    result = judge(lambda turn: draw(turn, 1), {})
    if not result.ok:
        result = judge(lambda turn: draw(turn, ORDERS), {})
    assert result.ok, result


def scattered(shape: tuple[int, int, int]) -> np.ndarray:
    """Random pairs, with keys that nobody sees, a corner that everybody sees, and a query that sees nothing."""
    visible = np.random.default_rng(1).random(shape) < 0.5
    _, L, S = shape
    visible[:, :, S // 3 : S // 2] = False
    visible[:, : L // 2, S // 2 :] = True
    visible[:, L - 1] = False
    return visible

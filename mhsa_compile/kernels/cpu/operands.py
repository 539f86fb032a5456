"""Where the operands of an attention lie: its arguments, one head of each read in place, its mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.base import AttentionOp, MaskInput, Placement
from mhsa_compile.kernels.cpu.vectors import Expr, argument, bind

LOG2_E = math.log2(math.e)
MaskReader = Callable[[Expr, Expr, Expr], Expr]  # (head, query, key) -> the mask's element


@dataclass(frozen=True)
class HeadView:
    """One head of one operand, read in place: `buffer[at(row, column)]` is an element."""

    buffer: Expr
    at: Callable[[Expr, Expr], list[Expr]]


def input_arguments(op: AttentionOp, batch: Expr, q_length: Expr, kv_length: Expr) -> dict[int, Expr]:
    """One argument for each distinct input: a fused projection hands Q, K and V over in one buffer."""
    roles = (
        (op.query, q_length, op.num_heads, op.head_dim),
        (op.key, kv_length, op.num_kv_heads, op.head_dim),
        (op.value, kv_length, op.num_kv_heads, op.v_head_dim),
    )
    buffers: dict[int, Expr] = {}
    for place, length, heads, width in sorted(roles, key=lambda role: role[0].buffer):
        if place.buffer not in buffers:
            shape = placed_shape(place, batch, length, heads, width)
            buffers[place.buffer] = argument(f"input{place.buffer}", shape, op.dtype)
    return buffers


def placed_shape(place: Placement, batch: Expr, length: Expr, heads: int, head_dim: int) -> list[Expr]:
    if place.layout == "rows":
        return [batch, length, T.int64(place.width)]
    return [batch, T.int64(heads), length, T.int64(head_dim)]


def head_view(buffer: Expr, place: Placement, head_dim: int, b: Expr, head: Expr) -> HeadView:
    if place.layout == "rows":
        return HeadView(buffer, lambda row, column: [b, row, place.offset + head * head_dim + column])
    return HeadView(buffer, lambda row, column: [b, head, row, column])


def mask_reader(mask: Expr, b: Expr) -> MaskReader:
    """Reads the mask at (head, query, key); clamping each index to its axis makes an axis of size 1 broadcast."""
    last = [bind(size - 1) for size in mask.shape]

    def read(head: Expr, query: Expr, key: Expr) -> Expr:
        return mask[tuple(T.min(i, end) for i, end in zip((b, head, query, key), last, strict=True))]

    return read


def mask_bias(mask: MaskInput | None, element: Expr) -> Expr:
    """An element of the mask as a number to add to a score, in units of log2; -inf where it hides."""
    assert mask is not None
    if mask.dtype == "bool":
        return T.Select(element, T.float32(0), T.float32(-math.inf))
    return element * T.float32(LOG2_E)

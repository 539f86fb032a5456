"""Where the heads of an operand lie: one of them read in place, and the shape of the buffer that holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.interface.ops import HeadLayout


@dataclass(frozen=True)
class HeadView:
    """One head of one operand, read in place: `buffer[at(row, column)]` is an element."""

    buffer: Expr
    at: Callable[[Expr, Expr], list[Expr]]


def head_view(buffer: Expr, place: HeadLayout, head_dim: int, b: Expr, head: Expr) -> HeadView:
    if place.layout == "rows":
        return HeadView(buffer, lambda row, column: [b, row, place.offset + head * head_dim + column])
    return HeadView(buffer, lambda row, column: [b, head, row, column])


def placed_shape(place: HeadLayout, batch: Expr, length: Expr, heads: int, head_dim: int) -> list[Expr]:
    if place.layout == "rows":
        return [batch, length, T.int64(place.width)]
    return [batch, T.int64(heads), length, T.int64(head_dim)]

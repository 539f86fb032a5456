"""Where the heads of an operand lie: one of them read in place, and the shape of the buffer that holds them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.interface.ops import HeadLayout


@dataclass(frozen=True)
class HeadView:
    """One head of one operand, read in place: `buffer[at(row, column)]` is an element. Where rows have scales, that of
    one is `scales[scale_at(row)]`, and those of the rows behind it lie behind it."""

    buffer: Expr
    at: Callable[[Expr, Expr], list[Expr]]
    scales: Expr | None = None
    scale_at: Callable[[Expr], list[Expr]] | None = None


def head_view(
    buffer: Expr, place: HeadLayout, head_dim: int, b: Expr, head: Expr, scales: Expr | None = None
) -> HeadView:
    """The view of a head; `scales` are those of its rows, (B, heads, length)."""
    if place.layout == "rows":
        return HeadView(buffer, lambda row, column: [b, row, place.offset + head * head_dim + column])
    scale_at = None if scales is None else lambda row: [b, head, row]
    return HeadView(buffer, lambda row, column: [b, head, row, column], scales, scale_at)


def placed_shape(place: HeadLayout, batch: Expr, length: Expr, heads: int, head_dim: int) -> list[Expr]:
    if place.layout == "rows":
        return [batch, length, T.int64(place.width)]
    return [batch, T.int64(heads), length, T.int64(head_dim)]

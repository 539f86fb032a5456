"""Linears of weights in few bits, as operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from mhsa_compile.frontend.fusion.fused_nodes import FusedBlockLinear
from mhsa_compile.frontend.relax.imported_module import ImportContext
from mhsa_compile.frontend.relax.values import RelaxValue, dims
from mhsa_compile.kernels.interface.ops import BlockLinearOp


def block_linear(context: ImportContext, fused: FusedBlockLinear, parts: Sequence[list[Any]]) -> RelaxValue:
    """A linear of what its node takes (`FusedBlockLinear.parted`). Scales and zeros of a row may lie in an axis of
    their own."""
    (x,), numbers, scales, zeros, biases = parts
    if len(dims(x)) == 1:
        row = context.bb.emit(relax.op.reshape(x, [1, -1]))
        return relax.op.reshape(block_linear(context, fused, [[row], *parts[1:]]), [-1])
    *rows, _ = dims(x)
    op = BlockLinearOp(
        rows=tuple(map(context.dim, rows)),
        in_features=fused.in_features,
        widths=fused.widths,
        biased=fused.biased,
        transposed=(False,) * len(fused.widths),
        dtype=str(x.ty.dtype),  # type: ignore[arg-type]
        padding=fused.padding,
        bits=fused.bits,
        block=fused.block,
        zeros=fused.zeros,
        rounds_x=fused.rounds_x,
    )
    flat = [_flat(context, value) for value in (*scales, *zeros)]
    return context.call(op, [x, *numbers, *flat, *biases], [*rows, op.pitch])


def _flat(context: ImportContext, value: Any) -> Any:
    return value if len(dims(value)) == 1 else context.bb.emit(relax.op.reshape(value, [-1]))

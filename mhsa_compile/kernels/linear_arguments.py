"""What a linear and the packing of its weights are called with."""

from __future__ import annotations

from collections.abc import Iterable

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.arguments import Expr, argument
from mhsa_compile.kernels.operations import LinearOp


def weight_arguments(op: LinearOp) -> tuple[list[Expr], list[Expr | None]]:
    """(weights, biases), one of each for each projection; None where it has no bias."""
    weights, biases = [], []
    for i, width in enumerate(op.widths):
        shape = (op.in_features, width) if op.transposed[i] else (width, op.in_features)
        weights.append(argument(f"weight{i}", [T.int64(n) for n in shape], op.dtype))
    for i, width in enumerate(op.widths):
        biases.append(argument(f"bias{i}", [T.int64(width)], op.dtype) if op.biased[i] else None)
    return weights, biases


def packed_arguments(packed: Iterable[tuple[tuple[int, ...], str]]) -> list[Expr]:
    """Of the shapes and dtypes that `Emitted.packed` has."""
    return [argument(f"packed{i}", [T.int64(n) for n in shape], dtype) for i, (shape, dtype) in enumerate(packed)]

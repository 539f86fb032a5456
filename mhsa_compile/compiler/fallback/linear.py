"""Linears in TVM's operators, for whatever no kernel takes: right in every case, as fast as TVM's own schedules.

y = x W^T + b for each weight, side by side, then the padding: x (B, L, K) -> y (B, L, pitch). Sums are float32.
"""

from __future__ import annotations

from typing import Any

from tvm import relax

from mhsa_compile.kernels.interface.ops import LinearOp


def emit(builder: relax.BlockBuilder, op: LinearOp, inputs: list[Any]) -> Any:
    """The value of `op` on its `inputs`: x, the weights, then the biases that there are."""
    x, weights, biases = inputs[0], inputs[1 : 1 + len(op.widths)], iter(inputs[1 + len(op.widths) :])
    parts = []
    for weight, biased, transposed in zip(weights, op.biased, op.transposed, strict=True):
        if not transposed:
            weight = builder.emit(relax.op.permute_dims(weight))
        part = builder.emit(relax.op.matmul(x, weight, out_dtype="float32"))
        if biased:
            part = builder.emit(relax.op.add(part, _as(builder, next(biases), "float32")))
        parts.append(_as(builder, part, op.dtype))
    if op.padding:
        rows = relax.ShapeExpr([*x.ty.shape.values[:-1], op.padding])
        parts.append(builder.emit(relax.op.zeros(rows, op.dtype)))
    return parts[0] if len(parts) == 1 else builder.emit(relax.op.concat(parts, axis=-1))


def _as(builder: relax.BlockBuilder, value: Any, dtype: str) -> Any:
    return value if value.ty.dtype == dtype else builder.emit(relax.op.astype(value, dtype))

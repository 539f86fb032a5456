"""Which operations can be written out in TVM's operators, and by what: linears here, attention in the file beside.

Linears are right in every case, and as fast as TVM's own schedules: y = x W^T + b for each weight, side by side, then
the padding; x (B, L, K) -> y (B, L, pitch). Sums are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import relax

from mhsa_compile.compiler.fallback import attention
from mhsa_compile.kernels.interface.ops import AttentionOp, AttentionProbsOp, LinearOp, Op, ScoresOp

Emit = Callable[[Any, Any, list[Any]], Any]
"""A relax.BlockBuilder, the operation and its inputs -> its value."""


def _linear(builder: relax.BlockBuilder, op: LinearOp, inputs: list[Any]) -> Any:
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


@dataclass(frozen=True)
class _PlainForm:
    emit: Emit
    takes: Callable[[Any], bool] = lambda op: True


_PLAIN_FORMS: dict[type[Op], _PlainForm] = {
    LinearOp: _PlainForm(_linear, takes=lambda op: not op.int8_weights and op.epilogue is None),
    AttentionOp: _PlainForm(attention.emit),
    ScoresOp: _PlainForm(attention.emit),
    AttentionProbsOp: _PlainForm(attention.emit, takes=lambda op: op.whole),
}


def plain_form(op: Op) -> Emit | None:
    """What writes an operation out in TVM's operators, or None."""
    form = _PLAIN_FORMS.get(type(op))
    return form.emit if form is not None and form.takes(op) else None

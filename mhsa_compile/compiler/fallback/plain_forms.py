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
from mhsa_compile.kernels.interface.ops import (
    AttentionOp,
    AttentionProbsOp,
    BlockLinearOp,
    LinearOp,
    Op,
    QuantisedLinearOp,
    QuantiseOp,
    ScoresOp,
)

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
    return _side_by_side(builder, op, x, parts)


def _side_by_side(builder: relax.BlockBuilder, op: LinearOp, x: Any, parts: list[Any]) -> Any:
    if op.padding:
        rows = relax.ShapeExpr([*x.ty.shape.values[:-1], op.padding])
        parts.append(builder.emit(relax.op.zeros(rows, op.dtype)))
    return parts[0] if len(parts) == 1 else builder.emit(relax.op.concat(parts, axis=-1))


def _quantised_linear(builder: relax.BlockBuilder, op: QuantisedLinearOp, inputs: list[Any]) -> Any:
    """The same of bytes: sums of int32, then floats."""
    (x, x_zero, x_scale), count = inputs[:3], len(op.widths)
    weights, zeros, scales = (inputs[3 + i * count : 3 + (i + 1) * count] for i in range(3))
    biases, parts = iter(inputs[3 + 3 * count :]), []
    rows = _centred(builder, x, x_zero)
    for weight, zero, scale, biased, transposed in zip(weights, zeros, scales, op.biased, op.transposed, strict=True):
        if not transposed:
            weight = builder.emit(relax.op.permute_dims(weight))
        sums = builder.emit(relax.op.matmul(rows, _centred(builder, weight, zero), out_dtype="int32"))
        scale = builder.emit(relax.op.multiply(x_scale, scale))
        part = builder.emit(relax.op.multiply(_as(builder, sums, "float32"), scale))
        parts.append(builder.emit(relax.op.add(part, next(biases))) if biased else part)
    return _side_by_side(builder, op, x, parts)


def _centred(builder: relax.BlockBuilder, values: Any, zero: Any) -> Any:
    return builder.emit(relax.op.subtract(_as(builder, values, "int32"), _as(builder, zero, "int32")))


def _block_linear(builder: relax.BlockBuilder, op: BlockLinearOp, inputs: list[Any]) -> Any:
    """Weights in floats, which are made when they are bound; x as it is."""
    count = len(op.widths)
    x, numbers, scales = inputs[0], inputs[1 : 1 + count], inputs[1 + count : 1 + 2 * count]
    others, weights = iter(inputs[1 + 2 * count :]), []
    for width, packed, scale, kind in zip(op.widths, numbers, scales, op.zeros, strict=True):
        q, blocks = _unpacked(builder, packed, op.bits), relax.ShapeExpr([width, op.blocks, 1])
        zero: Any = relax.const(float(1 << (op.bits - 1)), "float32")
        if kind:
            zero = next(others)
        if kind == "bytes":
            rows = _unpacked(builder, builder.emit(relax.op.reshape(zero, [width, op.zero_bytes])), op.bits)
            zero = builder.emit(relax.op.strided_slice(rows, [1], [0], [op.blocks]))
        if kind:
            zero = builder.emit(relax.op.reshape(_as(builder, zero, "float32"), blocks))
        scale = builder.emit(relax.op.reshape(_as(builder, scale, "float32"), blocks))
        wide = builder.emit(relax.op.multiply(builder.emit(relax.op.subtract(q, zero)), scale))
        rows = builder.emit(relax.op.reshape(wide, [width, op.blocks * op.block]))
        weights.append(_as(builder, builder.emit(relax.op.strided_slice(rows, [1], [0], [op.in_features])), op.dtype))
    plain = LinearOp(op.rows, op.in_features, op.widths, op.biased, op.transposed, op.dtype, padding=op.padding)
    return _linear(builder, plain, [x, *weights, *others])


def _unpacked(builder: relax.BlockBuilder, packed: Any, bits: int) -> Any:
    """(..., bytes) uint8 -> (..., numbers) float32, the first of a byte from its lowest bits."""
    mask, parts = relax.const((1 << bits) - 1, "uint8"), []
    for first in range(0, 8, bits):
        moved = builder.emit(relax.op.right_shift(packed, relax.const(first, "uint8"))) if first else packed
        parts.append(builder.emit(relax.op.bitwise_and(moved, mask)))
    *leading, bytes = (int(size) for size in packed.ty.shape.values)
    numbers = builder.emit(relax.op.stack(parts, axis=-1)) if len(parts) > 1 else parts[0]
    return _as(builder, builder.emit(relax.op.reshape(numbers, [*leading, bytes * len(parts)])), "float32")


def _quantise(builder: relax.BlockBuilder, op: QuantiseOp, inputs: list[Any]) -> Any:
    """As `kernels/cpu/quantise` has it, NaN apart."""
    (x,) = inputs

    def number(value: float) -> Any:
        return relax.const(value, "float32")

    least, most = (builder.emit(reduce(x)) for reduce in (relax.op.min, relax.op.max))
    least = builder.emit(relax.op.minimum(least, number(0)))
    most = builder.emit(relax.op.maximum(most, number(0)))
    step = builder.emit(relax.op.divide(builder.emit(relax.op.subtract(most, least)), number(255)))
    step = builder.emit(relax.op.where(builder.emit(relax.op.equal(most, least)), number(1), step))
    zero = builder.emit(relax.op.subtract(number(0), builder.emit(relax.op.divide(least, step))))
    zero = builder.emit(relax.op.round(builder.emit(relax.op.clip(zero, 0, 255))))
    y = builder.emit(relax.op.round(builder.emit(relax.op.divide(x, step))))
    y = builder.emit(relax.op.clip(builder.emit(relax.op.add(y, zero)), 0, 255))
    return builder.emit(relax.Tuple([_as(builder, y, "uint8"), step, _as(builder, zero, "uint8")]))


def _as(builder: relax.BlockBuilder, value: Any, dtype: str) -> Any:
    return value if value.ty.dtype == dtype else builder.emit(relax.op.astype(value, dtype))


@dataclass(frozen=True)
class _PlainForm:
    emit: Emit
    takes: Callable[[Any], bool] = lambda op: True


_PLAIN_FORMS: dict[type[Op], _PlainForm] = {
    LinearOp: _PlainForm(_linear, takes=lambda op: not op.int8_weights and op.epilogue is None),
    QuantisedLinearOp: _PlainForm(_quantised_linear, takes=lambda op: op.epilogue is None),
    BlockLinearOp: _PlainForm(_block_linear, takes=lambda op: op.epilogue is None),
    QuantiseOp: _PlainForm(_quantise),
    AttentionOp: _PlainForm(attention.emit, takes=lambda op: op.kv_dtype is None),
    ScoresOp: _PlainForm(attention.emit, takes=lambda op: op.attention.kv_dtype is None),
    AttentionProbsOp: _PlainForm(attention.emit, takes=lambda op: op.whole and op.attention.kv_dtype is None),
}


def plain_form(op: Op) -> Emit | None:
    """What writes an operation out in TVM's operators, or None."""
    form = _PLAIN_FORMS.get(type(op))
    return form.emit if form is not None and form.takes(op) else None

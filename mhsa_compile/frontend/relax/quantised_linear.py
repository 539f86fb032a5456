"""Bytes by the range of an array, and linears of bytes, as operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax

from mhsa_compile.frontend.fusion.fused_nodes import FusedQuantisedLinear
from mhsa_compile.frontend.relax.imported_module import ImportContext
from mhsa_compile.frontend.relax.values import RelaxValue, dims
from mhsa_compile.kernels.interface.ops import QuantisedLinearOp, QuantiseOp

_CENTRE = {"int8": 0, "uint8": 128}


def quantise(context: ImportContext, x: RelaxValue) -> Any:
    """DynamicQuantizeLinear: (bytes, scale, zero)."""
    sizes = dims(x)
    op = QuantiseOp(tuple(map(context.dim, sizes)))
    kinds = [([*sizes], "uint8"), ([], "float32"), ([], "uint8")]
    return relax.Tuple(context.call_for_several(op, [x], [relax.TensorType(*kind) for kind in kinds]))


def quantised_linear(context: ImportContext, fused: FusedQuantisedLinear, parts: Sequence[list[Any]]) -> RelaxValue:
    """A linear of bytes, of what its node takes (`FusedQuantisedLinear.parted`)."""
    (x, x_zero, x_scale), weights, zeros, scales, biases = parts
    *rows, in_features = dims(x)
    x_dtype, stored = str(x.ty.dtype), tuple(str(weight.ty.dtype) for weight in weights)
    x_zero = relax.const(0, x_dtype) if x_zero is None else _reshaped(context, x_zero, [])
    x_scale = relax.const(1, "float32") if x_scale is None else _reshaped(context, x_scale, [])
    offsets = [_offsets(*kind) for kind in zip(zeros, stored, fused.widths, strict=True)]
    op = QuantisedLinearOp(
        rows=tuple(map(context.dim, rows)),
        in_features=int(in_features),
        widths=fused.widths,
        biased=fused.biased,
        transposed=fused.transposed,
        padding=fused.padding,
        x_dtype=x_dtype,  # type: ignore[arg-type]
        stored=stored,  # type: ignore[arg-type]
        centred=all((zero == _CENTRE[dtype]).all() for zero, dtype in zip(offsets, stored, strict=True)),
    )
    inputs = [x, x_zero, x_scale, *weights, *map(relax.const, offsets)]
    inputs += [_of_features(context, scale, width) for scale, width in zip(scales, fused.widths, strict=True)]
    return context.call(op, [*inputs, *(bias for bias in biases if bias is not None)], [*rows, op.pitch])


def _offsets(zero: Any, dtype: str, width: int) -> np.ndarray[Any, Any]:
    """The zeros of a weight's features."""
    numbers = np.zeros(1, dtype) if zero is None else zero.value.numpy().reshape(-1)
    return np.ascontiguousarray(np.broadcast_to(numbers, [width]))


def _of_features(context: ImportContext, scale: Any, width: int) -> RelaxValue:
    """The scales of a weight's features."""
    if scale is None:
        return relax.const(np.ones(width, np.float32))
    if isinstance(scale, tvm.ir.GenericConst):
        return relax.const(np.ascontiguousarray(np.broadcast_to(scale.value.numpy().reshape(-1), [width])))
    flat = _reshaped(context, scale, [-1])
    return context.bb.normalize(relax.op.broadcast_to(flat, [width])) if int(dims(flat)[0]) != width else flat


def _reshaped(context: ImportContext, value: RelaxValue, shape: list[int]) -> RelaxValue:
    if len(dims(value)) == len(shape):
        return value
    return context.bb.normalize(relax.op.reshape(value, shape))

"""bfloat16 in a PrimFunc as its bits: widened to float32, computed, and rounded where it is stored or cast.

TVM's own passes for it read what they round twice, so that values with names would be bound twice, leave out what is
bound within an expression, and round some NaN to infinity or zero. What is left for them is to call the arrays that a
function takes ones of uint16, as those are here that it allocates.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Expr

from mhsa_compile.kernels.cpu.formats.floats import rounded_bits
from mhsa_compile.kernels.cpu.simd.scalar_math import let

_ARITHMETIC = (tirx.Add, tirx.Sub, tirx.Mul, tirx.Div, tirx.Max, tirx.Min)
_COMPARISONS = (tirx.EQ, tirx.NE, tirx.LT, tirx.LE, tirx.GT, tirx.GE)


def bfloat16_as_bits(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with its arithmetic of bfloat16 as float32's."""
    allocated: dict[Any, Any] = {}

    def of_bits(variable: Any, kind: Any) -> Any:
        """The buffer in the place of one that the function allocates."""
        if (
            isinstance(variable.ty, tirx.BufferType)
            and variable.dtype == "bfloat16"
            and kind == tvm_ffi.DefRegionKind.DEF_SIMPLE
        ):
            allocated[variable] = tirx.decl_buffer(variable.shape, "uint16", variable.name)
        return allocated.get(variable, variable)

    changes = [
        (tirx.Cast, _cast),
        (tirx.Select, _select),
        (tvm.ir.Call, _call),
        (tvm.ir.expr.TensorLoad, _load),
        (tirx.BufferStore, _store),
        *((kind, _operation) for kind in (*_ARITHMETIC, *_COMPARISONS)),
    ]
    return tvm_ffi.structural_map(function, changes, with_def_region_kind=(tvm.ir.Var, of_bits))


def _is_narrow(value: Expr) -> bool:
    return _dtype(value) == "bfloat16"


def _dtype(value: Expr) -> str:
    """ "" of what is no number, such as an address."""
    return str(getattr(value.ty, "dtype", ""))


def _wide(value: Expr) -> Expr:
    """A bfloat16 as float32; any other value as it is."""
    if not _is_narrow(value):
        return value
    if isinstance(value, tirx.FloatImm):
        return tirx.const(float(value.value), "float32")
    return tirx.reinterpret("float32", tirx.reinterpret("uint16", value).astype("uint32") << 16)


def _narrow(value: Expr, *, any_nan: bool = False) -> Expr:
    """A float32 rounded to bfloat16; `any_nan` of one that bfloat16 alone was not computed to."""

    def of(bits: Expr) -> Expr:
        return let(bits >> 16, lambda upper: rounded_bits(bits, upper, 1, any_nan=any_nan).astype("uint16"), "uint32")

    return tirx.reinterpret("bfloat16", let(tirx.reinterpret("uint32", value), of, "uint32"))


def _unrounded(value: Expr) -> Expr:
    """A bfloat16 as float32; what arithmetic of the same expression computed, before it is rounded."""
    is_rounded = _is_narrow(value) and isinstance(value, tvm.ir.Call) and isinstance(value.args[0], tirx.Let)
    bits = value.args[0].value if is_rounded else None
    of_arithmetic = is_rounded and not isinstance(value.args[0].body.body.value, tirx.Select)
    return bits.args[0] if of_arithmetic and isinstance(bits, tvm.ir.Call) else _wide(value)


def _operation(node: Any) -> Any:
    if not _is_narrow(node.a):
        return node
    result = type(node)(_unrounded(node.a), _unrounded(node.b))
    return _narrow(result) if _is_narrow(node) else result


def _cast(node: Any) -> Any:
    if _is_narrow(node):
        return node.value if _is_narrow(node.value) else _narrow(node.value.astype("float32"), any_nan=True)
    return _wide(node.value).astype(node.ty.dtype) if _is_narrow(node.value) else node


def _bits(value: Expr) -> Expr:
    return tirx.reinterpret("uint16", _narrow(_wide(value)) if isinstance(value, tirx.FloatImm) else value)


def _load(node: Any) -> Any:
    is_allocated = _is_narrow(node) and node.source.dtype == "uint16"
    return tirx.reinterpret("bfloat16", tirx.BufferLoad(node.source, node.indices)) if is_allocated else node


def _store(node: Any) -> Any:
    is_allocated = _is_narrow(node.value) and node.buffer.dtype == "uint16"
    return tirx.BufferStore(node.buffer, _bits(node.value), node.indices) if is_allocated else node


def _select(node: Any) -> Any:
    if not _is_narrow(node):
        return node
    sides = map(_bits, (node.true_value, node.false_value))
    return tirx.reinterpret("bfloat16", tirx.Select(node.condition, *sides))


def _call(node: Any) -> Any:
    """A function of bfloat16 as one of float32; of a choice, its sides' bits."""
    name = node.op.name if isinstance(node.op, tvm.ir.Op) else ""
    asks = _dtype(node) == "bool" and any(map(_is_narrow, node.args))  # such as isnan
    if name == "tirx.reinterpret" or not (_is_narrow(node) or asks):
        return node
    if name == "tirx.if_then_else":
        condition, *sides = node.args
        return tirx.reinterpret("bfloat16", tirx.if_then_else(condition, *map(_bits, sides)))
    kind = "float32" if _is_narrow(node) else node.ty.dtype
    result = tirx.call_intrin(kind, name, *map(_wide, node.args))
    return _narrow(result) if _is_narrow(node) else result

"""Values of Relax as converters ask about them: dims, dtypes, and which sizes are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.sym import Analyzer

RelaxValue = Any  # relax.Var
SizeExpr = Any  # int or tirx.PrimExpr
Converter = Callable[[Any, list[Any], dict[str, Any]], Any]
"""(builder, inputs, attributes of a node) -> its result, not yet normalised; None where TVM's own converter serves."""

NARROW = ("float16", "bfloat16")


def dims(value: RelaxValue) -> list[SizeExpr]:
    return list(value.ty.shape.values)


def equal(one: SizeExpr, other: SizeExpr) -> bool:
    """Whether two sizes are the same at every call."""
    return isinstance(by := difference(one, other), int) and by == 0


def difference(one: SizeExpr, other: SizeExpr) -> SizeExpr:
    """An int where it is the same at every call."""
    result = Analyzer().simplify(tirx.const(0, "int64") + one - other)
    return int(result) if isinstance(result, tirx.IntImm) else result


def dtype_of(value: Any) -> str | None:
    return str(value.ty.dtype) if value is not None and isinstance(value.ty, relax.TensorType) else None


def is_floating(dtype: str | None) -> bool:
    return dtype is not None and dtype.startswith(("float", "bfloat"))


def is_constant(value: Any) -> bool:
    return isinstance(value, tvm.ir.GenericConst)


def text_of(value: str | bytes) -> str:
    """An attribute that is a text, as TVM's importer hands it on."""
    return value.decode() if isinstance(value, bytes) else value

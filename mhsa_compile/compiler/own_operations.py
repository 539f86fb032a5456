"""Products of two arrays that are computed in the call, whatever order their axes lie in, and softmaxes that no
attention takes, along whatever axis, become operations of ours.

    t = permute_dims(k); s = matmul(q, t)        ->        s = product(q, k), read where it lies

What no kernel takes stays TVM's, products with sums in float32 whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax, tirx
from tvm.ir import Expr

from mhsa_compile.compiler.calls import with_calls
from mhsa_compile.frontend.relax.imported_module import DimNames, ImportedModule
from mhsa_compile.frontend.relax.sizes.broadcasting import dims_of, equal
from mhsa_compile.kernels.interface.ops import Op, ProductOp, ProductOperand, SoftmaxOp

_NARROW = ("float16", "bfloat16")


def with_own_operations(imported: ImportedModule, takes: Callable[[Op], bool]) -> ImportedModule:
    """The module with such calls as operations; `takes` says whether a kernel can compute one."""
    ops = dict(imported.ops)
    of_products, of_softmaxes = DimNames("extent"), DimNames("extent")

    def as_operation(op: Op, operands: list[Expr], call: Expr) -> Expr:
        name = f"op_{len(ops)}"
        ops[name] = op
        return relax.op.call_dps_packed(name, operands, call.ty)

    def product(builder: Any, call: Any) -> Any:
        if call.op != tvm.ir.Op.get("relax.matmul"):
            return call
        kinds = [str(value.ty.dtype) for value in (*call.args, call)]
        operation = _product(builder, call, of_products)
        if operation is not None and takes(operation[0]):
            return as_operation(*operation, call)
        if kinds[0] in _NARROW and kinds == kinds[:1] * 3:
            wide = builder.emit(relax.op.matmul(*call.args, out_dtype="float32"))
            return relax.op.astype(wide, kinds[2])
        return call

    def softmax(builder: Any, call: Any) -> Any:
        shape = getattr(call.ty, "shape", None)
        if call.op != tvm.ir.Op.get("relax.nn.softmax") or not isinstance(shape, relax.ShapeExpr):
            return call
        dims = tuple(map(of_softmaxes, shape.values))
        if not dims or str(call.ty.dtype) != "float32":
            return call
        op = SoftmaxOp(dims, int(call.attrs.axis) % len(dims))
        return as_operation(op, [call.args[0]], call) if takes(op) else call

    products = relax.transform.DeadCodeElimination()(with_calls(imported.module, product, "main"))
    return replace(imported, module=with_calls(products, softmax, "main"), ops=ops)


@dataclass(frozen=True)
class _Stored:
    """A value as an array with its axes in another order: axis i of it is axis `axes[i]` of `array`."""

    array: Expr
    axes: tuple[int, ...]


def _product(builder: Any, call: Any, sizes: DimNames) -> tuple[ProductOp, list[Expr]] | None:
    """(the operation, its inputs) of a matmul, or None where it is none of two matrices of floats."""
    values = list(call.args)
    shapes = [shape for shape in map(dims_of, (*values, call)) if shape is not None and len(shape) > 1]
    kinds = [str(value.ty.dtype) for value in values]
    if len(shapes) < 3 or kinds[0] != kinds[1]:
        return None
    if kinds[0] not in ("float32", *_NARROW) or str(call.ty.dtype) not in ("float32", *_NARROW):
        return None
    left, right, result = shapes
    if not equal(left[-1], right[-2]) or (isinstance(left[-1], tirx.IntImm) and left[-1].value == 1):
        return None  # an outer product, which is arithmetic on elements, goes into what follows it
    sources = [_stored_operand(builder, value) for value in values]
    if sources[0].array.ty.dtype != sources[1].array.ty.dtype:
        sources = [_stored_operand(builder, value, widened=False) for value in values]
    places = [_batch(shape[:-2], result[:-2]) for shape in (left, right)]
    batches = [axes for axes in places if axes is not None]
    if len(batches) < 2:
        return None
    operands = [
        ProductOperand(
            tuple(map(sizes, one.array.ty.shape.values)),
            tuple(None if axis is None else one.axes[axis] for axis in batch),
            one.axes[-2],
            one.axes[-1],
        )
        for one, batch in zip(sources, batches, strict=True)
    ]
    op = ProductOp(
        batch=tuple(map(sizes, result[:-2])),
        rows=sizes(left[-2]),
        inner=sizes(left[-1]),
        columns=sizes(right[-1]),
        left=operands[0],
        right=operands[1],
        dtype=str(sources[0].array.ty.dtype),  # type: ignore[arg-type]
        result=str(call.ty.dtype),  # type: ignore[arg-type]
    )
    return op, [one.array for one in sources]


def _batch(own: list[Expr], all_: list[Expr]) -> list[int | None] | None:
    """For each axis of the product's batch, which of an operand's own it is; None within where it is broadcast, and
    None where that is not known."""
    missing = len(all_) - len(own)
    places: list[int | None] = [None] * missing
    for axis, (size, full) in enumerate(zip(own, all_[missing:], strict=True)):
        if isinstance(size, tirx.IntImm) and size.value == 1:
            places.append(None)
        elif equal(size, full):
            places.append(axis)
        else:
            return None
    return places


def _stored_operand(builder: Any, value: Expr, *, widened: bool = True) -> _Stored:
    """What a value is an array's transpose of, `widened` from a narrower dtype or not; else the value itself."""
    axes = tuple(range(len(value.ty.shape.values)))
    while True:
        definition = builder.lookup_binding(value) if isinstance(value, relax.Var) else value
        if not isinstance(definition, relax.Call) or not isinstance(definition.op, tvm.ir.Op):
            return _Stored(value, axes)
        if definition.op.name == "relax.permute_dims":
            order = definition.attrs.axes
            order = list(map(int, order)) if order is not None else list(reversed(range(len(axes))))
            axes, value = tuple(order[axis] for axis in axes), definition.args[0]
        elif widened and definition.op.name == "relax.astype" and _widens(definition):
            value = definition.args[0]
        else:
            return _Stored(value, axes)


def _widens(cast: Expr) -> bool:
    return str(cast.ty.dtype) == "float32" and str(cast.args[0].ty.dtype) in _NARROW

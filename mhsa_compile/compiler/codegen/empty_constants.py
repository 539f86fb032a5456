"""Constants without elements, which TVM writes into a library and then cannot read: a call allocates them instead."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator


def allocated(module: Any, main: str) -> Any:
    """The module whose function `main` reads no constant without elements."""
    function = module[main]
    empty: list[Any] = []

    def note(expression: Any) -> None:
        if isinstance(expression, tvm.ir.GenericConst) and isinstance(expression.ty, relax.TensorType):
            empty.extend([expression] if 0 in expression.value.shape else [])

    relax.analysis.post_order_visit(function, note)
    if not empty:
        return module
    changed = _Allocating(module)
    changed.builder_.update_func(module.get_global_var(main), changed.visit_expr(function))
    return changed.builder_.get()


@mutator
class _Allocating(PyExprMutator):  # type: ignore[misc]
    def visit_generic_const_(self, constant: Any) -> Any:
        if not isinstance(constant.ty, relax.TensorType) or 0 not in constant.value.shape:
            return constant
        shape = relax.ShapeExpr(list(map(int, constant.value.shape)))
        allocation = relax.op.builtin.alloc_tensor(shape, str(constant.ty.dtype), 0)
        return self.builder_.emit(allocation)

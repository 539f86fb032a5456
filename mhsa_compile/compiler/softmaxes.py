"""Softmaxes that no attention takes become operations of ours, along whatever axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mhsa_compile.frontend.relax.imported_module import DimNames, ImportedModule
from mhsa_compile.kernels.interface.ops import Op, SoftmaxOp


def with_softmaxes(imported: ImportedModule, takes: Callable[[Op], bool]) -> ImportedModule:
    """The module with its softmaxes of float32 as operations; `takes` says whether a kernel can compute one."""
    ops, sizes = dict(imported.ops), DimNames("extent")

    @mutator
    class Softmaxes(PyExprMutator):  # type: ignore[misc]
        def visit_call_(self, call: Any) -> Any:
            call = super().visit_call_(call)
            shape = getattr(call.ty, "shape", None)
            if call.op != tvm.ir.Op.get("relax.nn.softmax") or not isinstance(shape, relax.ShapeExpr):
                return call
            dims = tuple(map(sizes, shape.values))
            if not dims or str(call.ty.dtype) != "float32":
                return call
            op = SoftmaxOp(dims, int(call.attrs.axis) % len(dims))
            if not takes(op):
                return call
            name = f"op_{len(ops)}"
            ops[name] = op
            return relax.op.call_dps_packed(name, [call.args[0]], call.ty)

    rewrite = Softmaxes(imported.module)
    main = imported.module.get_global_var("main")
    rewrite.builder_.update_func(main, rewrite.visit_expr(imported.module["main"]))
    return replace(imported, module=rewrite.builder_.get(), ops=ops)

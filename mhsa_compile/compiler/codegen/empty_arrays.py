"""Arrays without elements, which neither TVM nor CUDA takes.

Constants without elements TVM writes into a library and then cannot read: a call allocates them instead.

No kernel is launched without blocks: CUDA refuses such a launch, where nothing to compute is nothing wrong.

Sizes of 0 come with calls: a batch of nobody, no keys, a cache that holds nothing yet. What all outputs are empty of
never gets here; what makes only one kernel's grid empty does.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator


def guard_launches(module: Any) -> Any:
    """The module with each launch, whose grid follows from sizes of a call, in a loop of one turn, or of none where the
    grid has no blocks.

    It is for PrimFuncs whose loops are bound to blocks and threads already. A loop, since TVM refuses barriers of
    threads (ThreadSync) below any condition, even one of the host.
    """
    builder = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    for variable, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            builder[variable] = function.with_body(_guard_launches(function.body))
    return builder


def _guard_launches(body: Any) -> Any:
    """The body with guarded launches. Only outermost bindings begin one: what lies below one stays as it is."""

    def guard(statement: Any, mutator: Any) -> Any:
        if not _is_binding(statement):
            return mutator.default_mutate(statement)
        turns: Any = tirx.const(1, "int64")
        for extent in _grid(statement):
            turns = turns if isinstance(extent, tirx.IntImm) else tirx.min(turns, extent.astype("int64"))
        if isinstance(turns, tirx.IntImm):
            return statement
        once = tirx.Var("once", "int64")
        return tirx.For(once, tirx.const(0, "int64"), turns, tirx.ForKind.SERIAL, statement)

    return tvm_ffi.structural_mutate(body, ((tirx.AttrStmt, tirx.For), guard))


def _grid(launch: Any) -> list[Any]:
    """The number of blocks that a launch has on each axis."""
    extents: list[Any] = []

    def note(statement: Any) -> Any:
        if _is_binding(statement) and _tag(statement).startswith("blockIdx."):
            extents.append(statement.value if isinstance(statement, tirx.AttrStmt) else statement.extent)

    tvm_ffi.structural_walk(launch, ((tirx.AttrStmt, tirx.For), note))
    return extents


def _is_binding(statement: Any) -> bool:
    if isinstance(statement, tirx.AttrStmt):
        return str(statement.attr_key) == "thread_extent"
    return statement.thread_binding is not None


def _tag(binding: Any) -> str:
    axis = binding.node if isinstance(binding, tirx.AttrStmt) else binding.thread_binding
    return str(axis.thread_tag)


def allocate_constants(module: Any, main: str) -> Any:
    """The module whose function `main` reads no constant without elements."""
    function = module[main]
    empty: list[Any] = []

    def note(expression: Any) -> None:
        if isinstance(expression, tvm.ir.GenericConst) and isinstance(expression.ty, relax.TensorType):
            empty.extend([expression] if 0 in expression.value.shape else [])

    relax.analysis.post_order_visit(function, note)
    if not empty:
        return module
    rewriter = _Allocating(module)
    rewriter.builder_.update_func(module.get_global_var(main), rewriter.visit_expr(function))
    return rewriter.builder_.get()


@mutator
class _Allocating(PyExprMutator):  # type: ignore[misc]
    def visit_generic_const_(self, constant: Any) -> Any:
        if not isinstance(constant.ty, relax.TensorType) or 0 not in constant.value.shape:
            return constant
        shape = relax.ShapeExpr(list(map(int, constant.value.shape)))
        allocation = relax.op.builtin.alloc_tensor(shape, str(constant.ty.dtype), 0)
        return self.builder_.emit(allocation)

"""Sizes that a fused function reads, all at one place: behind its arrays.

    fused(S, x, tir_vars: Shape([B]))        ->        fused(x, tir_vars: Shape([B, S]))

TVM's FuseOps lists the sizes that stand in types of a group as `tir_vars`; one that is only read, as a number, becomes
a parameter of its own. FuseTIR takes one kind or the other, and of both ends in an internal error.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.ir import Expr
from tvm.relax.expr_functor import PyExprMutator, mutator


@tvm.transform.module_pass(opt_level=0, name="SizesAtOnePlace")  # type: ignore[untyped-decorator]
def sizes_at_one_place(module: Any, _: Any) -> Any:
    """The module, whose fused functions have either sizes of their own as parameters or `tir_vars`, not both."""
    moved = {variable: places for variable, f in module.functions_items() if (places := _of_their_own(f))}
    if not moved:
        return module
    others = {variable: function for variable, function in module.functions_items() if variable not in moved}
    builder = relax.BlockBuilder(tvm.IRModule(others, attrs=module.attrs))
    calls = _SizesLast(
        {
            variable: (builder.add_func(_with_sizes_last(module[variable], places), variable.name_hint), places)
            for variable, places in moved.items()
        }
    )
    result = builder.get()
    for variable, function in others.items():
        if isinstance(function, relax.Function):
            result.update_func(variable, calls.visit_expr(function))
    return result


def _of_their_own(function: Any) -> list[int]:
    """The places of sizes among the parameters of a fused function that has `tir_vars`."""
    if not (isinstance(function, relax.Function) and function.attrs.get("Primitive", 0)):
        return []
    if not isinstance(function.params[-1].ty, relax.ShapeType):
        return []
    return [i for i, parameter in enumerate(function.params) if isinstance(parameter.ty, tvm.ir.PrimType)]


def _with_sizes_last(function: relax.Function, places: list[int]) -> relax.Function:
    *others, last = function.params
    sizes = [*last.ty.values, *(function.params[i] for i in places)]
    params = [one for i, one in enumerate(others) if i not in places]
    params.append(relax.Var(last.name, relax.ShapeType(sizes)))
    return relax.Function(params, function.body, function.ret_ty, function.is_pure, function.attrs)


@mutator
class _SizesLast(PyExprMutator):  # type: ignore[misc]
    """Calls of such functions, with their sizes last."""

    def __init__(self, moved: dict[Any, tuple[Any, list[int]]]) -> None:
        super().__init__()
        self._moved = moved

    def visit_call_(self, call: Any) -> Expr:
        if call.op not in self._moved:
            return call
        variable, places = self._moved[call.op]
        *others, last = call.args
        sizes = relax.ShapeExpr([*last.values, *(call.args[i] for i in places)])
        args = [one for i, one in enumerate(others) if i not in places]
        return relax.Call(variable, [*args, sizes], call.attrs, call.ty_args, call.span)

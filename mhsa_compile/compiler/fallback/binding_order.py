"""Sizes that a call computes, named before whoever reads them.

    y = arange(n); n = match_cast(shape of t, (n,))        ->        n = match_cast(shape of t, (n,)); y = arange(n)

TVM joins operators, and sorts a block again by the tensors that these pass on: that one names a size of another it does
not see.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax
from tvm.ir import Expr


def sizes_first(module: Any) -> Any:
    """The module with `main`'s bindings in an order in which each stands behind what it reads; as they stand, where
    they do already."""
    main = module["main"]
    sizes = {size for parameter in main.params for size in _variables(parameter.ty)}
    blocks = [_ordered(block, sizes) if isinstance(block, relax.DataflowBlock) else block for block in main.body.blocks]
    if all(one.same_as(other) for one, other in zip(blocks, main.body.blocks, strict=True)):
        return module
    result = module.clone()
    body = relax.SeqExpr(blocks, main.body.body)
    result.update_func(
        module.get_global_var("main"), relax.Function(main.params, body, main.ret_ty, main.is_pure, main.attrs)
    )
    return result


def _ordered(block: Expr, sizes: set[Expr]) -> Expr:
    """The block in such an order; `sizes` are those of the parameters."""
    bindings = list(block.bindings)
    if not any(isinstance(binding, relax.MatchCast) for binding in bindings):
        return block
    makers = {binding.var: i for i, binding in enumerate(bindings)}
    for i, binding in enumerate(bindings):
        if isinstance(binding, relax.MatchCast):
            for size in set(_variables(binding.ty)) - sizes:
                makers.setdefault(size, i)
    members, order = set[int](), list[int]()

    def place(i: int) -> None:
        if i in members:
            return
        members.add(i)
        for variable in (*_variables(bindings[i].value), *_variables(bindings[i].var.ty)):
            if variable in makers:
                place(makers[variable])
        order.append(i)

    for i in range(len(bindings)):
        place(i)
    return block if order == sorted(order) else relax.DataflowBlock([bindings[i] for i in order])


def _variables(of: Expr) -> list[Expr]:
    """The variables and sizes that stand in a value or a type."""
    result: list[Expr] = []
    tvm_ffi.structural_walk(of, (tvm.ir.Var, result.append))
    return result

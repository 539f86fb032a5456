"""Operators that a CPU has functions of ours for, put in their place before a pass of TVM's replaces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from mhsa_compile.compiler.fallback import running_sums, top_k

_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "relax.cumprod": running_sums.call_of,
    "relax.cumsum": running_sums.call_of,
    "relax.topk": top_k.call_of,
}
"""By operator: a relax.BlockBuilder and a call of it -> what takes the call's place."""


def with_own_functions(module: Any) -> Any:
    """The module with calls of these operators as calls of our functions."""

    @mutator
    class OwnFunctions(PyExprMutator):  # type: ignore[misc]
        def visit_call_(self, call: Any) -> Any:
            call = super().visit_call_(call)
            call_of = _CALLS.get(getattr(call.op, "name", ""))
            return call if call_of is None else call_of(self.builder_, call)

    rewrite = OwnFunctions(module)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function):
            rewrite.builder_.update_func(variable, rewrite.visit_expr(function))
    return rewrite.builder_.get()

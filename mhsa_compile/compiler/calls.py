"""The calls of a Relax function's body, one after another, and other values in their places; and what these take."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator


def calls(body: Any, *, nested: bool = False) -> Iterator[tuple[Any, bool]]:
    """(a call, whether it stands in a branch of an If) of a function's body, in order."""
    for value in (binding.value for block in body.blocks for binding in block.bindings):
        if isinstance(value, relax.Call):
            yield value, nested
        elif isinstance(value, relax.If):
            yield from calls(value.true_branch, nested=True)
            yield from calls(value.false_branch, nested=True)


def with_calls(module: Any, change: Callable[[Any, Any], Any], only: str | None = None) -> Any:
    """The module with `change(builder, call)` in the place of each call, in all functions of Relax or `only` in one."""

    @mutator
    class Changed(PyExprMutator):  # type: ignore[misc]
        def visit_call_(self, call: Any) -> Any:
            return change(self.builder_, super().visit_call_(call))

    rewrite = Changed(module)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function) and only in (None, str(variable.name_hint)):
            rewrite.builder_.update_func(variable, rewrite.visit_expr(function))
    return rewrite.builder_.get()


def symbol_of(call: Any) -> str:
    """The name of what a call runs by name: an operation of ours, or a PrimFunc; "" of other calls."""
    name = getattr(call.op, "name", "")
    if name == "relax.call_dps_packed":
        return str(call.args[0].global_symbol)
    return str(call.args[0].name_hint) if name in ("relax.call_tir", "relax.call_tir_inplace") else ""


def element_bytes(dtype: Any) -> int:
    """The bytes of an element, as it lies in an array."""
    return -(-int(tvm.DataType(str(dtype)).bits) // 8)

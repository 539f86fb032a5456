"""No kernel is launched without blocks: CUDA refuses such a launch, where nothing to compute is nothing wrong.

Sizes of 0 come with calls: a batch of nobody, no keys, a cache that holds nothing yet. What all outputs are empty of
never gets here; what makes only one kernel's grid empty does.
"""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import tirx


def guarded(module: Any) -> Any:
    """The module with each launch, whose grid follows from sizes of a call, in a loop of one turn, or of none where the
    grid has no blocks.

    It is for PrimFuncs whose loops are bound to blocks and threads already. A loop, since TVM refuses barriers of
    threads (ThreadSync) below any condition, even one of the host.
    """
    builder = tvm.IRModule(dict(module.functions_items()), attrs=module.attrs)
    for variable, function in module.functions_items():
        if isinstance(function, tirx.PrimFunc):
            builder[variable] = function.with_body(_guarded(function.body))
    return builder


def _guarded(body: Any) -> Any:
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
    found: list[Any] = []

    def note(statement: Any) -> Any:
        if _is_binding(statement) and _tag(statement).startswith("blockIdx."):
            found.append(statement.value if isinstance(statement, tirx.AttrStmt) else statement.extent)

    tvm_ffi.structural_walk(launch, ((tirx.AttrStmt, tirx.For), note))
    return found


def _is_binding(statement: Any) -> bool:
    if isinstance(statement, tirx.AttrStmt):
        return str(statement.attr_key) == "thread_extent"
    return statement.thread_binding is not None


def _tag(binding: Any) -> str:
    axis = binding.node if isinstance(binding, tirx.AttrStmt) else binding.thread_binding
    return str(axis.thread_tag)

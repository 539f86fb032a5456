"""What functions of plain loops begin and end with: sizes of their own, arrays without axes, one block around all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from typing import Any

import tvm
from tvm import s_tir
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T


class FunctionSizes:
    """Sizes as a function has them: a number stays one, all else is a variable of the function's own."""

    def __init__(self) -> None:
        self._variables: dict[Any, Expr] = {}

    def __call__(self, size: Expr) -> Expr:
        if isinstance(size, tvm.tirx.IntImm):
            return T.int64(int(size.value))
        return self._variables.setdefault(size, tvm.tirx.Var(f"n{len(self._variables)}", "int64"))


def product(sizes: Iterable[Expr]) -> Expr:
    return prod(sizes, start=T.int64(1))


def flat(buffer: Expr) -> Expr:
    """A buffer as one row of its elements."""
    return T.decl_buffer([product(buffer.shape)], buffer.dtype, data=buffer.data, elem_offset=buffer.elem_offset)


def plain_function(name: str, body: Callable[[], None]) -> Any:
    """The PrimFunc that `body` writes, as one block of plain code: TVM's passes look for a block at the top."""
    with IRBuilder() as ib, T.prim_func():
        T.func_name(name)
        T.func_attr({"tirx.noalias": True})
        body()
    function = ib.get()
    block = s_tir.SBlockRealize([], True, s_tir.SBlock([], [], [], name, function.body))
    return function.with_body(block).with_attr("s_tir", True).without_attr("global_symbol")

"""What every kernel's function begins with, whatever computes it: the function, its sizes, and the buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tvm import tirx
from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.interface.ops import Dim

DTYPE_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
}


@contextmanager
def prim_func(name: str) -> Iterator[IRBuilder]:
    """Builds a function inside, none of whose buffers overlap; afterwards it is what the builder's `get` gives."""
    with IRBuilder() as builder, T.prim_func():
        T.func_name(name)
        T.func_attr({"tirx.noalias": True})
        yield builder


class SizeVars:
    """The sizes of one function: a number stays one, a name becomes the same variable wherever it stands."""

    def __init__(self) -> None:
        self._variables: dict[str, Expr] = {}

    def __call__(self, value: Dim) -> Expr:
        if isinstance(value, int):
            return T.int64(value)
        return self._variables.setdefault(value, tirx.Var(value, "int64"))


def ceil_div(value: Expr, size: Expr | int) -> Expr:
    return T.truncdiv(value + (size - 1), T.int64(size) if isinstance(size, int) else size)


def argument(name: str, shape: Sequence[Expr], dtype: str) -> Expr:
    """A buffer argument of the function being built; its data may begin at any element (alignment of one element)."""
    return T.match_buffer(T.arg(name, T.handle()), list(shape), dtype, align=DTYPE_BYTES[dtype])

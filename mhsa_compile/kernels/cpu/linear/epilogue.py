"""The epilogue of a linear, on rows that a task has just written: they are in the first-level cache still.

As scalars in a loop over a vector's lanes, of which TVM makes vectors, so that any arithmetic may be in it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.opaque import opaque_pair
from mhsa_compile.kernels.cpu.simd import scalar_math, vectors
from mhsa_compile.kernels.interface.epilogue import UNARY, Epilogue
from mhsa_compile.kernels.interface.extremes import larger, smaller


def _exact(operation: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr], Expr]:
    return lambda one, other: operation(*opaque_pair(one, other))


def _of_named(operation: Callable[..., Expr]) -> Callable[[Expr, Expr], Expr]:
    """The operation on values that have names: TVM makes a branch of a choice between what it reads from memory."""

    def of(one: Expr, other: Expr) -> Expr:
        name = tirx.Var("one", "float32")
        if isinstance(other, tirx.FloatImm):
            return tirx.Let(name, one, operation(name, other, dtype="float32"))
        second = tirx.Var("other", "float32")
        return tirx.Let(name, one, tirx.Let(second, other, operation(name, second, dtype="float32")))

    return of


_OPS = {
    "add": _exact(operator.add),
    "sub": _exact(operator.sub),
    "mul": _exact(operator.mul),
    "div": _exact(operator.truediv),
    "min": _of_named(smaller),
    "max": _of_named(larger),
    **{name: getattr(scalar_math, name) for name in UNARY},
}


def apply(
    epilogue: Epilogue, y: Expr, operands: list[Expr], rows: tuple[Expr, Expr], columns: tuple[Expr, int], lanes: int
) -> None:
    """Writes y anew in the rows first .. end, in so many columns from the first on."""
    first, width = columns
    with T.serial(*rows) as row:

        def part(offset: Expr, size: int) -> None:
            _write(epilogue, y, operands, [row, first + offset], size)

        vectors.each_vector(width, lanes, part)


_Lanes = Callable[[Expr], Expr]
"""The number in a lane of a vector."""


def _write(epilogue: Epilogue, y: Expr, operands: list[Expr], place: list[Expr], size: int) -> None:
    """Writes `size` elements of y anew. Each step is a loop of its own: TVM writes an expression anew wherever it is
    read, and does not look through memory; LLVM does, and leaves none."""

    def element(array: Expr) -> _Lanes:
        at = place[-len(array.shape) :]
        return lambda lane: array[(*at[:-1], at[-1] + lane)]

    def step(operation: Callable[..., Expr]) -> Callable[..., _Lanes]:
        return lambda *values: lambda lane: operation(*(value(lane) for value in values))

    def named(value: _Lanes) -> _Lanes:
        cells = T.alloc_buffer((size,), "float32")  # each by itself, as TVM puts what is large on the heap
        with T.vectorized(T.int64(size)) as lane:
            T.buffer_store(cells, value(lane), [lane])
        return lambda lane: cells[lane]

    def constant(number: float) -> _Lanes:
        return lambda _: T.float32(number)

    operations = {name: step(operation) for name, operation in _OPS.items()}
    result = epilogue.value([element(array) for array in (y, *operands)], constant, operations, named)
    with T.vectorized(T.int64(size)) as lane:
        T.buffer_store(y, result(lane), [place[0], place[1] + lane])

"""The epilogue of a linear, on rows that a task has just written: they are in the first-level cache still.

As scalars in a loop over a vector's lanes, of which TVM makes vectors, so that any arithmetic may be in it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.opaque import opaque_pair
from mhsa_compile.kernels.cpu.simd import scalar_math, vectors
from mhsa_compile.kernels.interface.epilogue import UNARY, Epilogue
from mhsa_compile.kernels.interface.extremes import larger, smaller


def _exact(operation: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr], Expr]:
    return lambda one, other: operation(*opaque_pair(one, other))


_OPS = {
    "add": _exact(operator.add),
    "sub": _exact(operator.sub),
    "mul": _exact(operator.mul),
    "div": _exact(operator.truediv),
    "min": partial(smaller, dtype="float32"),
    "max": partial(larger, dtype="float32"),
    **{name: getattr(scalar_math, name) for name in UNARY},
}


def apply(
    epilogue: Epilogue, y: Expr, operands: list[Expr], rows: tuple[Expr, Expr], columns: tuple[Expr, int], lanes: int
) -> None:
    """Writes y anew in the rows first .. end, in so many columns from the first on."""
    first, width = columns
    with T.serial(*rows) as row:

        def part(offset: Expr, size: int) -> None:
            with T.vectorized(T.int64(size)) as lane:
                place = [row, first + offset + lane]
                values = [array[tuple(place)] for array in (y, *operands)]
                T.buffer_store(y, epilogue.value(values, T.float32, _OPS), place)

        vectors.each_vector(width, lanes, part)

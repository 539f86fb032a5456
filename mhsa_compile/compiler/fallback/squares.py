"""A Transpose of float32 that moves the last axis, as squares of vectors that are turned in registers: with loops of
elements each is a load and a store, 0.5 to 0.7 ns.

Notation: (B, M, N) becomes (B, N, M), each of them some axes side by side.
"""

from __future__ import annotations

from math import prod
from typing import Any

from tvm import tirx
from tvm.ir import Expr, TensorLoad
from tvm.tirx.script import builder as T

from mhsa_compile.compiler.fallback.plain_function import FunctionSizes, flat, plain_function, product
from mhsa_compile.frontend.relax.sizes.broadcasting import equal
from mhsa_compile.kernels.common.buffers import argument, ceil_div
from mhsa_compile.kernels.cpu.simd.vectors import each_task, let, load, materialize, store, transpose

_SIDE = 64
"""Rows and columns of a task, which touches as many pages of both arrays."""


def in_squares(function: tirx.PrimFunc, block: Any, lanes: int) -> tirx.PrimFunc | None:
    """What does the same as a function, whose only block this is, in squares of so many lanes; None for one that is no
    such Transpose."""
    places = _places(block)
    if places is None or len(function.params) != 2 or lanes < 2 or lanes & (lanes - 1):
        return None
    count = len(places)
    begin = next((axis for axis, place in enumerate(places) if place != axis), count)
    second = places.index(begin) if begin < count else count
    width = count - second
    if places != [*range(begin), *range(begin + width, count), *range(begin, begin + width)] or begin == count:
        return None
    shape = list(block.reads[0].source.shape)
    if not all(equal(size, block.iter_vars[place].dom.extent) for size, place in zip(shape, places, strict=True)):
        return None  # the first of a Slice's rows or columns
    if any(_is_less(shape[part], lanes) for part in (slice(begin, second), slice(second, None))):
        return None
    return _function(shape, begin, second, lanes)


def _places(block: Any) -> list[int] | None:
    """Where each axis of what a block copies is in what it writes; None where it does something else."""
    body = block.body
    if not isinstance(body, tirx.BufferStore) or not isinstance(body.value, TensorLoad) or len(block.reads) != 1:
        return None
    variables = [axis.var for axis in block.iter_vars]
    read, written = list(body.value.indices), list(body.indices)
    is_copy = len(read) == len(written) == len(variables) and str(body.value.ty.dtype) == "float32"
    if not is_copy or not all(index.same_as(variable) for index, variable in zip(written, variables, strict=True)):
        return None
    places = [next((k for k, variable in enumerate(variables) if index.same_as(variable)), -1) for index in read]
    return places if sorted(places) == list(range(len(variables))) else None


def _is_less(sizes: list[Expr], lanes: int) -> bool:
    """Whether axes are known to have fewer elements together than a vector."""
    known = [int(size) for size in sizes if isinstance(size, tirx.IntImm)]
    return len(known) == len(sizes) and prod(known) < lanes


def _function(shape: list[Expr], begin: int, second: int, lanes: int) -> tirx.PrimFunc:
    sizes = list(map(FunctionSizes(), shape))
    moved = [*sizes[:begin], *sizes[second:], *sizes[begin:second]]

    def body() -> None:
        x, y = map(flat, [argument("x", sizes, "float32"), argument("y", moved, "float32")])
        rows, columns = (materialize(product(part)) for part in (sizes[begin:second], sizes[second:]))
        across, down = materialize(ceil_div(columns, _SIDE)), materialize(ceil_div(rows, _SIDE))

        def turn(task: Expr) -> None:
            batch = materialize(T.truncdiv(task, across * down) * (rows * columns))
            row = materialize(T.truncdiv(T.truncmod(task, across * down), across) * _SIDE)
            column = materialize(T.truncmod(task, across) * _SIDE)
            height, width = (
                materialize(T.min(T.int64(_SIDE), size - first)) for size, first in ((rows, row), (columns, column))
            )
            tall, wide = (materialize(T.truncdiv(size, T.int64(lanes)) * lanes) for size in (height, width))

            def at(i: Expr, j: Expr) -> list[Expr]:
                return [batch + (row + i) * columns + (column + j)]

            def turned(i: Expr, j: Expr) -> list[Expr]:
                return [batch + (column + j) * rows + (row + i)]

            def square(i: Expr, j: Expr) -> None:
                vectors = transpose([let(load(x, at(i + k, j), lanes)) for k in range(lanes)])
                for k, vector in enumerate(vectors):
                    store(y, turned(i, j + k), vector, lanes)

            with T.serial(T.truncdiv(tall, T.int64(lanes))) as i, T.serial(T.truncdiv(wide, T.int64(lanes))) as j:
                square(i * lanes, j * lanes)
            for first, end, left in ((tall, height, T.int64(0)), (T.int64(0), tall, wide)):
                with T.serial(first, end) as i, T.serial(left, width) as j:
                    T.buffer_store(y, x[tuple(at(i, j))], turned(i, j))

        each_task(materialize(product(sizes[:begin])) * across * down, T.int64(_SIDE * _SIDE), turn)

    return plain_function("transpose", body)

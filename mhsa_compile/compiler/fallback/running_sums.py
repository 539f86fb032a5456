"""Running sums and products along an axis, on a CPU: CumSum, CumProd.

TVM's walk along the axis one column after the other, through memory by steps as long as a row, and divide for each
column. Here a task has neighbouring columns, a row of them at a time; along the last axis a sum stays in a register.
"""

from __future__ import annotations

from typing import Any

from tvm import relax
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.compiler.fallback.plain_function import FunctionSizes, flat, plain_function, product
from mhsa_compile.kernels.common.buffers import argument, ceil_div
from mhsa_compile.kernels.cpu.simd.vectors import each_task, materialize

_WIDTH = 64
"""Columns of a task: four lines of a cache, and as many vectors."""


def call_of(builder: Any, call: Any) -> Any:
    """A call of relax.cumsum or relax.cumprod as one of a function of ours."""
    x, attributes = call.args[0], call.attrs
    axis, name = int(attributes.axis) % x.ty.ndim, call.op.name.rpartition(".")[2]
    function = _function(x.ty, axis, name, str(call.ty.dtype), bool(attributes.exclusive))
    return relax.call_tir(builder.add_func(function, name), [x], relax.TensorType(call.ty.shape, call.ty.dtype))


def _function(x: Any, axis: int, name: str, kind: str, exclusive: bool) -> Any:
    """The function of an array of type x. Each result is the one before it with one element more; `exclusive` ones
    begin with none."""
    shape = list(map(FunctionSizes(), x.shape.values))
    length, is_product = shape[axis], name == "cumprod"
    before, behind = product(shape[:axis]), product(shape[axis + 1 :])
    nothing = T.cast(T.float64(1.0) if is_product else T.float64(0.0), kind)

    def body() -> None:
        source, target = map(flat, [argument("x", shape, str(x.dtype)), argument("y", shape, kind)])
        step = materialize(behind)

        def element(i: Expr) -> Expr:
            return T.cast(source[i], kind)

        def with_one_more(value: Expr, i: Expr) -> Expr:
            return value * element(i) if is_product else value + element(i)

        def along_memory(row: Expr) -> None:
            begin, so_far = materialize(row * length), T.alloc_buffer((1,), kind)
            with T.serial(T.min(length, T.int64(1))):
                T.buffer_store(so_far, nothing if exclusive else element(begin), [0])
                T.buffer_store(target, so_far[0], [begin])
            with T.serial(T.max(length - 1, T.int64(0))) as i:
                at = materialize(begin + i + 1)
                T.buffer_store(so_far, with_one_more(so_far[0], at - 1 if exclusive else at), [0])
                T.buffer_store(target, so_far[0], [at])

        def by_rows(task: Expr) -> None:
            first = materialize(T.truncmod(task, chunks) * _WIDTH)
            begin = materialize(T.truncdiv(task, chunks) * length * step + first)
            width = materialize(T.min(T.int64(_WIDTH), step - first))
            with T.serial(T.min(length, T.int64(1))), T.serial(width) as column:
                T.buffer_store(target, nothing if exclusive else element(begin + column), [begin + column])
            with T.serial(T.max(length - 1, T.int64(0))) as i:
                above = materialize(begin + i * step)
                row = materialize(above + step)
                with T.serial(width) as column:
                    value = with_one_more(target[above + column], (above if exclusive else row) + column)
                    T.buffer_store(target, value, [row + column])

        if axis == len(shape) - 1:
            each_task(before, length, along_memory)
        else:
            chunks = materialize(ceil_div(step, _WIDTH))
            each_task(before * chunks, length * _WIDTH, by_rows)

    return plain_function(name, body)

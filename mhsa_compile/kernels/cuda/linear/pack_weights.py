"""The weights of a linear on a GPU: those of all projections side by side, packed there once, when they are bound."""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.op_args import packed_arguments, weight_arguments
from mhsa_compile.kernels.cuda.primitives.inputs import wide
from mhsa_compile.kernels.cuda.primitives.warp import materialize
from mhsa_compile.kernels.interface.ops import LinearOp

THREADS = 256
WIDEST = 256
"""Columns of the widest block: by so many zeros the bias is longer than y is wide, so that blocks read it without
looking."""
Packed = tuple[tuple[tuple[int, ...], str], ...]


def packed_shapes(op: LinearOp, width: int | None) -> Packed:
    """Shapes and dtypes of weight and bias: (out, in), or (in, `width`) where they are to be turned."""
    weight = (op.out_features, op.in_features) if width is None else (op.in_features, width)
    return (weight, op.dtype), ((op.out_features + WIDEST,), "float32")


def pack(op: LinearOp, width: int | None) -> Expr:
    """The PrimFunc (weights..., biases...) -> `packed`. What is beyond the last feature is zeros."""
    ((size, inner), _), ((padding,), _) = shapes = packed_shapes(op, width)
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("pack_linear")
            T.func_attr({"tirx.noalias": True})
            weights, biases = weight_arguments(op)
            weight, bias = packed_arguments(shapes)
            count = max(size * inner, padding)
            with (
                T.launch_thread("blockIdx.x", T.int64(-(-count // THREADS))) as block,
                T.launch_thread("threadIdx.x", THREADS) as thread,
            ):
                number = materialize(T.cast(block, "int64") * T.int64(THREADS) + T.cast(thread, "int64"), "int64")
                row, column = (materialize(f(number, T.int64(inner)), "int64") for f in (T.truncdiv, T.truncmod))
                feature, term = (row, column) if width is None else (column, row)

                def copy(i: int, own: Expr) -> None:
                    index = [term, own] if op.transposed[i] else [own, term]
                    T.buffer_store(weight, weights[i][tuple(index)], [row, column])

                def copy_bias(i: int, own: Expr) -> None:
                    source = biases[i]
                    T.buffer_store(bias, T.float32(0) if source is None else wide(source[own]), [number])

                with T.If(number < T.int64(size * inner)), T.Then():
                    _of_feature(op, feature, copy)
                    with T.If(feature >= T.int64(op.out_features)), T.Then():
                        T.buffer_store(weight, T.cast(T.float32(0), op.dtype), [row, column])
                with T.If(number < T.int64(padding)), T.Then():
                    _of_feature(op, number, copy_bias)
                    with T.If(number >= T.int64(op.out_features)), T.Then():
                        T.buffer_store(bias, T.float32(0), [number])
    return builder.get()


def _of_feature(op: LinearOp, feature: Expr, body: Callable[[int, Expr], None]) -> None:
    """body(i, own) for the projection that a feature belongs to, and its number there."""
    begin = 0
    for i, width in enumerate(op.widths):
        with T.If(T.And(feature >= T.int64(begin), feature < T.int64(begin + width))), T.Then():
            body(i, materialize(feature - T.int64(begin), "int64"))
        begin += width

"""Rows of heads in eight bits, each with a step of its own, on a vector CPU: what goes into a cache of int8.

A task is one row, which is read twice: for its largest magnitude, then to be rounded.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, prim_func
from mhsa_compile.kernels.common.head_layout import head_view, placed_shape
from mhsa_compile.kernels.cpu.formats.choice import FORMATS, load_wide
from mhsa_compile.kernels.cpu.simd.vectors import each_task, each_vector, materialize, store
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import QuantiseRowsOp


class CpuQuantiseRowsKernel(Fixed):
    """Rows in int8 with their steps, for any vector CPU."""

    name = "cpu.quantise_rows"
    op_type = QuantiseRowsOp

    def emit(self, op: QuantiseRowsOp, profile: CpuProfile, config: Config) -> Emitted:
        return Emitted(_quantise_rows(op, profile.vector_lanes("float32")))


def _quantise_rows(op: QuantiseRowsOp, lanes: int) -> Expr:
    dim, size, form = SizeVars(), op.head_dim, FORMATS["int8"]
    batch, length, heads = dim(op.batch), dim(op.length), T.int64(op.num_heads)
    with prim_func("quantise_rows") as builder:
        x = argument("x", placed_shape(op.x, batch, length, op.num_heads, size), op.dtype)
        q = argument("q", [batch, heads, length, T.int64(size)], "int8")
        steps = argument("steps", [batch, heads, length], "float32")

        def task(index: Expr) -> None:
            head, row = materialize(T.truncdiv(index, length)), materialize(T.truncmod(index, length))
            b, h = materialize(T.truncdiv(head, heads)), materialize(T.truncmod(head, heads))
            view = head_view(x, op.x, size, b, h)

            def read(column: Expr, n: int) -> Expr:
                return load_wide(x, view.at(row, column), n)

            factor = form.scale(read, size, lanes, lambda step: T.buffer_store(steps, step, [b, h, row]))
            each_vector(size, lanes, lambda at, n: store(q, [b, h, row, at], form.narrowed(read(at, n), n, factor), n))

        each_task(materialize(batch * heads * length), size, task)
    return builder.get()

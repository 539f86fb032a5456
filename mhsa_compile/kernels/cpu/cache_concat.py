"""Present keys or values on a CPU: the past, and the new rows behind it, each head in one piece.

A task is a stretch of one head's rows. Those of the past lie together and are copied in one run.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES, SizeVars, argument, ceil_div, prim_func
from mhsa_compile.kernels.common.head_layout import head_view, placed_shape
from mhsa_compile.kernels.cpu.simd.vectors import each_task, each_vector, load, materialize, store
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import KvConcatOp

ROWS = 64  # of a task: some KiB, which hide what it takes to begin one


class CpuKvConcatKernel(Fixed):
    """Appends new keys or values to those of the past, for any CPU."""

    name = "cpu.present"
    op_type = KvConcatOp

    def emit(self, op: KvConcatOp, profile: CpuProfile, config: Config) -> Emitted:
        return Emitted(_present(op, profile.hardware.vector_bits // 8 // DTYPE_BYTES[op.dtype]))


def _present(op: KvConcatOp, lanes: int) -> Expr:
    dim = SizeVars()
    batch, new_rows = dim(op.batch), dim(op.length)
    past_rows = T.int64(0) if op.past is None else dim(op.past)
    heads, size = T.int64(op.num_heads), T.int64(op.head_dim)
    with prim_func("present") as builder:
        new = argument("new", placed_shape(op.new, batch, new_rows, op.num_heads, op.head_dim), op.dtype)
        past = None if op.past is None else argument("past", [batch, heads, past_rows, size], op.dtype)
        rows = materialize(past_rows + new_rows)
        result = argument("present", [batch, heads, past_rows + new_rows, size], op.dtype)
        stretches = materialize(ceil_div(rows, ROWS))

        def task(index: Expr) -> None:
            head = materialize(T.truncdiv(index, stretches))
            b, h = materialize(T.truncdiv(head, heads)), materialize(T.truncmod(head, heads))
            first = materialize(T.truncmod(index, stretches) * ROWS)
            end = materialize(T.min(first + ROWS, rows))
            fresh = head_view(new, op.new, op.head_dim, b, h)

            def copy(begin: Expr, stop: Expr, source: Expr, at: Callable[[Expr, Expr], list[Expr]]) -> None:
                with T.serial(materialize(T.max(T.int64(0), stop - begin))) as i:
                    row = materialize(begin + i)
                    each_vector(
                        op.head_dim,
                        lanes,
                        lambda e, n: store(result, [b, h, row, e], load(source, at(row, e), n), n),
                    )

            if past is not None:
                # A stretch may begin in the past and end in the new rows; what is empty copies nothing.
                copy(first, materialize(T.min(end, past_rows)), past, lambda row, e: [b, h, row, e])
            copy(materialize(T.max(first, past_rows)), end, fresh.buffer, lambda row, e: fresh.at(row - past_rows, e))

        each_task(materialize(batch * heads * stretches), ROWS * op.head_dim, task)
    return builder.get()

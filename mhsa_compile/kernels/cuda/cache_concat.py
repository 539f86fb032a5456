"""Present keys or values on a GPU: the past, and the new rows behind it, each head in one piece."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, prim_func
from mhsa_compile.kernels.common.head_layout import head_view, placed_shape
from mhsa_compile.kernels.cuda.primitives.vector_copy import coordinates, copy_piece, each_thread, piece_of, row_steps
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import KvConcatOp


class CudaKvConcatKernel(Fixed):
    """Appends new keys or values to those of the past, a piece of a row by each thread."""

    name = "cuda.present"
    op_type = KvConcatOp

    def emit(self, op: KvConcatOp, profile: TargetProfile, config: Config) -> Emitted:
        return Emitted(_present(op))


def _present(op: KvConcatOp) -> Expr:
    dim, count = SizeVars(), piece_of(op.dtype, op.head_dim, *row_steps(op.new))
    batch, new_rows = dim(op.batch), dim(op.length)
    past_rows = T.int64(0) if op.past is None else dim(op.past)
    heads, size = T.int64(op.num_heads), T.int64(op.head_dim)
    with prim_func("present") as builder:
        new = argument("new", placed_shape(op.new, batch, new_rows, op.num_heads, op.head_dim), op.dtype)
        past = None if op.past is None else argument("past", [batch, heads, past_rows, size], op.dtype)
        rows, pieces = past_rows + new_rows, T.int64(op.head_dim // count)
        result = argument("present", [batch, heads, rows, size], op.dtype)

        def piece(number: Expr) -> None:
            b, h, row, part = coordinates(number, heads, rows, pieces)
            column, fresh = part * count, head_view(new, op.new, op.head_dim, b, h)
            to = [b, h, row, column]
            if past is None:
                copy_piece(result, to, new, fresh.at(row, column), count)
                return
            with T.If(row < past_rows):
                with T.Then():
                    copy_piece(result, to, past, to, count)
                with T.Else():
                    copy_piece(result, to, new, fresh.at(row - past_rows, column), count)

        each_thread(batch * heads * rows * pieces, piece)
    return builder.get()

"""Caches on a GPU: TensorScatter, and present keys or values.

TensorScatter writes the new rows where the indices say, and where it is not in place the cache is copied. In place a
thread writes a piece of a new row; else one of a row of the result, which comes from the update or from the cache. An
index that lies beyond is known on the GPU alone: no row of its entry is written then, so nothing but the entry's own
result is wrong, and the cache stays as it was. More new rows than the cache has are refused before the launch.

Present keys or values are the past, and the new rows behind it, each head in one piece.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import TargetProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, prim_func
from mhsa_compile.kernels.common.head_layout import head_view, placed_shape
from mhsa_compile.kernels.common.op_args import Scatter, scatter_arguments, why_not_scatter
from mhsa_compile.kernels.cuda.primitives.simt import materialize
from mhsa_compile.kernels.cuda.primitives.vector_copy import coordinates, copy_piece, each_thread, piece_of, row_steps
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import KvConcatOp, KvScatterOp


class CudaKvScatterKernel(Fixed):
    """TensorScatter of any rank and any dtype of whole bytes."""

    name = "cuda.scatter"
    op_type = KvScatterOp

    def why_not(self, op: KvScatterOp, profile: TargetProfile) -> str | None:
        return why_not_scatter(op)

    def emit(self, op: KvScatterOp, profile: TargetProfile, config: Config) -> Emitted:
        return Emitted(_scatter(op))


def _scatter(op: KvScatterOp) -> Expr:
    with prim_func("scatter") as builder:
        task = _CudaScatter(op, *scatter_arguments(op), _piece(op))
        task.check_rows()
        if op.in_place:
            task.write_rows()
        else:
            task.write_everything()
    return builder.get()


def _piece(op: KvScatterOp) -> int:
    """Elements of a piece of a row; one where the row's length is known when called only."""
    row = math.prod(size if isinstance(size, int) else 1 for size in op.cache[op.axis + 1 :])
    is_fixed = all(isinstance(size, int) for size in op.cache[op.axis + 1 :])
    return piece_of(op.dtype, row, *(() if op.update is None else row_steps(op.update))) if is_fixed else 1


class _CudaScatter(Scatter):
    """A scatter of which each thread copies a piece of `lanes` elements."""

    def write_rows(self) -> None:
        def piece(number: Expr) -> None:
            b, h, j, column = self._place(number, self.new)
            first, fits = self._start(b)
            place = materialize(first + j, "int64")
            if self.op.circular:
                # One turn is enough: a cache has at least as many rows as the update.
                place = materialize(T.Select(place >= self.rows, place - self.rows, place), "int64")
            with T.If(fits), T.Then():
                copy_piece(self.result, [b, h, place, column], self.update, self._new_at(b, h, j, column), self.lanes)

        each_thread(self._pieces(self.new), piece)

    def write_everything(self) -> None:
        def piece(number: Expr) -> None:
            b, h, place, column = self._place(number, self.rows)
            first, fits = self._start(b)
            j = materialize(place - first, "int64")
            if self.op.circular:
                j = materialize(T.Select(j < 0, j + self.rows, j), "int64")
            to = [b, h, place, column]
            with T.If(T.And(fits, T.And(j >= 0, j < self.new))):
                with T.Then():
                    copy_piece(self.result, to, self.update, self._new_at(b, h, j, column), self.lanes)
                with T.Else():
                    copy_piece(self.result, to, self.cache, to, self.lanes)

        each_thread(self._pieces(self.rows), piece)

    def _pieces(self, rows: Expr) -> Expr:
        return self.cache.shape[0] * self.cache.shape[1] * rows * self._pieces_of_row

    @property
    def _pieces_of_row(self) -> Expr:
        return T.truncdiv(self.cache.shape[3], T.int64(self.lanes))

    def _place(self, number: Expr, rows: Expr) -> tuple[Expr, Expr, Expr, Expr]:
        """(batch entry, head, row, column) of a piece."""
        b, h, row, part = coordinates(number, self.cache.shape[1], rows, self._pieces_of_row)
        return b, h, row, part * self.lanes

    def _start(self, b: Expr) -> tuple[Expr, Expr]:
        """(the row of the cache that the first new one goes to, whether all of them lie within the cache)."""
        if self.indices is None:
            return T.int64(0), T.bool(True)
        index = materialize(self.indices[b], "int64")
        if not self.op.circular:
            return index, T.And(index >= 0, index <= self.rows - self.new)
        rest = materialize(T.truncmod(index, self.rows), "int64")  # of the sign of the index
        return materialize(T.Select(rest < 0, rest + self.rows, rest), "int64"), T.bool(True)

    def _new_at(self, b: Expr, h: Expr, j: Expr, column: Expr) -> list[Expr]:
        """The indices in the update of a column of row j."""
        if self.op.update is None:
            return [b, h, j, column]
        return [b, j, h * self.cache.shape[3] + self.op.update.offset + column]


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

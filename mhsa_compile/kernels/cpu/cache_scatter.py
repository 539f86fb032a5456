"""TensorScatter on a CPU: the new rows go where the indices say, and where it is not in place the cache is copied.

In place a task is one new row; else it is one row of the result, which comes from the update or from the cache. Nothing
is written before every index was found to be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.assertions import refuse_unless, spelled
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES, prim_func
from mhsa_compile.kernels.common.op_args import Scatter, scatter_arguments, why_not_scatter
from mhsa_compile.kernels.cpu.formats.choice import load_wide, store_narrow
from mhsa_compile.kernels.cpu.simd.vectors import each_task, each_vector, let, load, materialize, store
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import KvScatterOp


class CpuKvScatterKernel(Fixed):
    """TensorScatter for any CPU, any rank and any dtype of whole bytes, or of floats that are rounded."""

    name = "cpu.scatter"
    op_type = KvScatterOp

    def why_not(self, op: KvScatterOp, profile: CpuProfile) -> str | None:
        return why_not_scatter(op, rounds=True)

    def emit(self, op: KvScatterOp, profile: CpuProfile, config: Config) -> Emitted:
        lanes = profile.hardware.vector_bits // 8 // DTYPE_BYTES["float32" if op.rounds else op.dtype]
        return Emitted(_scatter(op, lanes))


def _scatter(op: KvScatterOp, lanes: int) -> Expr:
    with prim_func("scatter") as builder:
        task = _CpuScatter(op, *scatter_arguments(op), lanes)
        task.check()
        if op.in_place:
            task.write_rows()
        else:
            task.write_everything()
    return builder.get()


class _CpuScatter(Scatter):
    def check(self) -> None:
        """Ends the call where the new rows do not fit the cache, or would not lie within it."""
        op, rows = self.op, self.rows
        self.check_rows()
        if self.indices is None or op.circular:
            return
        wrong = T.alloc_buffer((1,), "int32")
        store(wrong, [T.int64(0)], T.int32(0), 1)
        with T.serial(self.cache.shape[0]) as b:
            index = let(self.indices[b])
            beyond = T.cast(T.Or(index < 0, index > rows - self.new), "int32")
            store(wrong, [T.int64(0)], wrong[0] | beyond, 1)
        most, new = spelled(op.cache[op.axis]), spelled(op.length)
        expected = f"indices from 0 to {most} - {new}, so that the {new} new rows end within the cache"
        refuse_unless(wrong[0] == 0, op.indices_name, expected)

    def write_rows(self) -> None:
        new = self.new

        def row(task: Expr) -> None:
            b, h, j = self._place(task, new)
            place = materialize(self._start(b) + j)
            if self.op.circular:
                rows = self.rows
                # One turn is enough: a cache has at least as many rows as the update.
                place = materialize(T.Select(place >= rows, place - rows, place))
            self._write_new(b, h, j, place)

        each_task(materialize(self.cache.shape[0] * self.cache.shape[1] * new), self.cache.shape[3], row)

    def write_everything(self) -> None:
        rows, new = self.rows, self.new

        def row(task: Expr) -> None:
            b, h, place = self._place(task, rows)
            j = materialize(place - self._start(b))
            if self.op.circular:
                # Which of the new rows would come here, counted around the end.
                j = materialize(T.Select(j < 0, j + rows, j))
            with T.If(T.And(j >= 0, j < new)):
                with T.Then():
                    self._write_new(b, h, j, place)
                with T.Else():
                    self._fill(b, h, place, self.cache, lambda column: [b, h, place, column])

        each_task(materialize(self.cache.shape[0] * self.cache.shape[1] * rows), self.cache.shape[3], row)

    def _place(self, task: Expr, rows: Expr) -> tuple[Expr, Expr, Expr]:
        """(batch entry, head, row) of a task."""
        heads = self.cache.shape[1]
        head = materialize(T.truncdiv(task, rows))
        return (
            materialize(T.truncdiv(head, heads)),
            materialize(T.truncmod(head, heads)),
            materialize(T.truncmod(task, rows)),
        )

    def _start(self, b: Expr) -> Expr:
        """The row of the cache that the first new one goes to."""
        if self.indices is None:
            return T.int64(0)
        index = materialize(self.indices[b])
        if not self.op.circular:
            return index
        rows = self.rows
        rest = materialize(T.truncmod(index, rows))  # of the sign of the index
        return materialize(T.Select(rest < 0, rest + rows, rest))

    def _write_new(self, b: Expr, h: Expr, j: Expr, place: Expr) -> None:
        """Writes row j of the update as row `place` of the result."""
        if self.op.update is None:
            self._fill(b, h, place, self.update, lambda column: [b, h, j, column])
            return
        first = materialize(h * self.cache.shape[3] + self.op.update.offset)
        self._fill(b, h, place, self.update, lambda column: [b, j, first + column])

    def _fill(self, b: Expr, h: Expr, place: Expr, source: Expr, at: Callable[[Expr], list[Expr]]) -> None:
        """Writes one row of the result from `source`, whose element of a column is `at(column)`."""

        def copy(column: Expr, n: int) -> None:
            if source.dtype == self.result.dtype:
                store(self.result, [b, h, place, column], load(source, at(column), n), n)
            else:
                store_narrow(self.result, [b, h, place, column], load_wide(source, at(column), n), n)

        sizes = self.op.cache[self.op.axis + 1 :]
        fixed = [size for size in sizes if isinstance(size, int)]
        if len(fixed) == len(sizes):
            each_vector(math.prod(fixed), self.lanes, copy)
            return
        with T.serial(self.cache.shape[3]) as column:
            copy(column, 1)

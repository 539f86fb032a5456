"""What a strip of tasks keeps from one task to the next besides arrays."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.simd.vectors import store


class StripState:
    """Whole numbers in memory, each in a cell with a number of its own. Allocated where it is constructed."""

    def __init__(self, count: int) -> None:
        self._cells = T.alloc_buffer((count,), "int64")

    def get(self, cell: int) -> Expr:
        return self._cells[T.int64(cell)]

    def set(self, cell: int, value: Expr | int) -> None:
        store(self._cells, [T.int64(cell)], T.int64(value) if isinstance(value, int) else value, 1)

    def holds(self, cell: int) -> Expr:
        """Whether the cell is not 0."""
        return self.get(cell) != T.int64(0)

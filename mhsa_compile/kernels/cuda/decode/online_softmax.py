"""The results of the warps of a row of decode, and how they are put together.

A result is (m, l, O): the largest score of some keys in units of log2, the sum of 2^(score - m), and that of V so
weighted. Milakov and Gimelshein 2018 (arXiv:1805.02867)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.online_softmax import zero_if_unseen
from mhsa_compile.kernels.cuda.decode.block_shape import DecodeBlockShape
from mhsa_compile.kernels.cuda.primitives.warp import exp2, load, materialize, registers, set_register, store


class Area:
    """The memory in which the warps of a block leave their results to each other, that of their tiles. `address(word)`
    is that of a word; `warp` is whose results are put."""

    def __init__(self, shape: DecodeBlockShape, address: Callable[[Expr], Expr], warp: Expr) -> None:
        self.shape, self.address, self.warp = shape, address, warp

    def _word(self, warp: Expr, row: Expr) -> Expr:
        return (warp * self.shape.rows + row) * self.shape.result_pitch

    def set_sums(self, row: Expr, column: Expr, sums: Sequence[Expr]) -> None:
        store(self.address(self._word(self.warp, row) + column), sums)

    def set_stats(self, row: Expr, row_max: Expr, row_sum: Expr) -> None:
        """Puts a row's maximum and the sum of its probs; several threads may put the same."""
        store(self.address(self._word(self.warp, row) + self.shape.v_head_dim), [row_max, row_sum])

    def merge(self, row: Expr, column: Expr, count: int) -> tuple[Expr, Expr, list[Expr]]:
        """(m, l, `count` columns of O) of a row, of all warps together."""
        results, statistics = JoinedResults(count), registers(2)
        sums = registers(count)
        # In the order of the warps, so that results are the same every time.
        for warp in range(self.shape.warps):
            word = materialize(self._word(T.int32(warp), row))
            load(statistics, 0, 2, self.address(word + self.shape.v_head_dim))
            load(sums, 0, count, self.address(word + column))
            results.add(statistics[0], statistics[1], [sums[i] for i in range(count)])
        return results.row_max, results.row_sum, results.sums


class JoinedResults:
    """Results of one row joined one after another; `count` columns of it."""

    def __init__(self, count: int) -> None:
        self.cells, self.count = registers(count + 2), count
        set_register(self.cells, count, T.float32(-math.inf))
        for i in (*range(count), count + 1):
            set_register(self.cells, i, T.float32(0))

    def add(self, row_max: Expr, row_sum: Expr, sums: Sequence[Expr]) -> None:
        factors, count = registers(2), self.count
        maximum = materialize(T.max(self.cells[count], row_max), "float32")
        origin = zero_if_unseen(maximum)
        exp2(factors, 0, self.cells[count] - origin)
        exp2(factors, 1, row_max - origin)
        set_register(self.cells, count, maximum)
        for i, value in [*enumerate(sums), (count + 1, row_sum)]:
            set_register(self.cells, i, self.cells[i] * factors[0] + value * factors[1])

    @property
    def row_max(self) -> Expr:
        return self.cells[self.count]

    @property
    def row_sum(self) -> Expr:
        return self.cells[self.count + 1]

    @property
    def sums(self) -> list[Expr]:
        return [self.cells[i] for i in range(self.count)]

"""Rows of a softmax, written out: the second time that a task's scores go by, when Z is known.

The weights of a block wait in scratch until they can be turned: scores come with queries along the lanes, and in memory
keys lie side by side.
"""

from __future__ import annotations

import math

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.formats.choice import store_narrow
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, constant, let, load, materialize, scratch, store
from mhsa_compile.kernels.cpu.softmax_outputs.row_stats import TileRowStats


class WeightsWriter:
    """Writes w = 2^(s - m) / Z of the task's first `rows` queries; `output` is of (row of the task, key)."""

    def __init__(
        self, sums: TileRowStats, output: HeadView, rows: Expr, *, queries: int, keys: int, lanes: int
    ) -> None:
        self.sums, self.output, self.rows, self.lanes = sums, output, rows, lanes
        # A vector of keys more: the last square of the block is turned whole.
        self.block = scratch((keys + lanes, queries))
        self.turned = scratch((queries, keys + lanes))

    def clear(self, first: Expr, end: Expr) -> None:
        """Writes zeros from `first` to `end`: what is not visited."""
        with T.serial(self.rows) as i, T.serial(first, end) as key:
            store_narrow(self.output.buffer, self.output.at(i, key), T.float32(0), 1)

    def begin_block(self) -> None:
        pass

    def take(self, scores: RegisterTile, base: Expr, first_key: Expr) -> None:
        """Keeps the weights of a group; what is hidden is 0, also where the row sees a NaN."""
        for c, (first, lanes) in enumerate(self.sums.columns):
            zero, nothing = constant(0.0, lanes), constant(-math.inf, lanes)
            for r in range(self.sums.key_tile):
                score = materialize(scores.get(r, c), "float32", lanes)
                weight = T.Select(score == nothing, zero, self.sums.prob((first, lanes), score))
                store(self.block, [base + r, T.int64(first)], weight, lanes)

    def end_block(self, first_key: Expr, count: Expr) -> None:
        self._turn(count)
        vectors_of_keys = materialize(T.truncdiv(count, T.int64(self.lanes)))
        with T.serial(self.rows) as i:
            with T.serial(vectors_of_keys) as j:
                base = materialize(j * self.lanes)
                self._write(i, base, first_key, self.lanes)
            with T.serial(materialize(vectors_of_keys * self.lanes), count) as j:
                self._write(i, j, first_key, 1)

    def _turn(self, count: Expr) -> None:
        """turned[i, j] = block[j, i], a square at a time; the last one reaches beyond the block."""
        # Squares of a column of queries each.
        for first, lanes in self.sums.columns:
            with T.serial(materialize(ceil_div(count, lanes))) as square:
                base = materialize(square * lanes)
                rows = [let(load(self.block, [base + j, T.int64(first)], lanes)) for j in range(lanes)]
                for i, row in enumerate(vectors.transpose(rows)):
                    store(self.turned, [T.int64(first + i), base], row, lanes)

    def _write(self, i: Expr, base: Expr, first_key: Expr, lanes: int) -> None:
        weights = load(self.turned, [i, base], lanes)
        store_narrow(self.output.buffer, self.output.at(i, first_key + base), weights, lanes)

"""The output of one task, O = O + P V block by block, and Y = O / l at its end."""

from __future__ import annotations

from itertools import pairwise

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import KeyBlock, Products
from mhsa_compile.kernels.cpu.formats.choice import prefetch_rows, store_narrow
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, let, load, scratch, splat, store


class Accumulator:
    """O (queries, F) in float32; `registers` bounds the register tile of P V."""

    def __init__(self, products: Products, visibility: TileMask, registers: int) -> None:
        self.products, self.visibility, self.registers = products, visibility, registers
        self.queries, self.lanes = products.queries, products.lanes
        self.value_columns = vectors.chunks(visibility.op.v_head_dim, self.lanes)
        self.accumulator = scratch((self.queries, visibility.op.v_head_dim))

    def prefetch(self, output: HeadView) -> None:
        """Asks for the rows of Y, which would be fetched one by one when they are written."""
        first, width = self.visibility.first_query, self.visibility.op.v_head_dim
        prefetch_rows(output, first, self.queries, width, write=True)

    def clear(self) -> None:
        with T.serial(T.int64(self.queries)) as i:
            for first, lanes in self.value_columns:
                store(self.accumulator, [i, T.int64(first)], vectors.constant(0.0, lanes), lanes)

    def rescale(self, factors: Expr) -> None:
        """Multiplies each row by its factor."""
        with T.serial(T.int64(self.queries)) as i:
            factor = let(factors[i])
            for first, lanes in self.value_columns:
                at = [i, T.int64(first)]
                store(self.accumulator, at, load(self.accumulator, at, lanes) * splat(factor, lanes), lanes)

    def add(self, first_key: Expr, count: Expr) -> None:
        """accumulator += P V, a register tile of rows x columns at a time."""
        rows, groups = self._value_tile()
        for group in groups:
            with T.serial(T.int64(self.queries // rows)) as row_group:
                base = vectors.materialize(row_group * rows)
                # Keys that none of these rows sees have probs of 0, and are left out.
                first, end = self.visibility.visible_to_rows(base, rows, first_key, count)
                tile = RegisterTile(rows, group)
                tile.fill(0.0)
                self.products.add_values(tile, base, group, KeyBlock(first_key, first, end))
                for r in range(rows):
                    for c, (column, lanes) in enumerate(group):
                        at = [base + r, T.int64(column)]
                        # The block's sum by itself first: no chain of additions is longer than a block.
                        store(self.accumulator, at, load(self.accumulator, at, lanes) + tile.get(r, c), lanes)

    def add_past_hidden(self, first_key: Expr, count: Expr, hides: Expr) -> None:
        """Adds P V of a block that hides keys from some rows, if `hides`: what they hold must not matter, NaN
        included."""
        # A prob of 0 leaves out what is finite: the care is for NaN and infinity alone.
        with T.If(T.And(hides, self._holds_non_finite_values(first_key, count))):
            with T.Then():
                self._add_visible(first_key, count)
            with T.Else():
                self.add(first_key, count)

    def _value_tile(self) -> tuple[int, list[list[Chunk]]]:
        """(rows of P V's register tile, its columns in vectors: those that leave the fewest over, and what fits)."""
        total = len(self.value_columns)
        if self.products.unit.rows > 1:
            # More sums than a quarter of the registers would leave room for: a matrix product takes five cycles.
            count = -(-total // 6)
            borders = [total * i // count for i in range(count + 1)]
            return self.lanes, [self.value_columns[first:end] for first, end in pairwise(borders)]
        fewest = min(-total % columns for columns in (2, 3, 4))
        columns = [c for c in (1, 2, 3, 4) if -total % c <= fewest and c <= total]
        if self.registers <= 16:
            # All of them: eight sums, which is what three quarters have room for, barely hide the latency of two units.
            room, rows = self.registers, [r for r in (1, 2, 4, 6, 8) if self.queries % r == 0]
        else:
            room, rows = vectors.tile_registers(self.registers), [r for r in (1, 2, 4, 8) if self.lanes % r == 0]
        tile_rows, width = vectors.register_tile(room, rows, columns)
        return tile_rows, [self.value_columns[first : first + width] for first in range(0, total, width)]

    def _holds_non_finite_values(self, first_key: Expr, count: Expr) -> Expr:
        """Whether V in this block has a NaN or an infinity: 0 * v summed over the block is then NaN, otherwise 0."""
        columns = self.value_columns
        sums = RegisterTile(1, columns)  # one chain of additions for each column
        sums.fill(0.0)
        with T.serial(count) as j:
            row = self.products.operands.value_row
            sums.each(
                lambda _, c: sums.get(0, c) + vectors.zero_if_finite(row(first_key + j, columns[c]), columns[c][1])
            )
        non_finite = T.bool(False)
        for c, (_, lanes) in enumerate(columns):
            # Not x != x, which TVM takes to be false.
            non_finite = T.Or(non_finite, vectors.any_lane(T.isnan(sums.get(0, c)), lanes))
        return non_finite

    def _add_visible(self, first_key: Expr, count: Expr) -> None:
        """Adds P V as `add` does, but leaves a hidden key out, not multiplied by zero: rare, so plain rather than
        fast."""
        with T.serial(T.int64(self.queries)) as i:
            first, end = self.visibility.visible_to_rows(i, 1, first_key, count)
            with T.serial(first, end) as j:
                with T.If(self.visibility.sees(i, j, first_key + j)), T.Then():
                    prob = let(self.products.prob(j, i))
                    for column in self.value_columns:
                        at, lanes = [i, T.int64(column[0])], column[1]
                        value = self.products.operands.value_row(first_key + j, column)
                        old = load(self.accumulator, at, lanes)
                        store(self.accumulator, at, old + splat(prob, lanes) * value, lanes)

    def write(self, output: HeadView, row_sum: Expr) -> None:
        """Y = O / l, and zeros where a row saw nothing."""
        rows = T.min(T.int64(self.queries), self.visibility.q_length - self.visibility.first_query)
        with T.serial(let(rows)) as i:
            total = let(row_sum[i])
            inverse = let(T.Select(total == T.float32(0), T.float32(0), T.float32(1) / total))
            for first, lanes in self.value_columns:
                value = load(self.accumulator, [i, T.int64(first)], lanes) * splat(inverse, lanes)
                index = output.at(self.visibility.first_query + i, T.int64(first))
                store_narrow(output.buffer, index, value, lanes)

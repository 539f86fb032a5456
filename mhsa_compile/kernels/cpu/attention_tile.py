"""One attention task: a tile of query rows of one head against all the keys they see, in one pass.

    for each block of keys, for each group of them:
        S^T = K Q^T;  where some score exceeds its row's reference m by far: m' = the new maximum, and what was summed
                      up so far (l, O, the block's weights) shrinks by 2^(m - m')
        P^T = 2^(S^T - m);  l = l + sum P^T
    O = O + P V
    Y = O / l, and zeros where nothing was visible (l = 0)

The reference need not be the maximum: a weight of 2^RISE is as exact as one of 1. So it hardly ever moves, the weights
are computed while their scores are still in registers, and nothing is rescaled from block to block.

What no row sees is never visited; what every row sees takes a path without masks; at the right edge of a band, columns
of queries that see nothing of a group are left out, and P V sums for each few rows only the keys that they see.
Sources: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); tiling, Dao 2023 (arXiv:2307.08691); rescaling
only when it matters: FlashAttention-4 (github.com/Dao-AILab/flash-attention).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.base import Config
from mhsa_compile.kernels.cpu import vectors
from mhsa_compile.kernels.cpu.attention_mask import Bits, Visibility
from mhsa_compile.kernels.cpu.attention_products import Block, HeadView, Products
from mhsa_compile.kernels.cpu.storage import store_narrow
from mhsa_compile.kernels.cpu.vectors import (
    Chunk,
    Expr,
    RegisterTile,
    any_lane,
    bind,
    ceil_div,
    constant,
    load,
    scratch,
    settle,
    splat,
    store,
)

RISE = 8.0
"""How far, in powers of two, a score may exceed its row's reference before that is raised. Sums over S keys stay below
2^RISE * S times the largest value: no more of float32's range than 2^RISE times as many keys would take."""


@dataclass(frozen=True)
class Runs:
    """The runs of keys that a static mask leaves to the task: rows first .. end of `runs`, as `attention_plan` says."""

    first: Expr
    end: Expr
    runs: Expr
    bits: Expr


class AttentionTile:
    """One task. Scratch is allocated where the tile is constructed: inside the loop over tasks, so per thread."""

    def __init__(
        self,
        products: Products,
        visibility: Visibility,
        config: Config,
        *,
        lanes: int,
        registers: int,
        output: HeadView,
        runs: Runs | None,
    ) -> None:
        self.products, self.visibility, self.output, self.runs = products, visibility, output, runs
        self.op, self.lanes, self.registers = visibility.op, lanes, registers
        self.queries, self.keys, self.key_tile = config["queries"], config["keys"], config["key_tile"]
        self.query_columns = vectors.chunks(self.queries, lanes)
        self.value_columns = vectors.chunks(self.op.v_head_dim, lanes)
        self.accumulator = scratch((self.queries, self.op.v_head_dim))
        self.reference = scratch((self.queries,))  # 0 while a row has seen nothing,
        self.limit = scratch((self.queries,))  # and this -inf: else the reference + RISE
        self.row_sum, self.block_sum, self.factors = (scratch((self.queries,)) for _ in range(3))
        self.pending = scratch((self.key_tile, self.queries))

    def emit(self) -> None:
        self.products.pack_queries()
        self._clear()
        if self.runs is None:
            self._visit_visible()
        else:
            self._visit_runs(self.runs)
        self._write_output()

    def _visit_visible(self) -> None:
        """All keys between the first and the last that any row sees."""
        first, end = self.visibility.seen_by_any()
        # Blocks of equal size, whole register tiles, as few as the scratch allows.
        length = settle(end - first)
        fewest = settle(T.max(T.int64(1), ceil_div(length, self.keys)))
        size = settle(ceil_div(_ceil_div(length, fewest), self.key_tile) * self.key_tile)
        with T.serial(settle(_ceil_div(length, T.max(T.int64(1), size)))) as block:
            first_key = settle(first + block * size)
            self._visit(first_key, settle(T.min(size, end - first_key)))

    def _visit_runs(self, runs: Runs) -> None:
        """The runs of a static mask."""
        with T.serial(runs.first, runs.end) as run:
            first_key, count, row = (settle(T.cast(runs.runs[run, i], "int64")) for i in range(3))
            groups = settle(ceil_div(count, self.key_tile))
            self._begin_block()
            with T.If(row < 0):
                with T.Then():
                    self._weigh_seen(T.int64(0), groups, first_key)
                    self._end_block(groups)
                    self.products.take_values(first_key, count)
                    self._accumulate(first_key, count)
                with T.Else():
                    self.visibility.bits = Bits(runs.bits, row, self.lanes)
                    self._weigh_hidden(T.int64(0), groups, first_key, self.query_columns)
                    self._end_block(groups)
                    self.products.take_values(first_key, count)
                    self._accumulate_past_hidden(first_key, count, T.bool(True))

    def _clear(self) -> None:
        for first, lanes in self.query_columns:
            store(self.limit, [T.int64(first)], constant(-math.inf, lanes), lanes)
            store(self.reference, [T.int64(first)], constant(0.0, lanes), lanes)
            store(self.row_sum, [T.int64(first)], constant(0.0, lanes), lanes)
        with T.serial(T.int64(self.queries)) as i:
            for first, lanes in self.value_columns:
                store(self.accumulator, [i, T.int64(first)], constant(0.0, lanes), lanes)

    def _visit(self, first_key: Expr, count: Expr) -> None:
        """One block of keys."""
        self.visibility.read_block(first_key, count)
        groups = settle(ceil_div(count, self.key_tile))
        self._begin_block()
        from_key, to_key = self.visibility.seen_by_all()
        lead = settle(T.max(T.int64(0), T.min(groups, ceil_div(from_key - first_key, self.key_tile))))
        whole = settle(T.max(lead, T.min(groups, T.truncdiv(to_key - first_key, T.int64(self.key_tile)))))
        if self.visibility.leftmost is not None and self.visibility.mask is None:
            self._weigh_hidden(T.int64(0), lead, first_key, self.query_columns)
        if self.visibility.mask is None:
            self._weigh_seen(lead, whole, first_key)
        self._weigh_trailing(whole, groups, first_key)
        self._end_block(groups)
        self.products.take_values(first_key, count)
        if not self.visibility.hides:
            return self._accumulate(first_key, count)
        self._accumulate_past_hidden(first_key, count, T.Or(lead > 0, whole < groups))

    def _accumulate_past_hidden(self, first_key: Expr, count: Expr, hides: Expr) -> None:
        """P V of a block that hides keys from some rows, if `hides`: what they hold must not matter, NaN included."""
        with T.If(T.And(hides, self._holds_non_finite_values(first_key, count))):
            with T.Then():
                self._accumulate_selected(first_key, count)
            with T.Else():
                self._accumulate(first_key, count)

    def _weigh_seen(self, first: Expr, end: Expr, first_key: Expr) -> None:
        """Groups first .. end of the block, which every row sees."""
        with T.serial(first, end) as group:
            base = settle(group * self.key_tile)
            self._weigh_group(base, [first_key + base + r for r in range(self.key_tile)], self.query_columns)

    def _weigh_trailing(self, first: Expr, end: Expr, first_key: Expr) -> None:
        """Groups of which some is hidden. Towards the right edge fewer and fewer columns of queries see anything."""
        if self.visibility.rightmost is None:
            return self._weigh_hidden(first, end, first_key, self.query_columns)
        for c in range(len(self.query_columns)):
            stop = end
            if c + 1 < len(self.query_columns):
                # From this key on, the column sees nothing: its last lane sees up to rightmost + its number.
                beyond = self.visibility.rightmost + self.query_columns[c + 1][0] - first_key
                stop = settle(T.max(first, T.min(end, ceil_div(beyond, self.key_tile))))
            self._weigh_hidden(first, stop, first_key, self.query_columns[c:])
            first = stop

    def _weigh_hidden(self, first: Expr, end: Expr, first_key: Expr, columns: list[Chunk]) -> None:
        with T.serial(first, end) as group:
            base = settle(group * self.key_tile)
            # Beyond the last key the last one is read again; what it gives is hidden.
            last = self.visibility.kv_length - 1
            keys = [settle(T.min(first_key + (base + r), last)) for r in range(self.key_tile)]
            self._weigh_group(base, keys, columns, first_key + base)

    def _weigh_group(self, base: Expr, keys: list[Expr], columns: list[Chunk], first_key: Expr | None = None) -> None:
        """Scores of `key_tile` keys, number `base` of the block on, and meanwhile the weights of those before.

        Multiplications of one group and exponentials of the other do not wait for each other. Where some keys are
        hidden, `first_key` is the number of the first.
        """
        tile = RegisterTile(self.key_tile, columns)
        self.products.score(tile, keys, lambda step: self._weigh_pending(base - self.key_tile, step))
        if first_key is not None:
            tile.each(lambda r, c: self.visibility.hide(tile.get(r, c), base + r, first_key + r, columns[c]))
        largest = [bind(self._largest(tile, c)) for c in range(len(columns))]
        self._raise_reference(base, columns, largest)
        for r in range(self.key_tile):
            for lane, lanes in self.query_columns:
                seen = [c for c, column in enumerate(columns) if column[0] == lane]
                score = tile.get(r, seen[0]) if seen else constant(-math.inf, lanes)
                store(self.pending, [T.int64(r), T.int64(lane)], score, lanes)

    def _begin_block(self) -> None:
        """Nothing is pending: scores of -inf, whose weights are zeros."""
        for lane, lanes in self.query_columns:
            store(self.block_sum, [T.int64(lane)], constant(0.0, lanes), lanes)
            for r in range(self.key_tile):
                store(self.pending, [T.int64(r), T.int64(lane)], constant(-math.inf, lanes), lanes)

    def _end_block(self, groups: Expr) -> None:
        """The weights of the last group, and the block's sum of weights."""
        for step in range(self.key_tile // self.products.keys_a_step):
            self._weigh_pending(settle((groups - 1) * self.key_tile), step)
        for lane, lanes in self.query_columns:
            at = [T.int64(lane)]
            store(self.row_sum, at, load(self.row_sum, at, lanes) + load(self.block_sum, at, lanes), lanes)

    def _weigh_pending(self, base: Expr, step: int) -> None:
        """P^T = 2^(S^T - m) for some keys of the group that begins at `base`."""
        taken = self.products.keys_a_step
        for lane, lanes in self.query_columns:
            at = [T.int64(lane)]
            reference, total = bind(load(self.reference, at, lanes)), load(self.block_sum, at, lanes)
            weights = []
            for r in range(step * taken, (step + 1) * taken):
                score = load(self.pending, [T.int64(r), *at], lanes)
                weights.append(bind(vectors.exp2(score - reference, lanes, self.products.exp2_coefficients)))
                total = total + weights[-1]
            self.products.keep_weights(base + step * taken, (lane, lanes), weights)
            store(self.block_sum, at, total, lanes)

    def _largest(self, tile: RegisterTile, c: int) -> Expr:
        largest = tile.get(0, c)
        for r in range(1, self.key_tile):
            largest = T.max(largest, tile.get(r, c))
        return largest

    def _raise_reference(self, base: Expr, columns: list[Chunk], largest: list[Expr]) -> None:
        """Where a score is too far above the reference: the new one, and all sums so far in its measure."""
        exceeded = None
        for (lane, lanes), top in zip(columns, largest, strict=True):
            beyond = top > load(self.limit, [T.int64(lane)], lanes)
            exceeded = beyond if exceeded is None else T.Or(exceeded, beyond)
        with T.If(any_lane(exceeded, columns[0][1])), T.Then():
            for lane, lanes in self.query_columns:
                store(self.factors, [T.int64(lane)], constant(1.0, lanes), lanes)
            for (lane, lanes), top in zip(columns, largest, strict=True):
                self._raise_column([T.int64(lane)], lanes, top)
            self.products.rescale_weights(base, self.factors)
            with T.serial(T.int64(self.queries)) as i:
                factor = bind(self.factors[i])
                for first, lanes in self.value_columns:
                    at = [i, T.int64(first)]
                    store(self.accumulator, at, load(self.accumulator, at, lanes) * splat(factor, lanes), lanes)

    def _raise_column(self, at: list[Expr], lanes: int, top: Expr) -> None:
        nothing = constant(-math.inf, lanes)  # what a row has seen that has seen nothing: -inf - -inf is not a number
        old = T.Select(load(self.limit, at, lanes) == nothing, nothing, load(self.reference, at, lanes))
        old = settle(old, "float32", lanes)
        new = settle(T.Select(top > old, top, old), "float32", lanes)
        reference = settle(T.Select(new == nothing, constant(0.0, lanes), new), "float32", lanes)
        store(self.limit, at, new + constant(RISE, lanes), lanes)
        store(self.reference, at, reference, lanes)
        factor = settle(vectors.exp2(old - reference, lanes), "float32", lanes)
        store(self.factors, at, factor, lanes)
        for total in (self.row_sum, self.block_sum):
            store(total, at, load(total, at, lanes) * factor, lanes)

    def _accumulate(self, first_key: Expr, count: Expr) -> None:
        """accumulator += P V, a register tile of rows x columns at a time."""
        rows, columns = self._value_tile()
        for begin in range(0, len(self.value_columns), columns):
            group = self.value_columns[begin : begin + columns]
            with T.serial(T.int64(self.queries // rows)) as row_group:
                base = settle(row_group * rows)
                first, end = self.visibility.seen_by_rows(base, rows, first_key, count)
                tile = RegisterTile(rows, group)
                tile.fill(0.0)
                self.products.add_values(tile, base, group, Block(first_key, first, end))
                for r in range(rows):
                    for c, (column, lanes) in enumerate(group):
                        at = [base + r, T.int64(column)]
                        store(self.accumulator, at, load(self.accumulator, at, lanes) + tile.get(r, c), lanes)

    def _value_tile(self) -> tuple[int, int]:
        """(rows, columns in vectors) of P V's register tile: columns that leave the fewest over, and what fits.

        All rows are lanes of one column of queries: what is left out for one of them is left out for all.
        """
        wanted = len(self.value_columns)
        fewest = min(-wanted % columns for columns in (2, 3, 4))
        columns = [c for c in (1, 2, 3, 4) if -wanted % c <= fewest and c <= wanted]
        rows = [r for r in (1, 2, 4, 8) if self.lanes % r == 0]
        return vectors.register_tile(vectors.tile_registers(self.registers), rows, columns)

    def _holds_non_finite_values(self, first_key: Expr, count: Expr) -> Expr:
        """Whether V in this block has a NaN or an infinity: 0 * v summed over the block is then NaN, otherwise 0."""
        columns = self.value_columns
        sums = RegisterTile(1, columns)  # one chain of additions for each column
        sums.fill(0.0)
        with T.serial(count) as j:
            sums.each(
                lambda _, c: (
                    sums.get(0, c) + self.products.value(first_key + j, columns[c]) * constant(0.0, columns[c][1])
                )
            )
        found = T.bool(False)
        for c, (_, lanes) in enumerate(columns):
            found = T.Or(found, any_lane(T.isnan(sums.get(0, c)), lanes))  # not x != x, which TVM takes to be false
        return found

    def _accumulate_selected(self, first_key: Expr, count: Expr) -> None:
        """As `_accumulate`, but a hidden key is left out, not multiplied by zero: rare, so plain rather than fast."""
        with T.serial(T.int64(self.queries)) as i:
            first, end = self.visibility.seen_by_rows(i, 1, first_key, count)
            with T.serial(first, end) as j:
                with T.If(self.visibility.sees(i, j, first_key + j)), T.Then():
                    weight = bind(self.products.weight(j, i))
                    for column in self.value_columns:
                        at, lanes = [i, T.int64(column[0])], column[1]
                        value = self.products.value(first_key + j, column)
                        old = load(self.accumulator, at, lanes)
                        store(self.accumulator, at, old + splat(weight, lanes) * value, lanes)

    def _write_output(self) -> None:
        rows = T.min(T.int64(self.queries), self.visibility.q_length - self.visibility.first_query)
        with T.serial(bind(rows)) as i:
            total = bind(self.row_sum[i])
            inverse = bind(T.Select(total == T.float32(0), T.float32(0), T.float32(1) / total))
            for first, lanes in self.value_columns:
                value = load(self.accumulator, [i, T.int64(first)], lanes) * splat(inverse, lanes)
                index = self.output.at(self.visibility.first_query + i, T.int64(first))
                store_narrow(self.output.buffer, index, value, lanes)


def _ceil_div(value: Expr, size: Expr) -> Expr:
    return T.truncdiv(value + (size - 1), size)

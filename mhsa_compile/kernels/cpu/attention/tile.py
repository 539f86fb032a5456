"""One attention task: a tile of query rows of one head against all the keys they see, in one pass.

    for each block of keys, for each group of them:
        S^T = K Q^T;  where some score exceeds its row's reference m by far: m' = the new maximum, and what was summed
                      up so far (l, O, the block's weights) shrinks by 2^(m - m')
        P^T = 2^(S^T - m);  l = l + sum P^T
    O = O + P V
    Y = O / l, and zeros where nothing was visible (l = 0)

The reference need not be the maximum: a weight of 2^RISE is as exact as one of 1. So it hardly ever moves, nothing is
rescaled from block to block, and the weights of one group are computed while the next one's scores are multiplied.

What no row sees is never visited; what every row sees takes a path without masks; at the right edge of a band, columns
of queries that see nothing of a group are left out, and P V sums for each few rows only the keys that they see.
Sources: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); tiling, Dao 2023 (arXiv:2307.08691); rescaling
only when it matters: FlashAttention-4 (github.com/Dao-AILab/flash-attention).
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.attention.masking import Bits, TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products
from mhsa_compile.kernels.cpu.attention.online_softmax import OnlineSoftmax
from mhsa_compile.kernels.cpu.attention.output_accumulator import Accumulator
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, Expr, settle
from mhsa_compile.kernels.interface.kernel import Config


@dataclass(frozen=True)
class Runs:
    """The runs of keys that a static mask leaves to the task: rows first .. end of `runs`, as `block_sparsity` says."""

    first: Expr
    end: Expr
    runs: Expr
    bits: Expr


class AttentionTile:
    """One task. Scratch is allocated where the tile is constructed: inside the loop over tasks, so per thread."""

    def __init__(
        self,
        products: Products,
        visibility: TileMask,
        config: Config,
        *,
        lanes: int,
        registers: int,
        overwrites_summands: bool,
        output: HeadView,
        runs: Runs | None,
    ) -> None:
        self.products, self.visibility, self.output, self.runs, self.lanes = products, visibility, output, runs, lanes
        self.queries, self.keys, self.key_tile = config["queries"], config["keys"], config["key_tile"]
        self.query_columns = vectors.chunks(self.queries, lanes)
        self.sums = Accumulator(products, visibility, self.queries, lanes, registers)
        self.weights = OnlineSoftmax(
            products, visibility, self.queries, self.key_tile, lanes, self.sums.rescale, overwrites_summands
        )

    def emit(self) -> None:
        self.products.pack_queries()
        self.products.operands.prefetch_next(self.queries)
        self.sums.prefetch(self.output)
        self.weights.clear()
        self.sums.clear()
        if self.runs is None:
            self._visit_visible()
        else:
            self._visit_runs(self.runs)
        self.sums.write(self.output, self.weights.row_sum)

    def _visit_visible(self) -> None:
        """All keys between the first and the last that any row sees."""
        first, end = self.visibility.seen_by_any()
        # Blocks of equal size, whole register tiles, as few as the scratch allows.
        length = settle(end - first)
        fewest = settle(T.max(T.int64(1), ceil_div(length, self.keys)))
        size = settle(ceil_div(ceil_div(length, fewest), self.key_tile) * self.key_tile)
        blocks = settle(ceil_div(length, T.max(T.int64(1), size)))
        with T.serial(blocks) as turn:
            first_key = settle(first + self._in_order(turn, T.int64(0), blocks) * size)
            self._visit(first_key, settle(T.min(size, end - first_key)))

    def _in_order(self, turn: Expr, first: Expr, end: Expr) -> Expr:
        """From the last to the first where scores fall with the distance, so that the reference need not rise."""
        return first + end - 1 - turn if self.visibility.op.slopes else turn

    def _visit_runs(self, runs: Runs) -> None:
        """The runs of a static mask."""
        with T.serial(runs.first, runs.end) as turn:
            run = self._in_order(turn, runs.first, runs.end)
            first_key, count, row = (settle(T.cast(runs.runs[run, i], "int64")) for i in range(3))
            if self.visibility.op.lengths:
                self._visit_cut(runs, first_key, count, row)
            else:
                self._visit_run(runs, first_key, count, row)

    def _visit_run(self, runs: Runs, first_key: Expr, count: Expr, row: Expr) -> None:
        groups = settle(ceil_div(count, self.key_tile))
        self.weights.begin_block()
        with T.If(row < 0):
            with T.Then():
                self._weigh_seen(T.int64(0), groups, first_key)
                self.weights.end_block(groups)
                self.products.take_values(first_key, count)
                self.sums.add(first_key, count)
            with T.Else():
                self._visit_partial(runs, first_key, count, row, groups)

    def _visit_cut(self, runs: Runs, first_key: Expr, count: Expr, row: Expr) -> None:
        """What the keys of the batch entry, and a band counted from their end, leave of a run."""
        first, end = self.visibility.seen_by_any()
        count = settle(T.min(count, end - first_key))
        with T.If(T.And(count > 0, first_key + count > first)), T.Then(), T.If(row < 0):
            with T.Then():
                self._visit(first_key, count)
            with T.Else():
                self.weights.begin_block()
                self._visit_partial(runs, first_key, count, row, settle(ceil_div(count, self.key_tile)))

    def _visit_partial(self, runs: Runs, first_key: Expr, count: Expr, row: Expr, groups: Expr) -> None:
        """A run with a bit for each pair."""
        self.visibility.bits = Bits(runs.bits, row, self.lanes)
        self._weigh_hidden(T.int64(0), groups, first_key, self.query_columns)
        self.weights.end_block(groups)
        self.products.take_values(first_key, count)
        self.sums.add_past_hidden(first_key, count, T.bool(True))

    def _visit(self, first_key: Expr, count: Expr) -> None:
        """One block of keys."""
        self.visibility.read_block(first_key, count)
        groups = settle(ceil_div(count, self.key_tile))
        self.weights.begin_block()
        from_key, to_key = self.visibility.seen_by_all()
        lead = settle(T.max(T.int64(0), T.min(groups, ceil_div(from_key - first_key, self.key_tile))))
        whole = settle(T.max(lead, T.min(groups, T.truncdiv(to_key - first_key, T.int64(self.key_tile)))))
        if self.visibility.leftmost is not None and self.visibility.mask is None:
            self._weigh_hidden(T.int64(0), lead, first_key, self.query_columns)
        if self.visibility.mask is None:
            self._weigh_seen(lead, whole, first_key)
        self._weigh_trailing(whole, groups, first_key)
        self.weights.end_block(groups)
        self.products.take_values(first_key, count)
        if not self.visibility.hides:
            return self.sums.add(first_key, count)
        self.sums.add_past_hidden(first_key, count, T.Or(lead > 0, whole < groups))

    def _weigh_seen(self, first: Expr, end: Expr, first_key: Expr) -> None:
        """Groups first .. end of the block, which every row sees."""
        with T.serial(first, end) as group:
            base = settle(group * self.key_tile)
            self.weights.add_group(base, [first_key + base + r for r in range(self.key_tile)], self.query_columns)

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
            self.weights.add_group(base, keys, columns, first_key + base)

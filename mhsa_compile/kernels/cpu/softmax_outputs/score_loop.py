"""The scores of one task, a group of keys at a time: a tile of query rows of one head against the keys they see.

As in `tile`, scores come transposed, S^T = K Q^T, queries along the lanes; what no row sees is not visited,
and what every row sees takes a path without masks. Whoever wants something of them is a `Taker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.attention.masking import Bits, TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products
from mhsa_compile.kernels.cpu.attention.score_mods import ScoreMods
from mhsa_compile.kernels.cpu.attention.tile import Runs
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Expr, RegisterTile, settle
from mhsa_compile.kernels.interface.kernel import Config


class Taker(Protocol):
    """Takes the scores of a task block by block, and of a block group by group."""

    def begin_block(self) -> None: ...

    def take(self, scores: RegisterTile, base: Expr, first_key: Expr) -> None:
        """scores[r, c] of key first_key + r, number base + r of its block, and the c-th column of queries, in units of
        log2; -inf where hidden. Who moves the origins of ALiBi's distances makes the tile again for those after it."""
        ...

    def end_block(self, first_key: Expr, count: Expr) -> None:
        """The block was of the keys first_key .. first_key + count."""
        ...


class Sweep:
    """One task's way over its keys."""

    def __init__(
        self, products: Products, visibility: TileMask, config: Config, *, lanes: int, runs: Runs | None
    ) -> None:
        self.products, self.visibility, self.runs, self.lanes = products, visibility, runs, lanes
        self.keys, self.key_tile = config["keys"], config["key_tile"]
        self.query_columns = vectors.chunks(config["queries"], lanes)
        self.scores = ScoreMods(products.operands, visibility.place, config["queries"], self.key_tile)

    def prepare(self) -> None:
        """Once, before the first way."""
        self.products.pack_queries()
        self.scores.prepare(self.query_columns)

    def ends(self) -> tuple[Expr, Expr]:
        """(first, end): no key outside is visited."""
        return self.visibility.seen_by_any() if self.runs is None else (T.int64(0), T.int64(0))

    def over(self, takers: Sequence[Taker]) -> None:
        """All keys, in their order."""
        if self.runs is None:
            self._visit_visible(takers)
        else:
            self._visit_runs(self.runs, takers)

    def _visit_visible(self, takers: Sequence[Taker]) -> None:
        """All keys between the first and the last that any row sees, in blocks of whole register tiles."""
        first, end = self.visibility.seen_by_any()
        with T.serial(settle(ceil_div(end - first, self.keys))) as block:
            first_key = settle(first + block * self.keys)
            self._visit(takers, first_key, settle(T.min(T.int64(self.keys), end - first_key)))

    def _visit(self, takers: Sequence[Taker], first_key: Expr, count: Expr) -> None:
        self.visibility.bits = None
        self.visibility.read_block(first_key, count)
        groups = settle(ceil_div(count, self.key_tile))
        from_key, to_key = self.visibility.seen_by_all()
        lead = settle(T.max(T.int64(0), T.min(groups, ceil_div(from_key - first_key, self.key_tile))))
        whole = settle(T.max(lead, T.min(groups, T.truncdiv(to_key - first_key, T.int64(self.key_tile)))))
        _begin(takers)
        if self.visibility.mask is None:
            if self.visibility.leftmost is not None:
                self._hidden(takers, T.int64(0), lead, first_key)
            self._seen(takers, lead, whole, first_key)
        self._hidden(takers, whole, groups, first_key)
        _end(takers, first_key, count)

    def _visit_runs(self, runs: Runs, takers: Sequence[Taker]) -> None:
        """The runs of a static mask, and of them what the keys of the batch entry and a band leave."""
        with T.serial(runs.first, runs.end) as run:
            first_key, count, row = (settle(T.cast(runs.runs[run, i], "int64")) for i in range(3))
            if not self.visibility.op.lengths:
                return self._visit_run(runs, takers, first_key, count, row)
            first, end = self.visibility.seen_by_any()
            count = settle(T.min(count, end - first_key))
            with T.If(T.And(count > 0, first_key + count > first)), T.Then(), T.If(row < 0):
                with T.Then():
                    self._visit(takers, first_key, count)
                with T.Else():
                    self._visit_partial(runs, takers, first_key, count, row)

    def _visit_run(self, runs: Runs, takers: Sequence[Taker], first_key: Expr, count: Expr, row: Expr) -> None:
        with T.If(row < 0):
            with T.Then():
                _begin(takers)
                self._seen(takers, T.int64(0), settle(ceil_div(count, self.key_tile)), first_key)
                _end(takers, first_key, count)
            with T.Else():
                self._visit_partial(runs, takers, first_key, count, row)

    def _visit_partial(self, runs: Runs, takers: Sequence[Taker], first_key: Expr, count: Expr, row: Expr) -> None:
        """A run with a bit for each pair."""
        self.visibility.bits = Bits(runs.bits, row, self.lanes)
        _begin(takers)
        self._hidden(takers, T.int64(0), settle(ceil_div(count, self.key_tile)), first_key)
        _end(takers, first_key, count)

    def _seen(self, takers: Sequence[Taker], first: Expr, end: Expr, first_key: Expr) -> None:
        """Groups first .. end of the block, which every row sees."""
        with T.serial(first, end) as group:
            base = settle(group * self.key_tile)
            scores = self._scores([first_key + base + r for r in range(self.key_tile)])
            self._hand_over(takers, scores, base, first_key)

    def _hidden(self, takers: Sequence[Taker], first: Expr, end: Expr, first_key: Expr) -> None:
        """Groups of which some is hidden."""
        with T.serial(first, end) as group:
            base = settle(group * self.key_tile)
            # Beyond the last key the last one is read again; what it gives is hidden.
            last = self.visibility.kv_length - 1
            tile = self._scores([settle(T.min(first_key + (base + r), last)) for r in range(self.key_tile)])
            columns = self.query_columns
            tile.each(lambda r, c: self.visibility.hide(tile.get(r, c), base + r, first_key + base + r, columns[c]))
            self._hand_over(takers, tile, base, first_key)

    def _scores(self, keys: list[Expr]) -> RegisterTile:
        tile = RegisterTile(self.key_tile, self.query_columns)
        self.products.score(tile, keys, lambda step: None)
        self.scores.cap(tile)
        return tile

    def _hand_over(self, takers: Sequence[Taker], scores: RegisterTile, base: Expr, first_key: Expr) -> None:
        key = settle(first_key + base)
        self.scores.add_bias(scores, key)
        for taker in takers:
            taker.take(scores, base, key)


def _begin(takers: Sequence[Taker]) -> None:
    for taker in takers:
        taker.begin_block()


def _end(takers: Sequence[Taker], first_key: Expr, count: Expr) -> None:
    for taker in takers:
        taker.end_block(first_key, count)

"""The scores of one task, a group of keys at a time: a tile of query rows of one head against the keys they see.

As in `attention/tile`, scores come transposed, S^T = K Q^T, queries along the lanes, and `attention/key_loop` says
which keys are visited. Whoever wants something of the scores is a `Taker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.attention.key_loop import KeyGroup, KeyLoop, Route, Runs, VisitedBlock
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, materialize
from mhsa_compile.kernels.interface.kernel import Config


class Taker(Protocol):
    """Takes the scores of a task block by block, and of a block group by group."""

    def begin_block(self) -> None: ...

    def take(self, scores: RegisterTile, base: Expr, first_key: Expr) -> None:
        """scores[r, c] of key first_key + r, number base + r of its block, and the c-th column of queries, in units of
        log2; -inf where hidden. Who moves the origins of a bias makes the tile again for those after it."""
        ...

    def end_block(self, first_key: Expr, count: Expr) -> None:
        """The block was of the keys first_key .. first_key + count."""
        ...


class Sweep:
    """One task's scores, as often as they are asked for."""

    def __init__(
        self, products: Products, visibility: TileMask, config: Config, *, lanes: int, runs: Runs | None
    ) -> None:
        self.products, self.visibility, self.config = products, visibility, config
        self.runs, self.lanes = runs, lanes
        visibility.listen(config["key_tile"])

    def prepare(self) -> None:
        """Prepares the queries and what is added to scores; to be called once, before the first way."""
        self.products.pack_queries()
        self.visibility.prepare()

    def ends(self) -> tuple[Expr, Expr]:
        """(first, end): no key outside is visited, and every block inside is."""
        all_visited = self.runs is None and not self.visibility.looks
        return self.visibility.seen_by_any() if all_visited else (T.int64(0), T.int64(0))

    def over(self, takers: Sequence[Taker]) -> None:
        """Goes over all keys, in their order, and all columns of queries."""
        visitor = _Handing(self.products, self.visibility, takers)
        # Forwards, whatever fades: of equal scores the first key is to stay the first of the largest.
        KeyLoop(visitor, self.visibility, self.config, Route(), lanes=self.lanes, runs=self.runs).emit()


class _Handing:
    """Computes the scores of each group of keys and hands them over."""

    def __init__(self, products: Products, visibility: TileMask, takers: Sequence[Taker]) -> None:
        self.products, self.visibility, self.takers = products, visibility, takers

    def begin_block(self) -> None:
        for taker in self.takers:
            taker.begin_block()

    def add_group(self, group: KeyGroup) -> None:
        tile = self._scores(group)
        key = materialize(group.first_key)
        self.visibility.add_bias(tile, key)
        for taker in self.takers:
            taker.take(tile, group.base, key)

    def end_block(self, block: VisitedBlock) -> None:
        for taker in self.takers:
            taker.end_block(block.first_key, block.count)

    def _scores(self, group: KeyGroup) -> RegisterTile:
        tile = RegisterTile(len(group.rows), group.columns)
        self.products.score(tile, group.rows)
        self.visibility.score(tile, group.rows, group.base)
        if group.hides:
            hide, base, first_key, columns = self.visibility.hide, group.base, group.first_key, group.columns
            tile.each(lambda r, c: hide(tile.get(r, c), base + r, first_key + r, columns[c]))
        return tile

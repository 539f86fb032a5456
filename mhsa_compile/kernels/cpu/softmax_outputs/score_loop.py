"""The scores of one task, a group of keys at a time: a tile of query rows of one head against the keys they see.

As in attention itself, scores come transposed, S^T = K Q^T, queries along the lanes, and `attention/key_loop` says
which keys are visited. Whoever wants something of the scores is a `Taker`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.attention_args import AttentionArguments, attention_arguments
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.attention.kernel import CpuAttentionKernel, tile_and_runs
from mhsa_compile.kernels.cpu.attention.key_loop import KeyGroup, KeyLoop, Route, Runs, VisitedBlock
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import Products, TaskOperands, unit_for
from mhsa_compile.kernels.cpu.score_parts import tile_parts
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, materialize
from mhsa_compile.kernels.cpu.units.choice import units
from mhsa_compile.kernels.cpu.units.unit import Unit
from mhsa_compile.kernels.interface.kernel import Config
from mhsa_compile.kernels.interface.ops import AttentionOp

TileBody = Callable[[Expr, Expr, Expr, Expr, "Runs | None"], None]


class SoftmaxOutputKernel:
    """A kernel that looks into an attention: it takes those that attention takes, in tiles of the same sizes."""

    def why_not(self, op: Any, profile: CpuProfile) -> str | None:
        return CpuAttentionKernel().why_not(op.attention, profile)

    def search_space(self, op: Any, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return CpuAttentionKernel().search_space(op.attention, profile)

    def why_not_config(self, op: Any, profile: CpuProfile, config: Config) -> str | None:
        return CpuAttentionKernel().why_not_config(op.attention, profile, config)

    def default_config(self, op: Any, profile: CpuProfile) -> dict[str, int]:
        """A config of two columns of queries: a last tile wastes little. Scores leave some registers to their
        exponentials."""
        key_tile = 8 if profile.hardware.vector_registers >= 32 else 4
        return {"queries": 2 * profile.vector_lanes("float32"), "key_tile": key_tile, "keys": 256}


@dataclass(frozen=True)
class SoftmaxCall(AttentionArguments):
    """The arguments of a call, and what its tasks are computed with."""

    profile: CpuProfile
    config: Config
    unit: Unit

    def each_tile(self, heads: Expr, head: Callable[[Expr], Expr], views: list[Expr] | None, body: TileBody) -> None:
        """body(b, place, h, first query, runs) of each tile of query rows of so many heads, in parallel: `head(place)`
        is the number of the one at a place. `views` are those of a plan."""
        queries = self.config["queries"]
        tiles = materialize(ceil_div(self.q_length, queries))
        total = materialize(self.batch * heads * tiles)
        with self.unit.imported(), T.parallel(total) as index:
            number = materialize(T.truncdiv(index, tiles))
            b, place = materialize(T.truncdiv(number, heads)), materialize(T.truncmod(number, heads))
            h = head(place)
            tile, runs = tile_and_runs(self.op, materialize(T.truncmod(index, tiles)), tiles, h, views)
            body(b, place, h, materialize(tile * queries), runs)

    def task(self, b: Expr, h: Expr, first_query: Expr, place: Expr = None) -> tuple[Products, TileMask]:
        """Allocates the scratch of one tile of query rows; `place` is that of a chosen row among those asked for."""
        config, lanes = self.config, self.profile.vector_lanes("float32")
        operands = TaskOperands.of(self, b, h, first_query)
        parts = tile_parts(self, b, h, place)
        products = Products(operands, self.unit, config, lanes)
        return products, TileMask(operands, config["queries"], config["keys"], parts, lanes)


def call_arguments(op: AttentionOp, profile: CpuProfile, config: Config) -> SoftmaxCall:
    """The arguments that an attention and what looks into it have in common."""
    lanes, arguments = profile.vector_lanes("float32"), attention_arguments(op)
    # Scores go from registers to whoever wants them, row by row; words need whole vectors of queries.
    *narrow, last = units(profile, op.dtype)
    fitting = [unit for unit in narrow if unit.rows == 1 and config["queries"] % lanes == 0]
    unit = unit_for(op, [*fitting, last], config["key_tile"], lanes)
    return SoftmaxCall(**vars(arguments), profile=profile, config=config, unit=unit)


class Taker:
    """Takes the scores of a task block by block, and of a block group by group."""

    def begin_block(self) -> None:
        """Prepares for the groups of a block."""

    def take(self, scores: RegisterTile, base: Expr, first_key: Expr) -> None:
        """scores[r, c] of key first_key + r, number base + r of its block, and the c-th column of queries, in units of
        log2; -inf where hidden. Who moves the origins of a bias makes the tile again for those after it."""
        raise NotImplementedError

    def end_block(self, first_key: Expr, count: Expr) -> None:
        """The block was of the keys first_key .. first_key + count."""


class Sweep:
    """One task's scores, as often as they are asked for."""

    def __init__(self, products: Products, visibility: TileMask, config: Config, runs: Runs | None) -> None:
        self.products, self.visibility, self.config, self.runs = products, visibility, config, runs
        visibility.listen(config["key_tile"])

    def prepare(self) -> None:
        """Prepares the queries and what is added to scores; to be called once, before the first way."""
        self.products.pack_queries()
        self.visibility.prepare()

    def ends(self) -> tuple[Expr, Expr]:
        """(first, end): no key outside is visited, and every block inside is."""
        all_visited = self.runs is None and not self.visibility.looks
        return self.visibility.visible_to_any() if all_visited else (T.int64(0), T.int64(0))

    def over(self, takers: Sequence[Taker]) -> None:
        """Goes over all keys, in their order, and all columns of queries."""
        visitor = _Handing(self.products, self.visibility, takers)
        # Forwards, whatever fades: of equal scores the first key is to stay the first of the largest.
        KeyLoop(visitor, self.visibility, self.config, Route(), self.runs).emit()


class _Handing:
    """Computes the scores of each group of keys and hands them over."""

    def __init__(self, products: Products, visibility: TileMask, takers: Sequence[Taker]) -> None:
        self.products, self.visibility, self.takers = products, visibility, takers

    def begin_block(self) -> None:
        for taker in self.takers:
            taker.begin_block()

    def end_block(self, block: VisitedBlock) -> None:
        for taker in self.takers:
            taker.end_block(block.first_key, block.count)

    def add_group(self, group: KeyGroup) -> None:
        tile = RegisterTile(len(group.rows), group.columns)
        self.products.score(tile, group.rows)
        self.visibility.score(tile, group.rows, group.base)
        if group.hides:
            hide, base, first_key, columns = self.visibility.hide, group.base, group.first_key, group.columns
            tile.each(lambda r, c: hide(tile.get(r, c), base + r, first_key + r, columns[c]))
        key = materialize(group.first_key)
        self.visibility.add_bias(tile, key)
        for taker in self.takers:
            taker.take(tile, group.base, key)

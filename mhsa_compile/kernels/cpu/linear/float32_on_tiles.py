"""Linears of float32 on matrix tiles, by bfloat16 terms, with the products that `spec/float32_products.py` lists for
bf16x6 and bf16x3; of float16, by two terms and all four products of them.

Rows of x are split once a call, into tiles of 16 rows by 32 of K, each with its lower terms behind it, so that a step
reads lines that lie side by side. Weights are packed as the kernel of float32 has them, and a task splits its strip of
32 features before a block of rows of x passes over it: as many bytes come from memory as without terms, and few rows,
for which splitting takes too long, are multiplied in float32. Two by two tiles of sums take all products of a step, and
a tile that the next product needs too stays in its register, so that 24 products load 14 tiles. Where K is long, parts
of it pass over all tasks, and y takes their sums.

A chain of float32 sums drifts. That of bf16x6 starts anew after CHAIN; vectors add what it gave to the total while
tiles multiply the next part. The coarse words lose more by their terms than by a chain.

What terms would make something else of (units/float32_terms.py) is computed in float32: blocks of 32 rows of which one
is extraordinary, and strips that have such a feature in a part of K.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.formats.choice import load_wide, store_narrow
from mhsa_compile.kernels.cpu.linear.activations import prepared
from mhsa_compile.kernels.cpu.linear.kernel import product_function, register_tile_config
from mhsa_compile.kernels.cpu.linear.microkernel import Product, each_panel, tasks
from mhsa_compile.kernels.cpu.linear.pack_weights import pack
from mhsa_compile.kernels.cpu.linear.term_factors import (
    COLUMNS,
    DEPTH,
    PLAIN_ROWS,
    WORTH_SPLITTING,
    WORTH_SPLITTING_FLOAT16,
    Pass,
    StripTerms,
    TermLayout,
    TermRows,
    split_rows,
)
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, let, load, materialize, splat, store
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.cpu.units.float32_terms import LANES
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.spec.float32_products import Float32Products

WORDS: tuple[Float32Products, ...] = ("bf16x6", "bf16x3")
ROWS = 2
"""Tiles of rows: of the sums there are two by two, and two of A and two of B have registers of their own, which stay
while terms change."""
HEIGHT = ROWS * tiles.ROWS
TOTAL, PART = 0, 1
"""Of the two places of a block's sums: the total, and the part that is added to it next."""
FEW_ROWS = {2: 8, 4: 4}
"""Of a register tile by its vectors, where fewer rows than are worth splitting are multiplied in float32."""
SHORTEST, FEWEST = 128, 8
"""Terms of a sum, and features, from which on no call is known to exceed float32's error budget: below, where one term
is much larger than the others, PyTorch's many lanes are more exact than a chain, by terms or not."""
SHARES = 4
"""So many pairs of tiles of rows ask for all of the next strip."""


class CpuFloat32TileLinearKernel:
    """Packed-weight matrix product of float32 by bfloat16 terms."""

    name = "cpu.float32_linear_on_tiles"
    op_type: type[LinearOp] = LinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        if op.int8_weights or op.dtype != "float32":
            return f"float32, not {'weights in eight bits' if op.int8_weights else op.dtype}"
        if op.float32_products not in WORDS:
            return f"products of several bfloat16 terms, not {op.float32_products}"
        if not tiles.BFLOAT16.is_on(profile):
            return "a CPU with amx_bf16"
        return None

    def float32_products(self, op: LinearOp, profile: CpuProfile) -> tuple[Float32Products, ...]:
        plain = op.dtype == "float32" and not op.int8_weights
        return WORDS if plain and tiles.BFLOAT16.is_on(profile) else ()

    def exact_products(self, op: LinearOp, profile: CpuProfile) -> tuple[Float32Products, ...]:
        few = op.row_count is not None and op.row_count < WORTH_SPLITTING["bf16x6"]
        short = op.in_features < SHORTEST or op.out_features < FEWEST
        return () if few or short else ("bf16x6",)

    def search_space(self, op: LinearOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return {"block": (1, 2, 4, 8, 16, 32), "depth": (8, 16, 24, 32, 48)}

    def why_not_config(self, op: LinearOp, profile: CpuProfile, config: Config) -> str | None:
        return unknown_knobs(config, ("block", "depth"))

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        """A block's terms of a pass, 1.2 MB, stay in the second cache while panels pass."""
        return {"block": 8, "depth": 24} if op.in_features <= 24 * DEPTH else {"block": 16, "depth": 12}

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        layout = TermLayout.of(op, profile)
        panels = layout.panels_of_strips
        few_rows = register_tile_config(panels, FEW_ROWS[panels.columns], profile)
        if op.row_count is not None and op.row_count < layout.worth_splitting:
            run = product_function("linear", panels, profile, few_rows)
        else:
            deal = partial(_tasks, few_rows=few_rows)
            rows = partial(split_rows, terms=layout.terms, least=layout.worth_splitting)
            run = product_function("linear", layout, profile, config, rows=rows, product=TermProduct, deal=deal)
        return Emitted(run, pack(panels), layout.packed)


class CpuFloat16TileLinearKernel(CpuFloat32TileLinearKernel):
    """The same of float16, by two terms of each number, which are all of it."""

    name = "cpu.float16_linear_on_tiles"

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        if op.int8_weights or op.dtype != "float16":
            return f"float16, not {'weights in eight bits' if op.int8_weights else op.dtype}"
        if op.row_count is not None and op.row_count < WORTH_SPLITTING_FLOAT16:
            return f"rows from {WORTH_SPLITTING_FLOAT16} on, not {op.row_count}"
        return None if tiles.BFLOAT16.is_on(profile) else "a CPU with amx_bf16"

    def search_space(self, op: LinearOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return {**super().search_space(op, profile), "depth": (_tiles(op),)}

    def why_not_config(self, op: LinearOp, profile: CpuProfile, config: Config) -> str | None:
        if reason := super().why_not_config(op, profile, config):
            return reason
        return None if config["depth"] >= _tiles(op) else "all of K in one pass, since y is rounded once"

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        return {"block": 8, "depth": _tiles(op)}


def _tiles(op: LinearOp) -> int:
    """Those of K."""
    return -(-op.in_features // DEPTH)


@dataclass(frozen=True)
class BlockSums:
    """TOTAL and PART of the tiles of a block."""

    data: Expr

    @staticmethod
    def allocated() -> BlockSums:
        shape = (2 * ROWS * COLUMNS * tiles.ROWS, LANES)
        return BlockSums(T.decl_buffer(shape, "float32", data=vectors.scratch(shape).data))

    def at(self, place: Expr | int, tile: Expr | int, row: Expr | int = 0) -> list[Expr]:
        return [T.int64(0) + (place * (ROWS * COLUMNS) + tile) * tiles.ROWS + row, T.int64(0)]

    def add_part(self, number: int, shares: int, count: int) -> None:
        """Share `number` of adding the part of `count` tiles to the total."""
        for tile in range(number * count // shares, (number + 1) * count // shares):
            for row in range(tiles.ROWS):
                self.add(tile, row)

    def add(self, tile: Expr | int, row: Expr | int) -> None:
        total, part = (self.at(place, tile, row) for place in (TOTAL, PART))
        store(self.data, total, load(self.data, total, LANES) + load(self.data, part, LANES), LANES)


@dataclass(frozen=True)
class TermProduct(Product):
    """What is multiplied by terms, a strip after the other."""

    layout: TermLayout
    rows: TermRows
    config: Config = field(default_factory=dict)

    @property
    def passes(self) -> int:
        """Parts of K that pass over all tasks."""
        return -(-self.layout.tiles // self.config["depth"])

    @property
    def deepest(self) -> int:
        """Tiles of K in a pass, at most."""
        return -(-self.layout.tiles // self.passes)

    @property
    def parts(self) -> int:
        """Chains of sums in a pass."""
        return -(-self.deepest // self.layout.chain)

    def each_part(self, of: Pass, body: Callable[[Expr, Expr, Expr], None]) -> None:
        """body(number, first tile of K, end) for each chain of a pass."""
        size = of.end - of.first
        with T.serial(T.int64(self.parts)) as number:
            start, end = (of.first + T.truncdiv(n * size, T.int64(self.parts)) for n in (number, number + 1))
            body(number, materialize(start), materialize(end))

    def multiply(self, strip: StripTerms, p: Expr, heights: list[Expr], sums: BlockSums, of: Pass) -> None:
        """The sums = a pass's products of tiles of rows and strip p, by terms."""
        count = len(heights) * COLUMNS

        def part(number: Expr, start: Expr, end: Expr) -> None:
            for tile in range(count):
                tiles.zero(tile)
            add_terms = partial(self.add_terms, strip, p, heights, of)
            if self.parts > 2:
                with T.If(number > 1):
                    with T.Then():
                        add_terms(start, lambda i: sums.add_part(i, len(self.layout.pairs), count))
                    with T.Else():
                        add_terms(start)
            with T.serial(start + 1 if self.parts > 2 else start, end) as tile:
                add_terms(tile)
            place = materialize(T.min(number, T.int64(PART)))
            for tile in range(count):
                tiles.store_tile(tile, sums.data, sums.at(place, tile), tiles.ROWS)

        self.each_part(of, part)

    def multiply_plainly(self, p: Expr, height: Expr, sums: BlockSums, of: Pass) -> None:
        """The same for the rows of a height, by products of float32."""
        first = materialize(height * HEIGHT)
        count = materialize(ceil_div(T.min(T.int64(HEIGHT), self.count - first), tiles.ROWS))

        def part(number: Expr, start: Expr, end: Expr) -> None:
            with T.serial(count * (tiles.ROWS // PLAIN_ROWS)) as i:
                rows = [materialize(T.min(first + i * PLAIN_ROWS + r, self.count - 1)) for r in range(PLAIN_ROWS)]
                tile = RegisterTile(PLAIN_ROWS, self.columns)
                tile.fill(0.0)
                self.add_plain(p, rows, tile, (start, end))
                place, row = materialize(T.truncdiv(i, T.int64(4))), materialize(T.truncmod(i, T.int64(4)) * PLAIN_ROWS)
                for r in range(PLAIN_ROWS):
                    for c in range(COLUMNS):
                        with T.If(number > 1), T.Then():
                            sums.add(place + count * c, row + r)
                        at = sums.at(T.min(number, T.int64(PART)), place + count * c, row + r)
                        store(sums.data, at, tile.get(r, c), LANES)

        self.each_part(of, part)

    def add_terms(
        self,
        strip: StripTerms,
        p: Expr,
        heights: list[Expr],
        of: Pass,
        tile: Expr,
        between: Callable[[int], None] | None = None,
    ) -> None:
        """The sums += all products of a tile of K, of tiles of rows and strip p. between(number) comes behind those of
        each pair of terms."""
        layout, held = self.layout, dict[int, tuple[int, int]]()

        def left(r: int, i: int) -> None:
            if held.get(tiles.LEFTS[r]) != (r, i):
                tiles.load_tile(tiles.LEFTS[r], self.rows.data, [heights[r], tile, T.int64(i), T.int64(0)], DEPTH)
            held[tiles.LEFTS[r]] = (r, i)

        def right(c: int, j: int) -> None:
            if held.get(tiles.RIGHTS[c]) != (c, j):
                at = strip.at(tile - of.first, j, column=c)
                tiles.load_tile(tiles.RIGHTS[c], strip.data, at, layout.panel)
            held[tiles.RIGHTS[c]] = (c, j)

        asks = self._asks(strip, p, heights, of, tile)
        share, queue = -(-len(asks) // (len(layout.pairs) * len(heights) * COLUMNS)), iter(asks)
        for number, (i, j) in enumerate(layout.pairs):
            for r, c in itertools.product(range(len(heights)), range(COLUMNS)):
                left(r, i)
                right(c, j)
                tiles.BFLOAT16.product(r + len(heights) * c, tiles.LEFTS[r], tiles.RIGHTS[c])
                for ask in itertools.islice(queue, share):
                    ask()
            if between is not None:
                between(number)

    def _asks(self, strip: StripTerms, p: Expr, heights: list[Expr], of: Pass, tile: Expr) -> list[Callable[[], None]]:
        """What asks for a line each: for those of the next step, and for a share of the next strip, into the second
        cache."""
        layout = self.layout
        lines = layout.terms * tiles.ROWS
        asks: list[Callable[[], None]] = []
        ends = tile + 1 == of.end
        following = materialize(T.Select(ends, of.first, tile + 1))
        for height in heights:
            row = materialize(height + T.Select(ends, T.int64(len(heights)), T.int64(0)))
            asks += [
                partial(vectors.prefetch, self.rows.data, [row, following, T.int64(0), T.int64(n * DEPTH)])
                for n in range(lines)
            ]
        here = materialize(following - of.first)
        asks += [
            partial(vectors.prefetch, strip.data, strip.at(here, word=n, column=c))
            for n, c in itertools.product(range(lines), range(COLUMNS))
        ]
        turns, share = self.lookahead.runs, DEPTH // SHARES
        slot = T.truncmod(T.truncdiv(heights[0], T.int64(ROWS)), T.int64(SHARES))
        size = of.end - of.first
        first = materialize(of.first * DEPTH + T.truncdiv((slot * size + tile - of.first) * share, T.int64(turns)))
        run = materialize(size * (DEPTH // turns))
        for k, column in itertools.product(range(share), range(0, layout.panel, self.lookahead.elements)):
            panel, place = self.layout.place(p + 1, column)
            row = first + (k % turns) * run + k // turns
            asks.append(partial(vectors.prefetch, self.packed[0], [panel, row, place], soon=False))
        return asks

    def add_plain(self, p: Expr, rows: list[Expr], tile: RegisterTile, part: tuple[Expr, Expr]) -> None:
        """The sums of rows += the products of float32 of these tiles of K and of strip p."""
        panel, first = (materialize(index) for index in self.layout.place(p, T.int64(0)))
        end = T.min(part[1] * DEPTH, T.int64(self.layout.op.in_features))
        with T.serial(part[0] * DEPTH, end) as k:
            tile.outer_product(
                lambda r: load_wide(self.rows.x, [rows[r], k], 1),
                lambda c: load_wide(self.packed[0], [panel, k, first + c * LANES], LANES),
            )

    def ask_for_y(self, p: Expr, height: Expr) -> None:
        """Asks for what `write` writes."""
        first = materialize(height * HEIGHT)
        with T.serial(T.min(T.int64(HEIGHT), self.count - first)) as i:
            for offset, _ in self.columns:
                vectors.prefetch(self.y, [first + i, p * self.layout.panel + offset], write=True)

    def write(self, p: Expr, height: Expr, sums: BlockSums, of: Pass) -> None:
        """y[rows of a height, strip p]. The last panel is padded: only its real columns are written."""
        first = materialize(height * HEIGHT)
        rows = materialize(T.min(T.int64(HEIGHT), self.count - first))
        tall = materialize(ceil_div(rows, tiles.ROWS))

        def columns(width: int, column: Expr) -> None:
            with T.serial(rows) as i:
                for c, (offset, lanes) in enumerate(self.columns):
                    tile = T.truncdiv(i, T.int64(tiles.ROWS)) + tall * c
                    places = [
                        sums.at(place, tile, T.truncmod(i, T.int64(tiles.ROWS))) for place in range(min(2, self.parts))
                    ]
                    total, *last = (load(sums.data, place, lanes) for place in places)
                    value, bias = sum(last, total), load(self.packed[1], self.layout.place(p, offset), lanes)
                    if self.passes > 1:
                        bias = T.Select(of.number == self.passes - 1, bias, splat(T.float32(0), lanes))
                    value = let(value + bias)
                    for start, size in vectors.chunks(min(lanes, max(0, width - offset)), lanes):
                        at, piece = [first + i, column + offset + start], vectors.part(value, start, size, lanes)
                        if self.passes > 1:
                            before = load(self.y, at, size)
                            piece = piece + T.Select(of.number > 0, before, splat(T.float32(0), size))
                        store_narrow(self.y, at, piece, size)

        self.real_columns(p, columns)
        with T.If(of.number == self.passes - 1), T.Then():
            self.apply_epilogue(p, first, first + rows)


def _tasks(task: TermProduct, cores: int, config: Config, few_rows: Config) -> None:
    if task.layout.op.row_count is not None:
        return _by_terms(replace(task, config=config), cores)
    with T.If(task.count < task.layout.worth_splitting):
        with T.Then():
            panels = task.layout.panels_of_strips
            plain = Product(
                panels,
                prepared(panels, task.rows.x, task.count, task.rows.size),
                task.packed,
                task.y,
                vectors.chunks(panels.panel, panels.lanes),
                task.count,
                task.lines,
                task.operands,
            )
            tasks(plain, cores, few_rows)
        with T.Else():
            _by_terms(replace(task, config=config), cores)


def _by_terms(task: TermProduct, cores: int) -> None:
    layout, flags = task.layout, task.rows.extraordinary
    tall = materialize(ceil_div(task.count, tiles.ROWS))

    def body(of: Pass, p: Expr, first: Expr, end: Expr) -> None:
        sums, strip = BlockSums.allocated(), StripTerms.allocated(layout, task.deepest)
        extraordinary = materialize(T.cast(strip.split(task.packed[0], p, of), "int32"), "int32")
        tiles.configure(T.min(task.count, T.int64(tiles.ROWS)), right=tiles.RIGHTS)
        with T.serial(first, end) as height:
            pair = [materialize(height * ROWS), materialize(T.min(height * ROWS + 1, tall - 1))]
            task.ask_for_y(p, height)
            flag = extraordinary | flags[pair[0]] | flags[pair[1]]
            with T.If(flag == 0):
                with T.Then(), T.If(pair[0] == pair[1]):
                    with T.Then():
                        task.multiply(strip, p, pair[:1], sums, of)
                    with T.Else():
                        task.multiply(strip, p, pair, sums, of)
                with T.Else():
                    task.multiply_plainly(p, height, sums, of)
            task.write(p, height, sums, of)
        tiles.release()

    heights = materialize(ceil_div(task.count, HEIGHT))
    with T.serial(T.int64(task.passes)) as number:
        ends = [materialize(T.truncdiv(n * layout.tiles, T.int64(task.passes))) for n in (number, number + 1)]
        each_panel(layout.panels, heights, task.config["block"], cores, partial(body, Pass(number, *ends)))

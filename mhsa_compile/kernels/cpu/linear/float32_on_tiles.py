"""Linears of float32 on matrix tiles, by bfloat16 terms, with the products that `spec/float32_products.py` lists for
bf16x6 and bf16x3; of float16, by two terms and all four products of them.

Rows of x are split into tiles of 16 rows by 32 of K, each with its lower terms behind it, so that a step reads lines
that lie side by side: a slab of them at a time, and where K is long a part of it, so that their terms stay in the
second cache while strips of features pass; y takes the sums of such passes. Weights are packed as the kernel of float32
has them: as many bytes come from memory as without terms, and few rows, for which splitting takes too long, are
multiplied in float32.

A task is a strip of 32 features against a block of tiles of rows. It splits CHAIN tiles of K of the strip's weights,
whose terms the first cache holds while all tiles of rows pass over them; the next such part is split among the products
of the last one of these. A tile of rows by two of features takes all products of a step, and a tile that the next
product needs too stays in its register: 13 loads for 12 products, and four tiles in use (linear/tiles.py has why).

A chain of float32 sums drifts, so it ends with its part, and vectors add what it gave to the total while tiles multiply
the next tile of rows. The last part's go to y at once.

What terms would make something else of (units/float32_terms.py) is computed in float32: tiles of rows of which one row
is extraordinary, and parts of a strip that have such a feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from operator import itemgetter

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
    TileRange,
)
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, let, load, materialize, splat, store
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.cpu.units.float32_terms import CHAIN, LANES
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.spec.float32_products import Float32Products

WORDS: tuple[Float32Products, ...] = ("bf16x6", "bf16x3")
ROWS_A_STEP = tiles.ROWS // CHAIN
"""So many rows of sums are settled beside the products of a step."""
FEW_ROWS = {2: 8, 4: 4}
"""Of a register tile by its vectors, where fewer rows than are worth splitting are multiplied in float32."""
SHORTEST, FEWEST = 128, 96
"""Terms of a sum, from which on no call is known to exceed float32's error budget: below, where one term is much larger
than the others, PyTorch's many lanes are more exact than a chain, by terms or not. And features, from which on six
products take less time: 64 are multiplied as long as a number of x is split."""
SHARES, FEW = 16, 8
"""So many tiles of rows ask for all of the next strip; FEW, unless it is known that there are more."""


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
        return {"block": (4, 8, 16, 32, 64), "depth": (8, 16, 24, 32, 48)}

    def why_not_config(self, op: LinearOp, profile: CpuProfile, config: Config) -> str | None:
        return unknown_knobs(config, ("block", "depth"))

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        """A block's terms of a pass, 0.6 MB, stay in the second cache while strips pass."""
        return {"block": 16, "depth": 12}

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        layout = TermLayout.of(op, profile)
        panels = layout.panels_of_strips
        few_rows = register_tile_config(panels, FEW_ROWS[panels.columns], profile)
        if op.row_count is not None and op.row_count < layout.worth_splitting:
            run = product_function("linear", panels, profile, few_rows)
        else:
            deal = partial(_tasks, few_rows=few_rows)
            shape = layout.height(config, profile.hardware.cores), layout.depth(config), layout.terms
            rows = partial(TermRows.allocated, shape=shape)
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

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        """Two terms take less room, and a pass less writes what waits."""
        return {"block": 16, "depth": 24}


@dataclass(frozen=True)
class StripSums:
    """A strip's sums, COLUMNS tiles for each place: a total for each tile of rows of a block, zeros, and the two parts
    of which one is added up while tiles leave the other."""

    data: Expr
    block: int

    @staticmethod
    def allocated(block: int) -> StripSums:
        sums = StripSums(vectors.seen_whole(((block + 3) * COLUMNS * tiles.ROWS, LANES)), block)
        with T.serial(T.int64(COLUMNS * tiles.ROWS)) as row:
            store(sums.data, sums.at(sums.zeros, 0, row), splat(T.float32(0), LANES), LANES)
        return sums

    @property
    def zeros(self) -> Expr:
        return T.int64(self.block)

    def part(self, i: Expr) -> Expr:
        """The place of what tile of rows i of the block leaves."""
        return self.block + 1 + T.truncmod(i, T.int64(2))

    def at(self, place: Expr, column: int, row: Expr | int = 0) -> list[Expr]:
        return [(place * COLUMNS + column) * tiles.ROWS + row, T.int64(0)]

    def add(self, total: Expr, part: Expr, row: Expr) -> None:
        """Adds a row of a part to one of a total."""
        for column in range(COLUMNS):
            at, other = (self.at(place, column, row) for place in (total, part))
            store(self.data, at, load(self.data, at, LANES) + load(self.data, other, LANES), LANES)

    def store(self, place: Expr) -> None:
        """Writes what the tiles hold."""
        for column in range(COLUMNS):
            tiles.store_tile(column, self.data, self.at(place, column), LANES)


@dataclass(frozen=True)
class Unsettled:
    """A tile of rows whose last part is not in its total yet: its first row in y, and the places of both."""

    row: Expr
    total: Expr
    part: Expr


@dataclass(frozen=True)
class TermProduct(Product):
    """What is multiplied by terms, a strip after the other. `waiting` (rows of a slab, N) are the sums of passes, where
    y is narrower than they are."""

    layout: TermLayout
    rows: TermRows
    config: Config = field(default_factory=dict)
    waiting: Expr | None = None

    @property
    def passes(self) -> int:
        """Passes of K over all strips."""
        return self.layout.passes(self.config)

    @property
    def parts(self) -> int:
        """Chains of sums in a pass."""
        return -(-self.layout.depth(self.config) // CHAIN)


Action = Callable[[], None]
"""What is done beside a product."""


@dataclass(frozen=True)
class StripProduct:
    """Strip p of the weights times `count` tiles from `first` on of the rows of a slab, which begins with tile `start`
    of all rows of x; in a pass."""

    task: TermProduct
    of: Pass
    p: Expr
    start: Expr
    first: Expr
    count: Expr
    terms: StripTerms
    sums: StripSums

    @staticmethod
    def of_block(task: TermProduct, of: Pass, p: Expr, rows: tuple[Expr, Expr, Expr]) -> StripProduct:
        start, first, end = rows
        sums, terms = StripSums.allocated(task.config["block"]), StripTerms.allocated(task.layout, task.packed[0], p)
        return StripProduct(task, of, p, start, first, materialize(end - first), terms, sums)

    def part(self, number: Expr) -> TileRange:
        """A chain of the pass."""
        size, parts = self.of.end - self.of.first, T.int64(self.task.parts)
        first, end = (self.of.first + T.truncdiv(n * size, parts) for n in (number, number + 1))
        return TileRange(materialize(first), materialize(end))

    def multiply(self) -> None:
        """The rows of y, or of what this pass adds to them."""
        several = self.task.parts > 1
        self.terms.split(self.part(T.int64(0)))
        with T.serial(T.int64(self.task.parts)) as number:
            part, following = self.part(number), self.part(number + 1)
            extraordinary = self.terms.take_extraordinary()
            is_last, is_added = number == self.task.parts - 1, number > 0 if several else T.bool(True)
            with T.serial(self.count) as i:
                place = materialize(T.Select(is_added, self.sums.part(i), i) if several else self.sums.part(i))
                waits = T.And(is_added, i > 0)
                before = self._unsettled(i - 1, waits)
                flag = extraordinary | self.task.rows.extraordinary[self.first + i]
                ends = T.And(i == self.count - 1, number < self.task.parts - 1)
                with T.If(flag == 0):
                    with T.Then():
                        self._by_tiles(i, part, following, before, writes=T.And(is_last, i > 0), splits=ends)
                        self.sums.store(place)
                    with T.Else():
                        self._plainly(i, part, place)
                        self._settle(before, T.int64(0), T.And(is_last, i > 0))
                        if several:
                            with T.If(ends), T.Then():
                                self.terms.split(following)
            with T.If(is_added), T.Then():
                self._settle(self._unsettled(self.count - 1, T.bool(True)), T.int64(0), is_last)

    def _row(self, i: Expr) -> Expr:
        """The first one of tile of rows i of the block, in x and y."""
        return materialize((self.start + self.first + i) * tiles.ROWS)

    def _unsettled(self, i: Expr, waits: Expr) -> Unsettled:
        """Tile of rows i of the block, or zeros where none waits."""
        places = i, self.sums.part(i + 2)
        total, part = (materialize(T.Select(waits, place, self.sums.zeros)) for place in places)
        return Unsettled(self._row(i), total, part)

    def _by_tiles(
        self, i: Expr, part: TileRange, following: TileRange, before: Unsettled, *, writes: Expr, splits: Expr
    ) -> None:
        """The tiles = tile of rows i times a part. Beside that the tile of rows before is settled, in y if that
        `writes`; and the part that follows this one is split if this one `splits`."""
        height = materialize(self.first + i)
        for column in range(COLUMNS):
            tiles.zero(column)

        def rows(k: Expr) -> list[Expr]:
            return [materialize((k - part.first) * ROWS_A_STEP + r) for r in range(ROWS_A_STEP)]

        def written(k: Expr) -> list[list[Action]]:
            asks = self._asks_for_y(self._row(i), rows(k))
            return [[partial(self._write, before, [row]) for row in rows(k)], self._asks(i, k), asks]

        def added(k: Expr) -> list[list[Action]]:
            return [[partial(self.sums.add, before.total, before.part, row) for row in rows(k)], self._asks(i, k)]

        def added_and_split(k: Expr) -> list[list[Action]]:
            return [*added(k), self.terms.splits(following, k - part.first - 1)]

        settled = materialize((part.end - part.first) * ROWS_A_STEP)
        with T.If(writes):
            with T.Then():
                self._products(height, part, (part.first, part.end), written)
                self._settle(before, settled, T.bool(True))
            with T.Else():
                if self.task.parts == 1:
                    self._products(height, part, (part.first, part.end), lambda k: [self._asks(i, k)])
                    return
                with T.If(T.And(splits, following.end <= self.terms.whole)):
                    with T.Then():
                        self._products(height, part, (part.first, part.first + 1), added)
                        self._products(height, part, (part.first + 1, part.end), added_and_split)
                        self.terms.split(following, part.end - part.first - 1)
                    with T.Else():
                        self._products(height, part, (part.first, part.end), added)
                        with T.If(splits), T.Then():
                            self.terms.split(following)
                self._settle(before, settled, T.bool(False))

    def _products(
        self, height: Expr, part: TileRange, steps: tuple[Expr, Expr], beside: Callable[[Expr], list[list[Action]]]
    ) -> None:
        """The tiles += all products of these tiles of K, and, evenly among those of each, lists of what is done beside
        them."""
        pairs = self.task.layout.pairs
        with T.serial(*steps) as k:
            actions = [(n / len(some), action) for some in beside(k) for n, action in enumerate(some)]
            queue = iter([action for _, action in sorted(actions, key=itemgetter(0))])
            left, right = -1, (-1, -1)
            for number, (i, j) in enumerate(pairs):
                if left != i:
                    at = [height, k - self.of.first, T.int64(i), T.int64(0)]
                    tiles.stream_tile(tiles.LEFT, self.task.rows.data, at, DEPTH)
                for column in (0, 1) if number % 2 == 0 else (1, 0):
                    if right != (column, j):
                        self.terms.load(tiles.RIGHT, k - part.first, j, column)
                    tiles.BFLOAT16.product(column, tiles.LEFT, tiles.RIGHT)
                    left, right = i, (column, j)
                    for action in islice(queue, -(-len(actions) // (len(pairs) * COLUMNS))):
                        action()

    def _plainly(self, i: Expr, part: TileRange, place: Expr) -> None:
        """The sums of a tile of rows by products of float32."""
        layout, x, weights = self.task.layout, self.task.rows.x, self.task.packed[0]
        panel, column = (materialize(index) for index in layout.place(self.p, T.int64(0)))
        end = materialize(T.min(part.end * DEPTH, T.int64(layout.op.in_features)))
        own = self._row(i)
        count = ceil_div(T.min(T.int64(tiles.ROWS), self.task.count - own), PLAIN_ROWS)
        with T.serial(materialize(count)) as n:
            first = materialize(own + n * PLAIN_ROWS)
            rows = [materialize(T.min(first + r, self.task.count - 1)) for r in range(PLAIN_ROWS)]
            tile = RegisterTile(PLAIN_ROWS, self.task.columns)
            tile.fill(0.0)
            with T.serial(part.first * DEPTH, end) as k:
                tile.outer_product(
                    lambda r: load_wide(x, [rows[r], k], 1),
                    lambda c: load_wide(weights, [panel, k, column + c * LANES], LANES),
                )
            for r, c in product(range(PLAIN_ROWS), range(COLUMNS)):
                store(self.sums.data, self.sums.at(place, c, n * PLAIN_ROWS + r), tile.get(r, c), LANES)

    def _asks(self, i: Expr, k: Expr) -> list[Action]:
        """What asks for tile of rows i's share of the next strip, beside tile k of K, a line each."""
        layout, lookahead = self.task.layout, self.task.lookahead
        rows = layout.op.row_count
        shares = SHARES if rows is not None and rows > FEW * tiles.ROWS else FEW
        turns, share = lookahead.runs, DEPTH // shares
        size, slot = self.of.end - self.of.first, T.truncmod(i, T.int64(shares))
        number = materialize((slot * size + k - self.of.first) * share)
        run = materialize(T.truncdiv(size * DEPTH, T.int64(turns)))
        actions: list[Action] = []
        for n, column in product(range(share), range(0, layout.panel, lookahead.elements)):
            panel, place = layout.place(self.p + 1, column)
            row = self.of.first * DEPTH + vectors.in_turn(number + n, turns, run)
            actions.append(partial(vectors.prefetch, self.task.packed[0], [panel, row, place], soon=False))
        return actions

    def _asks_for_y(self, first: Expr, rows: list[Expr]) -> list[Action]:
        """The same for rows of y behind a first one, which are written next."""
        y, column = self.task.y, self.p * self.task.layout.panel
        return [
            partial(vectors.prefetch, y, [first + row, column + offset], write=True)
            for row, (offset, _) in product(rows, self.task.columns)
        ]

    def _settle(self, tile: Unsettled, begin: Expr, writes: Expr) -> None:
        """Adds a tile's part to its total, from row `begin` on, and writes y if that was the last one."""
        with T.If(writes):
            with T.Then(), T.serial(begin, T.min(T.int64(tiles.ROWS), self.task.count - tile.row)) as row:
                self._write(tile, [row])
            with T.Else(), T.serial(begin, T.int64(tiles.ROWS)) as row:
                self.sums.add(tile.total, tile.part, row)

    def _write(self, tile: Unsettled, rows: list[Expr]) -> None:
        """y[these rows of a tile, strip p], one behind the other; and the epilogue, if this pass is the only one. Of
        the last strip only its real columns are written."""
        task, number = self.task, self.of.number
        places = (tile.part,) if task.parts == 1 else (tile.total, tile.part)

        def value(row: Expr, c: int, lanes: int) -> Expr:
            total, *last = (load(self.sums.data, self.sums.at(place, c, row), lanes) for place in places)
            bias = load(task.packed[1], task.layout.place(self.p, c * LANES), lanes)
            if task.passes > 1:
                bias = T.Select(number == task.passes - 1, bias, splat(T.float32(0), lanes))
            return let(sum(last, total) + bias)

        def columns(width: int, column: Expr) -> None:
            for row, (c, (offset, lanes)) in product(rows, enumerate(task.columns)):
                whole = value(row, c, lanes)
                for start, size in vectors.chunks(min(lanes, max(0, width - offset)), lanes):
                    at, piece = [tile.row + row, column + offset + start], vectors.part(whole, start, size, lanes)
                    self._write_piece(at, piece, size)

        task.real_columns(self.p, columns)
        if task.passes == 1:
            task.apply_epilogue(self.p, tile.row + rows[0], tile.row + rows[-1] + 1)

    def _write_piece(self, at: list[Expr], piece: Expr, size: int) -> None:
        """Some of y, where the sums of the passes before are added; these wait where y has too few bits for them."""
        task, number = self.task, self.of.number
        if task.passes == 1:
            store_narrow(task.y, at, piece, size)
            return
        waiting = (task.y, at) if task.waiting is None else (task.waiting, [at[0] - self.start * tiles.ROWS, at[1]])
        piece = let(piece + T.Select(number > 0, load(*waiting, size), splat(T.float32(0), size)))
        if task.waiting is None:
            store(*waiting, piece, size)
            return
        with T.If(number == task.passes - 1):
            with T.Then():
                store_narrow(task.y, at, piece, size)
            with T.Else():
                store(*waiting, piece, size)


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
    """Rows, a slab after another: their terms of a part of K are written, and stay in the second cache while strips
    pass."""
    layout, tall = task.layout, materialize(ceil_div(task.count, tiles.ROWS))
    height = T.int64(layout.height(task.config, cores))
    if layout.is_half and task.passes > 1:
        shape = (height * tiles.ROWS, T.int64(layout.op.pitch))
        task = replace(task, waiting=T.alloc_buffer(shape, "float32"))
    with T.serial(materialize(ceil_div(tall, height))) as slab, T.serial(T.int64(task.passes)) as number:
        start = materialize(slab * height)
        first, last = (materialize(T.truncdiv(n * layout.tiles, T.int64(task.passes))) for n in (number, number + 1))
        of = Pass(first, last, number)
        count = materialize(T.min(height, tall - start))
        task.rows.split(start, start + count, of)

        def body(p: Expr, first: Expr, end: Expr) -> None:
            strip = StripProduct.of_block(task, of, p, (start, first, end))
            tiles.configure(T.min(task.count, T.int64(tiles.ROWS)))
            strip.multiply()
            tiles.release()
            if task.passes > 1:
                with T.If(number == task.passes - 1), T.Then():
                    task.apply_epilogue(p, (start + first) * tiles.ROWS, (start + end) * tiles.ROWS)

        each_panel(layout.panels, count, task.config["block"], cores, body)

"""Linears on matrix tiles: a tile of rows by two of features, K in parts whose share of the weights the first cache
holds.

A task is a panel of 32 features against a block of rows of x. A group of tiles of rows passes over each part of K; what
is summed up waits in a scratch, which the first cache holds as well, until the next part adds to it. Rows of y are
written while the next tile of rows is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.linear.activations import PackedRows, copy_row, prepared
from mhsa_compile.kernels.cpu.linear.kernel import product_function
from mhsa_compile.kernels.cpu.linear.microkernel import Product, each_panel
from mhsa_compile.kernels.cpu.linear.pack_weights import pack
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout, format_of
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import let, load, materialize, store
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.cpu.units.tiles import Tiles
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp

COLUMNS = 2
"""Tiles of the sums, of one tile of rows. Where another thread of the core multiplies as well, a tile that is loaded
waits the longer the more tiles hold something: with four of them loads take half the time that they take with eight."""
SHARES, FEW = 16, 8
"""So many tiles of rows ask for all of the next panel, each at every step for as many lines as that takes; FEW, unless
it is known that there are more."""


class CpuTileLinearKernel:
    """Packed-weight matrix product on tiles of bfloat16, or of float16 where the CPU has such."""

    name = "cpu.linear_on_tiles"
    op_type: type[LinearOp] = LinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        if op.int8_weights or op.dtype == "float32":
            return f"numbers of 16 bits, not {'weights in eight' if op.int8_weights else op.dtype}"
        unit = tiles.unit_of(op.dtype)
        return None if unit.is_on(profile) else f"a CPU with {unit.feature}"

    def layout(self, op: LinearOp) -> TileLayout:
        return TileLayout(op, format_of(op), tiles.unit_of(op.dtype), COLUMNS)

    def search_space(self, op: LinearOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return {"block": (4, 8, 16, 32, 64), "depth": (4, 8, 12, 16, 24, 48), "group": (1, 2, 4, 8)}

    def why_not_config(self, op: LinearOp, profile: CpuProfile, config: Config) -> str | None:
        return unknown_knobs(config, ("block", "depth", "group"))

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        """Rows of x that the second cache holds beside the weights; parts of K and sums that the first one does."""
        row_bytes = self.layout(op).tiles * tiles.ROW_BYTES
        block = profile.hardware.l2_kib * 1024 * 3 // 8 // (tiles.ROWS * row_bytes)
        return {"block": max(4, min(32, block)), "depth": 12, "group": 8}

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        layout = self.layout(op)
        run = product_function("linear", layout, profile, config, rows=rows_of_lines, product=TileProduct, deal=deal)
        return Emitted(run, pack(layout), layout.packed)


@dataclass(frozen=True)
class TileLayout(PackedLayout):
    """Steps along K fill whole tiles."""

    unit: Tiles

    @property
    def steps(self) -> int:
        return self.tiles * tiles.WORDS

    @property
    def pitch(self) -> int:
        """An odd number of cache lines: sixteen rows then lie in sixteen different sets of the first cache."""
        return (self.tiles | 1) * tiles.WORDS * self.unit.group

    @property
    def has_one_tile_of_rows(self) -> bool:
        """Whether the rows of x are known to be so few; the first cache then has them for all panels."""
        return self.op.row_count is not None and self.op.row_count <= tiles.ROWS

    @property
    def shares(self) -> int:
        """How many tiles of rows ask for the next panel."""
        count = self.op.row_count
        return SHARES if count is not None and count > FEW * tiles.ROWS else FEW

    @property
    def tiles(self) -> int:
        """Those of K."""
        return -(-self.op.in_features // (tiles.WORDS * self.unit.group))


def rows_of_lines(layout: PackedLayout, x: Expr, count: Expr, size: Expr) -> PackedRows:
    """The rows of x (count, K), after the loop that copies them if they begin within cache lines, as NumPy's do."""
    rows = prepared(layout, x, count, size)
    if not rows.data.same_as(x):
        return rows
    copy = PackedRows(layout, T.alloc_buffer((size, T.int64(layout.op.in_features)), "uint16"))
    is_copied = tiles.crosses_lines(x, [T.int64(0), T.int64(0)])
    with T.If(is_copied), T.Then(), T.parallel(count) as row:
        copy_row(copy, x, row, row)
    return PackedRows(layout, tiles.either(is_copied, copy.data, x))


@dataclass(frozen=True)
class Sums:
    """Those of a group of tiles of rows, each of them COLUMNS tiles."""

    data: Expr

    @staticmethod
    def of(group: int) -> Sums:
        return Sums(vectors.seen_whole((COLUMNS, group * tiles.ROWS * tiles.ROWS)))

    def at(self, place: Expr, column: int, row: Expr | int = 0) -> list[Expr]:
        """Row `row` of tile `place` of the group."""
        return [T.int64(column), place * (tiles.ROWS * tiles.ROWS) + row * tiles.ROWS]

    def load(self, place: Expr) -> None:
        for column in range(COLUMNS):
            tiles.load_tile(column, self.data, self.at(place, column), tiles.ROWS)

    def store(self, place: Expr) -> None:
        for column in range(COLUMNS):
            tiles.store_tile(column, self.data, self.at(place, column), tiles.ROWS)


@dataclass(frozen=True)
class TileProduct(Product):
    """What is multiplied by tiles."""

    layout: TileLayout

    def load_rows(self, start: Expr, k: Expr) -> None:
        """Tile k of K of the rows from `start` on."""
        x = self.rows.data
        load_tile = tiles.load_tile if self.layout.has_one_tile_of_rows else tiles.stream_tile
        load_tile(tiles.LEFT, x, [start, materialize(k * self.layout.unit.depth)], int(x.shape[1]))

    def products(
        self, p: Expr, start: Expr, first: Expr, end: Expr, behind: Callable[[Expr], None] = lambda k: None
    ) -> None:
        """C += x[start ..., tiles first .. end of K] times those of panel p, and behind(k) after each tile of K."""
        layout = self.layout
        with T.serial(first, end) as k:
            self.load_rows(start, k)
            for c in range(layout.columns):
                at = [p, k * tiles.WORDS, T.int64(c * layout.lanes)]
                tiles.load_tile(tiles.RIGHT, self.packed[0], at, layout.panel)
                layout.unit.product(c, tiles.LEFT, tiles.RIGHT)
            self.ask_ahead(p, start, k)
            behind(k)

    def ask_ahead(self, p: Expr, start: Expr, k: Expr) -> None:
        """Asks for what a tile of rows has to of the weights behind panel p, beside tile k of K."""
        layout = self.layout
        if layout.has_one_tile_of_rows and self.pages > 1:
            self.lookahead.ask_beyond(p, k * tiles.WORDS, tiles.WORDS)
            return
        shares = layout.shares
        lines = layout.columns * tiles.ROWS // shares
        share = T.truncmod(T.truncdiv(start, T.int64(tiles.ROWS)), T.int64(shares))
        self.lookahead.ask_for_panel(p + 1, (share * layout.tiles + k) * lines, lines, soon=False)

    def start(self, own: Expr) -> Expr:
        """The first row of a tile: the last one moves back so far that it is whole, and begins with rows of others."""
        return T.min(own, T.max(T.int64(0), self.count - tiles.ROWS))

    def settle(self, is_whole: Expr, p: Expr, own: Expr, sums: Sums, place: Expr) -> None:
        """What the sums of a tile of rows need before they are written, where they are whole: nothing."""

    def write(self, p: Expr, start: Expr, sums: Sums, place: Expr, rows: Sequence[Expr]) -> None:
        """y[start + row, panel p] of `rows` of a tile, one behind the other, and the epilogue. Of the last panel only
        its real columns are written."""

        def columns(width: int, column: Expr) -> None:
            for i in rows:
                row = materialize(start + i)
                values = [
                    let(self.result(load(sums.data, sums.at(place, c, i), lanes), row, p, c))
                    for c, (_, lanes) in enumerate(self.columns)
                ]
                if width == self.layout.panel:
                    self.store_whole(row, column, values)
                    continue
                for c, value in enumerate(values):
                    self.write_vector(row, column, c, value, width)

        self.real_columns(p, columns)
        self.apply_epilogue(p, start + rows[0], start + rows[-1] + 1)

    def store_whole(self, row: Expr, column: Expr, values: list[Expr]) -> None:
        """Two vectors of float32, side by side in y."""
        dtype = self.layout.op.dtype
        if dtype == "bfloat16":
            pair = T.reinterpret("bfloat16x32", tiles.narrowed_pair(*values))
            store(self.y, [row, column], pair, 2 * tiles.WORDS)
            return
        for value, (offset, lanes) in zip(values, self.columns, strict=True):
            store(self.y, [row, column + offset], T.cast(value, vectors.vector_type(dtype, lanes)), lanes)


def deal(task: TileProduct, cores: int, config: Config) -> None:
    """Deals panels and blocks of tiles of rows to the threads."""
    count = materialize(ceil_div(task.count, tiles.ROWS))
    each_panel(task.layout.panels, count, config["block"], cores, partial(_task, task, config))


def _task(task: TileProduct, config: Config, p: Expr, first: Expr, end: Expr) -> None:
    """Panel p times tiles first .. end of the rows of x."""
    group, layout = config["group"], task.layout
    parts = -(-layout.tiles // config["depth"])
    depth = -(-layout.tiles // parts)
    last = layout.tiles - (parts - 1) * depth
    steps = 1 << min(tiles.ROWS, last).bit_length() - 1  # a power of two of them, each with its share of y's rows
    share = tiles.ROWS // steps
    sums = Sums.of(group)
    tiles.configure(T.min(task.count, T.int64(tiles.ROWS)))
    with T.serial(ceil_div(end - first, group)) as g:
        begin = materialize(first + g * group)
        full = materialize(T.min(end - begin, T.int64(group)))
        with T.serial(T.int64(parts)) as number:
            since = materialize(number * depth)
            until = materialize(T.min(since + depth, T.int64(layout.tiles)))
            is_last = number == parts - 1
            with T.serial(full) as i:
                own = materialize((begin + i) * tiles.ROWS)
                start = materialize(task.start(own))

                def behind(k: Expr) -> None:
                    rows = [materialize((k - since) * share + r) for r in range(share)]
                    task.write(p, own - tiles.ROWS, sums, i - 1, rows)

                with T.If(number > 0):
                    with T.Then():
                        sums.load(i)
                    with T.Else():
                        for column in range(COLUMNS):
                            tiles.zero(column)
                middle = since
                if not layout.has_one_tile_of_rows:
                    middle = materialize(since + T.Select(T.And(is_last, i > 0), T.int64(steps), T.int64(0)))
                    task.products(p, start, since, middle, behind)
                task.products(p, start, middle, until)
                sums.store(i)
                task.settle(is_last, p, own, sums, i)
        own = materialize((begin + full - 1) * tiles.ROWS)
        start = materialize(task.start(own))
        with T.serial(materialize(own - start), materialize(T.min(T.int64(tiles.ROWS), task.count - start))) as row:
            task.write(p, start, sums, full - 1, [row])
    tiles.release()

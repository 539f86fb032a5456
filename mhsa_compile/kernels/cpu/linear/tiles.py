"""Linears on matrix tiles: a tile of rows by two of features, K in parts whose share of the weights the first cache
holds.

A task is a panel of 32 features against a block of rows of x. A group of tiles of rows passes over each part of K; what
is summed up waits in a scratch, which the first cache holds as well, until the next part adds to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.formats.choice import store_narrow
from mhsa_compile.kernels.cpu.linear.kernel import product_function
from mhsa_compile.kernels.cpu.linear.microkernel import Product
from mhsa_compile.kernels.cpu.linear.pack_weights import pack
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout, format_of
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import let, load, materialize
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.cpu.units.tiles import Tiles
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp

ROWS, COLUMNS = 1, 2
"""Tiles of the sums. Where another thread of the core multiplies as well, a tile that is loaded waits the longer the
more tiles hold something: with four of them loads take half the time that they take with eight."""
HEIGHT = ROWS * tiles.ROWS
SHARES = 16
"""So many blocks of rows ask for all of the next panel: at each step for a line of each tile of it."""


class CpuTileLinearKernel:
    """Packed-weight matrix product on tiles of bfloat16."""

    name = "cpu.linear_on_tiles"
    op_type: type[LinearOp] = LinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        if op.int8_weights or op.dtype != "bfloat16":
            return f"bfloat16, not {'weights in eight bits' if op.int8_weights else op.dtype}"
        if not tiles.BFLOAT16.is_on(profile):
            return "a CPU with amx_bf16"
        return None

    def layout(self, op: LinearOp) -> TileLayout:
        return TileLayout(op, format_of(op), tiles.BFLOAT16, COLUMNS)

    def search_space(self, op: LinearOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return {"block": (4, 8, 16, 32, 64), "depth": (4, 8, 12, 16, 24, 48), "group": (1, 2, 4, 8)}

    def why_not_config(self, op: LinearOp, profile: CpuProfile, config: Config) -> str | None:
        return unknown_knobs(config, ("block", "depth", "group"))

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        """Rows of x that the second cache holds beside the weights; parts of K and sums that the first one does."""
        row_bytes = self.layout(op).tiles * tiles.ROW_BYTES
        block = profile.hardware.l2_kib * 1024 * 3 // 8 // (HEIGHT * row_bytes)
        return {"block": max(4, min(32, block)), "depth": 12, "group": 8}

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        layout = self.layout(op)
        run = product_function("linear", layout, profile, config, product=TileProduct, deal=_tasks)
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
    def tiles(self) -> int:
        """Those of K."""
        return -(-self.op.in_features // (tiles.WORDS * self.unit.group))


@dataclass(frozen=True)
class Sums:
    """Tiles of sums of a group of blocks."""

    data: Expr

    @staticmethod
    def of(group: int) -> Sums:
        shape = (ROWS * COLUMNS, group * tiles.ROWS * tiles.ROWS)
        return Sums(T.decl_buffer(shape, "float32", data=T.alloc_buffer(shape, "float32").data))

    def at(self, block: Expr | int, tile: Expr | int, row: Expr | int = 0) -> list[Expr]:
        """Row `row` of a tile of sums."""
        return [T.int64(tile) if isinstance(tile, int) else tile, block * (tiles.ROWS * tiles.ROWS) + row * tiles.ROWS]

    def load(self, block: Expr, rows: int) -> None:
        for tile in range(rows * COLUMNS):
            tiles.load_tile(tile, self.data, self.at(block, tile), tiles.ROWS)

    def store(self, block: Expr | int, rows: int) -> None:
        for tile in range(rows * COLUMNS):
            tiles.store_tile(tile, self.data, self.at(block, tile), tiles.ROWS)


@dataclass(frozen=True)
class TileProduct(Product):
    """What is multiplied by tiles."""

    layout: TileLayout

    def products(
        self,
        p: Expr,
        starts: list[Expr],
        first: Expr,
        end: Expr,
        behind: Callable[[Expr], None] = lambda k: None,
    ) -> None:
        """C += x[starts ..., tiles first .. end of K] times those of panel p, and behind(k) after each tile of K."""
        layout, unit, x = self.layout, self.layout.unit, self.rows.data
        width = int(x.shape[1])
        with T.serial(first, end) as k:
            term = materialize(k * unit.depth)

            def left(r: int) -> None:
                tiles.load_tile(tiles.LEFT, x, [starts[r], term], width)

            def right(c: int) -> None:
                at = [p, k * tiles.WORDS, T.int64(c * layout.lanes)]
                tiles.load_tile(tiles.RIGHT, self.packed[0], at, layout.panel)

            unit.add_block(len(starts), layout.columns, left, right)
            # A block of rows asks for its share of the panel after this one.
            block = T.truncdiv(starts[0], T.int64(len(starts) * tiles.ROWS))
            slot = T.truncmod(block, T.int64(SHARES)) * layout.tiles + k
            self._ask((p + 1) * (layout.words * layout.panel) + slot * (layout.columns * self._line), layout.columns)
            behind(k)

    def write(self, p: Expr, own: Expr, starts: list[Expr], sums: Sums, block: Expr) -> None:
        """y[own ..., panel p] of a block's sums, of which some rows, up to `own`, are another block's. The last panel
        is padded: only its real columns are written."""
        panel = self.layout.panel
        whole, rest = divmod(self.layout.op.out_features, panel)

        def columns(width: int, column: Expr, r: int) -> None:
            first = starts[r]
            begin = materialize(T.min(T.int64(tiles.ROWS), own + tiles.ROWS * r - first))
            end = materialize(T.min(T.int64(tiles.ROWS), self.count - first))
            with T.serial(begin, end) as i:
                row = materialize(first + i)
                for c, (offset, lanes) in enumerate(self.columns):
                    value = load(sums.data, sums.at(block, r + len(starts) * c, i), lanes)
                    value = let(self.result(value, row, p, c))
                    if width >= offset + lanes:
                        vectors.store(self.y, [row, column + offset], tiles.narrowed(value), lanes)
                        continue
                    for start, size in vectors.chunks(min(lanes, max(0, width - offset)), lanes):
                        piece = vectors.part(value, start, size, lanes)
                        store_narrow(self.y, [row, column + offset + start], piece, size)

        for r in range(len(starts)):
            if rest == 0:
                columns(panel, p * panel, r)
                continue
            with T.If(p < whole):
                with T.Then():
                    columns(panel, p * panel, r)
                with T.Else():
                    columns(rest, T.int64(whole * panel), r)


def _tasks(task: TileProduct, cores: int, config: Config) -> None:
    each_panel(task, HEIGHT, cores, config, lambda p, first, end: _task(task, config, p, first, end))


def each_panel(
    task: Product, height: int, cores: int, config: Config, body: Callable[[Expr, Expr, Expr], None]
) -> None:
    """Deals panels and blocks of rows to the threads: body(panel, first, end), in heights of so many rows."""
    panels = T.int64(task.layout.panels)
    heights = materialize(ceil_div(task.count, height))
    fair = cores // gcd(cores, task.layout.panels)
    wanted = materialize(ceil_div(ceil_div(heights, config["block"]), fair) * fair)
    blocks = materialize(T.max(T.int64(1), T.min(heights, wanted)))
    with T.parallel(blocks * panels) as index:
        # Panel after panel: a thread goes on with the same rows of x, which its cache still has.
        p = materialize(T.truncmod(index, panels))
        block = materialize(T.truncdiv(index, panels))
        first = materialize(T.truncdiv(block * heights, blocks))
        end = materialize(T.truncdiv((block + 1) * heights, blocks))
        body(p, first, end)


def _task(task: TileProduct, config: Config, p: Expr, first: Expr, end: Expr) -> None:
    group = config["group"]
    parts = -(-task.layout.tiles // config["depth"])
    depth = -(-task.layout.tiles // parts)
    sums, count = Sums.of(group), task.count
    tiles.configure(T.min(count, T.int64(tiles.ROWS)))

    def body(rows: int) -> None:
        with T.serial(ceil_div(end - first, group)) as g:
            begin = materialize(first + g * group)
            full = materialize(T.min(end - begin, T.int64(group)))
            with T.serial(T.int64(parts)) as number:
                start = materialize(number * depth)
                stop = materialize(T.min(start + depth, T.int64(task.layout.tiles)))
                with T.serial(full) as i:
                    own = materialize((begin + i) * HEIGHT)
                    # The last tiles move back so far that they are whole: their first rows are others', too.
                    last = materialize(T.max(T.int64(0), count - tiles.ROWS))
                    starts = [materialize(T.min(own + tiles.ROWS * r, last)) for r in range(rows)]
                    with T.If(number > 0):
                        with T.Then():
                            sums.load(i, rows)
                        with T.Else():
                            for tile in range(rows * COLUMNS):
                                tiles.zero(tile)
                    task.products(p, starts, start, stop)
                    sums.store(i, rows)
                    with T.If(number == parts - 1), T.Then():
                        task.write(p, own, starts, sums, i)
            task.apply_epilogue(p, begin * HEIGHT, (begin + full) * HEIGHT)

    with T.If(count > tiles.ROWS):
        with T.Then():
            body(ROWS)
        with T.Else():
            body(1)
    tiles.release()

"""Linears in eight bits on matrix tiles: of a file's bytes, and of rows of x that are rounded by their own scale.

Weights are packed as signed bytes, and x goes in as it comes: the unit takes either sign of it. Sums are whole numbers,
so all of K is one of them.

A task is some panels of the weights against some tiles of rows, block after block. While the unit multiplies a block,
the vectors make y of the sums of the block before, and ask for the cache lines that this one will be written to: bytes
are multiplied so fast that this would take as long as the products.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.formats.choice import FORMATS
from mhsa_compile.kernels.cpu.linear.kernel import MOST_INT8_TERMS, product_function
from mhsa_compile.kernels.cpu.linear.pack_weights import pack
from mhsa_compile.kernels.cpu.linear.quantised import MOST_TERMS, LayoutOfBytes, ProductOfBytes, linear_of_bytes
from mhsa_compile.kernels.cpu.linear.tiles import COLUMNS, TileLayout, TileProduct
from mhsa_compile.kernels.cpu.simd.vectors import let, load, materialize, prefetch, seen_whole
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp, QuantisedLinearOp

SIDE = 4 * tiles.ROWS * tiles.ROWS
"""Sums of a column of tiles from one of the two places to the other."""


class CpuTileInt8LinearKernel:
    """Packed-weight matrix product on tiles of bytes, of floats that are rounded row by row."""

    name = "cpu.linear_int8_on_tiles"
    op_type: type[LinearOp] = LinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        if not op.int8_weights:
            return f"weights in eight bits, not {op.dtype}"
        return _why_not(op, profile, MOST_INT8_TERMS)

    def layout(self, op: LinearOp) -> TileLayout:
        return TileLayout(op, FORMATS["int8"], tiles.SIGNED_BYTES, COLUMNS)

    def search_space(self, op: LinearOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        return {"height": (4, 8, 16, 32, 64), "blocks": (8, 16, 32, 64)}

    def why_not_config(self, op: LinearOp, profile: CpuProfile, config: Config) -> str | None:
        return unknown_knobs(config, ("height", "blocks"))

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        """Rows of x that the second cache holds beside the weights; products enough that the last block, whose y comes
        behind all of them, is a small part."""
        height = profile.hardware.l2_kib * 1024 * 3 // 8 // (self.layout(op).pitch * tiles.ROWS)
        return {"height": max(1, min(32, height)), "blocks": 32}

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        layout = self.layout(op)
        run = product_function("linear", layout, profile, config, product=_OverlappedProduct, deal=_tasks)
        return Emitted(run, pack(layout), layout.packed)


class CpuTileQuantisedLinearKernel(CpuTileInt8LinearKernel):
    """A linear of bytes that a file stores, on the same tiles."""

    name = "cpu.linear_of_bytes_on_tiles"
    op_type = QuantisedLinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        return _why_not(op, profile, MOST_TERMS)

    def layout(self, op: LinearOp) -> _TileLayoutOfBytes:
        assert isinstance(op, QuantisedLinearOp)
        unit = tiles.UNSIGNED_BYTES if op.x_dtype == "uint8" else tiles.SIGNED_BYTES
        return _TileLayoutOfBytes(op, FORMATS["int8"], unit, COLUMNS)

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        return linear_of_bytes(self.layout(op), profile, config, _ProductOfBytes, _tasks)


FEWEST = 5
"""Rows. With fewer vectors are up to 1.3 times as fast where weights come from the third cache, else as fast."""


def _why_not(op: LinearOp, profile: CpuProfile, terms: int) -> str | None:
    if op.row_count is not None and op.row_count < FEWEST:
        return f"rows from {FEWEST} on, not {op.row_count}"
    if op.in_features > terms:
        return f"sums of products of bytes up to {terms} terms, not {op.in_features}"
    return None if tiles.SIGNED_BYTES.is_on(profile) else "a CPU with amx_int8"


class _TileLayoutOfBytes(TileLayout, LayoutOfBytes):
    """Words of four bytes in whole tiles."""


@dataclass(frozen=True)
class _BlockOfSums:
    """A block of the product, panel p times rows from `own` on; its sums are number `side` of two."""

    p: Expr
    own: Expr
    side: Expr

    def sums(self, column: int, i: Expr) -> list[Expr]:
        """Where those of row `own` + i begin. Tiles that moved back reach up to a tile before the first row."""
        return [T.int64(column), self.side * SIDE + (tiles.ROWS + i) * tiles.ROWS]


@dataclass(frozen=True)
class _OverlappedProduct(TileProduct):
    def write_rows(self, block: _BlockOfSums, sums: Expr, features: list[list[Expr]], first: Expr, end: Expr) -> None:
        """Rows first .. end of a block of y, of its sums: of the last panel the real columns alone."""

        def columns(width: int, column: Expr) -> None:
            with T.serial(first, end) as i:
                row = materialize(block.own + i)
                for c, (_, lanes) in enumerate(self.columns):
                    value = let(self.scaled(load(sums, block.sums(c, i), lanes), row, features[c], lanes))
                    self.write_vector(row, column, c, value, width)

        self.real_columns(block.p, columns)
        self.apply_epilogue(block.p, block.own + first, block.own + end)

    def ask_for_y(self, block: _BlockOfSums, first: Expr, rows: int) -> None:
        for i in range(rows):
            for offset, _ in self.columns:
                place = [block.own + first + i, block.p * self.layout.panel + offset]
                prefetch(self.y, place, write=True)


@dataclass(frozen=True)
class _ProductOfBytes(_OverlappedProduct, ProductOfBytes):
    pass


def _tasks(task: _OverlappedProduct, cores: int, config: Config) -> None:
    """Deals panels and blocks of rows to the threads: a task has up to `height` blocks of rows, and panels until it has
    `blocks` of the product, if that leaves a task for each thread."""
    count, panels = task.count, task.layout.panels
    heights = materialize(ceil_div(count, tiles.ROWS))
    fair = cores // gcd(cores, panels)
    tasks = materialize(ceil_div(ceil_div(heights, config["height"]), fair) * fair)
    parts = materialize(T.min(heights, tasks))  # none of no rows
    high = T.truncdiv(heights, T.max(T.int64(1), parts))
    width = materialize(ceil_div(T.int64(config["blocks"]), T.max(T.int64(1), high)))
    shared = materialize(ceil_div(ceil_div(T.int64(panels), width), cores) * cores)
    strips = materialize(T.min(T.int64(panels), shared))
    with T.parallel(parts * strips) as index:
        # Strip after strip: a thread goes on with the same rows of x, which its cache still has.
        strip = materialize(T.truncmod(index, strips))
        part = materialize(T.truncdiv(index, strips))
        first = materialize(T.truncdiv(part * heights, parts))
        end = materialize(T.truncdiv((part + 1) * heights, parts))
        own = [materialize(T.truncdiv((strip + i) * panels, strips)) for i in range(2)]
        tiles.configure(T.min(count, T.int64(tiles.ROWS)))
        _task(task, own, first, end)
        tiles.release()


def _task(task: _OverlappedProduct, panels: list[Expr], first: Expr, end: Expr) -> None:
    """Panels panels[0] .. panels[1] times tiles first .. end of the rows of x."""
    sums = seen_whole((COLUMNS, 2 * SIDE), "int32")
    high = materialize(end - first)
    blocks = materialize((panels[1] - panels[0]) * high)
    depth = task.layout.tiles
    share = -(-tiles.ROWS // depth)

    def block(number: Expr) -> _BlockOfSums:
        p = materialize(panels[0] + T.truncdiv(number, high))
        own = materialize((first + T.truncmod(number, high)) * tiles.ROWS)
        return _BlockOfSums(p, own, materialize(T.truncmod(number, T.int64(2))))

    def height(block: _BlockOfSums) -> Expr:
        return T.min(T.int64(tiles.ROWS), task.count - block.own)

    def features(block: _BlockOfSums) -> list[list[Expr]]:
        return [[let(value) for value in task.features(block.p, c)] for c in range(COLUMNS)]

    with T.serial(blocks) as number:
        now, before = block(number), block(T.max(number - 1, T.int64(0)))
        rows = materialize(T.Select(number > 0, height(before), T.int64(0)))
        packed = features(before)

        def behind(k: Expr) -> None:
            begin = materialize(T.min(k * share, rows))
            task.write_rows(before, sums, packed, begin, materialize(T.min(begin + share, rows)))
            task.ask_for_y(now, k * share, share)

        start = materialize(task.start(now.own))
        for tile in range(COLUMNS):
            tiles.zero(tile)
        task.products(now.p, start, T.int64(0), T.int64(depth), behind)
        for tile in range(COLUMNS):
            tiles.store_tile(tile, sums, now.sums(tile, start - now.own), tiles.ROWS)
    last = block(blocks - 1)
    task.write_rows(last, sums, features(last), T.int64(0), materialize(height(last)))

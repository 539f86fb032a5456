"""y = x W^T + b on a vector CPU, for one or more W that share x: the projections of an attention layer.

The weights are packed once, at load, into panels of `columns` vectors of output features, side by side for all
projections (`linear_packing`). A task is one panel against one block of rows of x. Its inner loop keeps a tile of
rows x columns in registers over a part of K; a group of tiles passes over that part while it lies in the first-level
cache, and their sums wait in a scratch for the next part.
Source: panels and register tile, Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, 2008.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from math import gcd, prod

from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.base import CACHE_LINE, Config, Emitted, unfit_tile, unknown_knobs
from mhsa_compile.kernels.cpu import vectors
from mhsa_compile.kernels.cpu.linear_format import Format, format_of
from mhsa_compile.kernels.cpu.linear_packing import pack
from mhsa_compile.kernels.cpu.linear_rows import Rows, prepared
from mhsa_compile.kernels.cpu.storage import load_wide, store_narrow, vector_type
from mhsa_compile.kernels.cpu.vectors import (
    Dims,
    Expr,
    RegisterTile,
    argument,
    bind,
    ceil_div,
    load,
    register_tile,
    settle,
    splat,
    store,
    tile_registers,
)
from mhsa_compile.kernels.operations import LinearOp, Op
from mhsa_compile.profile import TargetProfile

PREFETCHED = 8
"""Cache lines of the next panel that a tile asks for in each part: the tiles of a full block ask for all of them. The
first tile of the next task would wait for them otherwise."""
MOST_INT8_TERMS = 65_536  # so many products of 255 and 127 still fit int32


class LinearKernel:
    """Packed-weight matrix product with a fused bias, for any vector CPU and every dtype."""

    name = "cpu.linear"

    def applies(self, op: Op, profile: TargetProfile) -> str | None:
        if not isinstance(op, LinearOp):
            return "not a linear projection"
        if profile.family != "cpu":
            return f"made for CPUs, not for {profile.family}"
        if op.int8_weights and op.in_features > MOST_INT8_TERMS:
            return f"sums of int8 products up to {MOST_INT8_TERMS} terms, not {op.in_features}"
        return None

    def space(self, op: Op, profile: TargetProfile) -> dict[str, tuple[int, ...]]:
        assert isinstance(op, LinearOp)
        fixed = [dim for dim in op.rows if isinstance(dim, int)]
        count = prod(fixed) if len(fixed) == len(op.rows) else 4096
        format = format_of(op, profile, 1)
        float32_sums, joined = format.terms == 1, format.joined
        return {
            "rows": tuple(n for n in (1, 2, 4, 6, 8, 12) if n <= max(count, joined) and n % joined == 0),
            "columns": (1, 2, 3, 4, 6),
            "block": tuple(n for n in (8, 16, 32, 64, 128, 256, 512) if n < 2 * count) or (8,),
            "depth": (16, 32, 64) if float32_sums else (32, 64, 96, 128),
            "group": (1, 2, 4, 8),
        }

    def unfit(self, op: Op, profile: TargetProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, ("rows", "columns", "block", "depth", "group")):
            return reason
        assert isinstance(op, LinearOp)
        joined, rows = format_of(op, profile, 1).joined, config["rows"]
        if rows % joined:
            return f"a tile of {rows} rows, where an instruction takes {joined} at once"
        # So many rows of sums lie in one register, which then holds so many features fewer.
        return unfit_tile(rows // joined, config["columns"] * joined, profile.hardware.vector_registers)

    def default(self, op: Op, profile: TargetProfile) -> dict[str, int]:
        """The register tile with the least padding of the output features, then the fewest loads a product; rows that
        divide the usual lengths; a block of rows of x that the caches hold."""
        assert isinstance(op, LinearOp)
        format = format_of(op, profile, 1)
        lanes, joined = format.lanes, format.joined
        registers = profile.hardware.vector_registers
        # Of sixteen registers all are used: eight sums are too few to hide the latency of two units. The same goes for
        # matrix products, of five cycles on four units.
        room = max(tile_registers(registers), min(registers, 16)) if joined == 1 else registers

        def padded(columns: int) -> int:
            return -(-op.out_features // (columns * lanes)) * columns * lanes

        fitting = [c for c in (2, 3, 4) if 2 * c * joined < room] or [1]
        least = min(map(padded, fitting))
        lines, vectors_wide = register_tile(room, (1, 2, 4, 6, 8), [c * joined for c in fitting if padded(c) == least])
        rows, columns = lines * joined, vectors_wide // joined
        format = format_of(op, profile, columns)
        # Where a third level feeds the rows (they ask for 2 bytes a cycle) they need not stay in L2, and the panels are
        # loaded less often. A core with a megabyte of L2 is taken to have that level.
        levels = 8 if profile.hardware.l2_kib > 512 else 1
        block = max(1, levels * profile.hardware.l2_kib * 1024 // (format.step_bytes * format.steps * rows))
        cache = profile.hardware.l1d_kib * 1024
        if format.terms == 1:
            # Float32 sums: at most 64 terms in a row, and never all of few. PyTorch's library sums a single row of x in
            # many lanes, and a chain of 64 terms has more than twice its error one time in twenty.
            depth = max(16, min(64, -(-format.steps // 4)))
        else:  # only speed counts: half of the L1 cache
            depth = max(32, min(128, cache // 2 // (format.step_bytes * format.panel) // 32 * 32))
        # A part of a panel, and for each tile its sums and its part of x, in three quarters of the L1 cache.
        rest = cache * 3 // 4 - format.step_bytes * depth * format.panel
        group = rest // (rows * (4 * format.panel + format.step_bytes * depth))
        block, group = min(512, block), max(1, min(8, group))
        return {"rows": rows, "columns": columns, "block": block, "depth": depth, "group": group}

    def emit(self, op: Op, profile: TargetProfile, config: Config) -> Emitted:
        assert isinstance(op, LinearOp)
        format = format_of(op, profile, config["columns"])
        return Emitted(_linear(format, profile.hardware.cores, config), pack(format), format.packed)


@dataclass(frozen=True)
class _Product:
    """The buffers of the product, x and y seen as matrices, and the packed weights. `lines` are rows of x, or the pairs
    of them that are multiplied together: tiles are made of these."""

    format: Format
    rows: Rows
    packed: list[Expr]
    y: Expr
    columns: list[vectors.Chunk]
    count: Expr
    lines: Expr

    def tile(self, lines: int) -> RegisterTile:
        """Sums of zero."""
        joined, dtype = self.format.joined, self.format.accumulator
        tile = RegisterTile(lines, [(joined * first, joined * lanes) for first, lanes in self.columns], dtype)
        zero = T.int32(0) if dtype == "int32" else T.float32(0)
        tile.each(lambda _, column: splat(zero, tile.columns[column][1]))
        return tile

    def unzipped(self, sums: Expr) -> list[Expr]:
        """Of each row of a line."""
        return self.format.dot.unzipped(sums) if self.format.dot else [sums]

    def row(self, line: Expr, number: int) -> Expr:
        """Where row `number` of a line lies in x and y; the last one where there is no such row."""
        joined = self.format.joined
        return line if joined == 1 else settle(T.min(line * joined + number, self.count - 1))

    def weight(self, p: Expr, step: Expr, column: int) -> Expr:
        offset, lanes = self.columns[column]
        read = load if self.format.dot else load_wide
        return read(self.packed[0], [p, step, T.int64(offset)], lanes)

    def prefetch(self, p: Expr, slot: Expr) -> None:
        """Lines `slot` * PREFETCHED and so on of the panel after p; the last ones, where that panel has no more."""
        array, size = self.packed[0], self.format.steps * self.format.panel
        flat = T.decl_buffer((T.int64(self.format.panels * size),), array.dtype, data=array.data)
        line = CACHE_LINE // vectors.DTYPE_BYTES[self.format.weight]
        first = settle((p + 1) * size + T.min(slot * (PREFETCHED * line), T.int64(size - PREFETCHED * line)))
        for i in range(PREFETCHED):
            vectors.prefetch(flat, [first + i * line])

    def result(self, value: Expr, row: Expr, p: Expr, column: int) -> Expr:
        """y of a sum. The bias comes last: sums that begin with it are rounded at its magnitude at every step."""
        offset, lanes = self.columns[column]
        bias, *more = (load(array, [p, T.int64(offset)], lanes) for array in self.packed[1:])
        if self.format.offset:
            value = T.cast(value - more[1], vector_type("float32", lanes))
        if self.rows.scales is not None:
            value = value * (more[0] * splat(self.rows.scales[row], lanes))
        return value + bias


def _linear(format: Format, cores: int, config: Config) -> Expr:
    op = format.op
    dim = Dims()
    leading = [dim(d) for d in op.rows]
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("linear")
            T.func_attr({"tirx.noalias": True})
            x = argument("x", [*leading, T.int64(op.in_features)], op.dtype)
            packed = [
                argument(f"packed{i}", [T.int64(n) for n in shape], dtype)
                for i, (shape, dtype) in enumerate(format.packed)
            ]
            y = argument("y", [*leading, T.int64(op.pitch)], op.dtype)
            size = prod(leading[1:], start=leading[0])
            count = settle(size)
            with format.dot.imported() if format.dot else nullcontext():
                rows = prepared(format, _flat(x, count, op.in_features), count, size)
                columns = vectors.chunks(format.panel, format.lanes)
                lines = settle(ceil_div(count, format.joined)) if format.joined > 1 else count
                _tasks(_Product(format, rows, packed, _flat(y, count, op.pitch), columns, count, lines), cores, config)
    return builder.get()


def _flat(tensor: Expr, count: Expr, width: int) -> Expr:
    """A (..., width) tensor seen as (count, width)."""
    return T.decl_buffer((count, T.int64(width)), tensor.dtype, data=tensor.data)


def _tasks(task: _Product, cores: int, config: Config) -> None:
    """Deals panels and blocks of tiles to the threads: equal blocks, and as many that the cores share them evenly.

    The rows that fill no tile take a tile of half height, or one that reaches beyond the last row: there the last row
    is computed again, and written again with the same values.
    """
    rows, panels = config["rows"] // task.format.joined, T.int64(task.format.panels)
    rest = settle(T.truncmod(task.lines, T.int64(rows)))
    tiles = settle(T.truncdiv(task.lines, T.int64(rows)) + T.Select(rest > rows // 2, T.int64(1), T.int64(0)))
    has_half = settle(T.Select(T.And(rest > 0, rest <= rows // 2), T.int64(1), T.int64(0)))
    fair = cores // gcd(cores, task.format.panels)
    wanted = settle(ceil_div(ceil_div(tiles, config["block"]), fair) * fair)
    blocks = settle(T.max(T.int64(1), T.min(tiles, wanted)))
    with T.parallel(blocks * panels) as index:
        p = settle(T.truncmod(index, panels))
        block = settle(T.truncdiv(index, panels))
        first = settle(T.truncdiv(block * tiles, blocks))
        end = settle(T.truncdiv((block + 1) * tiles, blocks))
        half = settle(T.Select(end == tiles, has_half, T.int64(0)))
        _task(task, config, p, first, end, half)


def _task(task: _Product, config: Config, p: Expr, first: Expr, end: Expr, half: Expr) -> None:
    """Tiles first .. end of x, and the half tile after them if there is one, times panel p."""
    rows, group, steps = config["rows"] // task.format.joined, config["group"], task.format.steps
    parts = -(-steps // config["depth"])
    depth = -(-steps // parts)
    shape = (group * rows + rows // 2, task.format.joined * task.format.panel)
    sums = _scratch(shape, task.format.accumulator) if parts > 1 else None
    with T.serial(T.max(T.int64(1), ceil_div(end - first, group))) as g:
        begin = settle(first + g * group)
        full = settle(T.min(end - begin, T.int64(group)))
        with T.serial(T.int64(parts)) as number:
            start = settle(number * depth)
            part = _Part(number, parts, start, settle(T.min(start + depth, T.int64(steps))), sums)
            with T.serial(full) as i:
                task.prefetch(p, settle((begin - first) * parts + number * full + i))
                _tile(task, part, p, settle((begin + i) * rows), rows, settle(i * rows))
            if rows > 1:
                with T.If(T.And(half > 0, begin + full == end)), T.Then():
                    _tile(task, part, p, settle(end * rows), rows // 2, settle(full * rows))


def _scratch(shape: tuple[int, int], dtype: str) -> Expr:
    """Memory of the task's own. Seen through a second buffer, since TVM shrinks a buffer to what it can prove is used,
    and then loses its own proof."""
    return T.decl_buffer(shape, dtype, data=T.alloc_buffer(shape, dtype).data)


@dataclass(frozen=True)
class _Part:
    """Steps first .. end of K, part `number` of `count`.

    `sums` (lines of a group, joined * panel) holds those of the parts before, and is None where there is one part only.
    """

    number: Expr
    count: int
    first: Expr
    end: Expr
    sums: Expr | None


def _tile(task: _Product, part: _Part, p: Expr, first_line: Expr, lines: int, place: Expr) -> None:
    """y[first_line ..., panel p] = x[first_line ..., :] W^T + b, one part of the sum at a time.

    A float32 sum of K terms drifts with sqrt(K): it runs in parts, and the parts are added up.
    """
    at = [settle(T.min(first_line + r, task.lines - 1)) for r in range(lines)]
    tile = task.tile(lines)
    columns, dot = tile.columns, task.format.dot
    with T.serial(part.first, part.end) as step:
        tile.outer_product(
            lambda line: task.rows.step(at[line], step),
            lambda column: task.weight(p, step, column),
            dot.accumulate if dot else None,
        )
    if part.sums is None:
        _finish(task, tile, p, at)
        return
    with T.If(part.number > 0), T.Then():
        tile.each(lambda row, c: tile.get(row, c) + load(part.sums, _at(place, row, columns[c]), columns[c][1]))
    with T.If(part.number < part.count - 1):
        with T.Then():
            for row, c in product(range(lines), range(len(columns))):
                store(part.sums, _at(place, row, columns[c]), tile.get(row, c), columns[c][1])
        with T.Else():
            _finish(task, tile, p, at)


def _at(place: Expr, row: int, chunk: vectors.Chunk) -> list[Expr]:
    return [place + row, T.int64(chunk[0])]


def _finish(task: _Product, tile: RegisterTile, p: Expr, at: list[Expr]) -> None:
    """Writes the tile's part of y. The last panel is padded: only its real columns are written, the last vector of them
    in ever smaller parts."""
    columns, panel = task.columns, task.format.panel
    whole, rest = divmod(task.format.op.out_features, panel)
    rows = [[task.row(line, number) for number in range(task.format.joined)] for line in at]
    values = [
        (row, c, bind(task.result(sums, row, p, c)))
        for line, c in product(range(len(at)), range(len(columns)))
        for row, sums in zip(rows[line], task.unzipped(tile.get(line, c)), strict=True)
    ]
    with T.If(p < whole):
        with T.Then():
            for row, c, value in values:
                store_narrow(task.y, [row, p * panel + columns[c][0]], value, columns[c][1])
        with T.Else():
            for row, c, value in values:
                offset, lanes = columns[c]
                for first, size in vectors.chunks(min(lanes, max(0, rest - offset)), lanes):
                    piece = vectors.part(value, first, size, lanes)
                    store_narrow(task.y, [row, T.int64(whole * panel + offset + first)], piece, size)

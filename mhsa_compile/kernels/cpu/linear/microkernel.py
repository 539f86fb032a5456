"""One task of a linear: a panel of the weights against a block of rows of x, a register tile at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import gcd, prod

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import DTYPE_BYTES, ceil_div
from mhsa_compile.kernels.cpu.linear import epilogue
from mhsa_compile.kernels.cpu.linear.activations import PackedRows
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.dtypes import load_wide, store_narrow, vector_type
from mhsa_compile.kernels.cpu.simd.vectors import (
    Expr,
    RegisterTile,
    let,
    load,
    materialize,
    splat,
    store,
)
from mhsa_compile.kernels.interface.kernel import CACHE_LINE, Config

PREFETCHED = 8
"""Cache lines of the next panel that a tile asks for in each part: the tiles of a full block ask for all of them. The
first tile of the next task would wait for them otherwise."""
AHEAD = 192
"""Bytes from the weights that a half tile multiplies to those that it asks for: where there are no more rows than that,
all weights come from memory, once."""
WORTH_WIDENING = 3
"""Tiles of a group from which on its weights, where they are too narrow to multiply, are widened once for all of them
and not by each."""


@dataclass(frozen=True)
class Product:
    """The buffers of the product, x, y and the epilogue's operands seen as matrices, and the packed weights. `lines`
    are rows of x, or the pairs of them that are multiplied together: tiles are made of these."""

    format: PackedLayout
    rows: PackedRows
    packed: list[Expr]
    y: Expr
    columns: list[vectors.Chunk]
    count: Expr
    lines: Expr
    operands: list[Expr]

    def tile(self, lines: int) -> RegisterTile:
        """A register tile of sums, all zero."""
        joined, dtype = self.format.joined, self.format.accumulator
        tile = RegisterTile(lines, [(joined * first, joined * lanes) for first, lanes in self.columns], dtype)
        zero = T.int32(0) if dtype == "int32" else T.float32(0)
        tile.each(lambda _, column: splat(zero, tile.columns[column][1]))
        return tile

    def runs_at_once(self, lines: int) -> int:
        """Runs in a turn of a tile's inner loop: one where the sums of rows that are multiplied together fill the
        registers."""
        return 1 if self.format.joined > 1 else vectors.runs_at_once(lines * len(self.columns) * self.format.run)

    def unzipped(self, sums: Expr) -> list[Expr]:
        """The sums of each row of a line by itself."""
        return self.format.dot.unzipped(sums) if self.format.dot else [sums]

    def row(self, line: Expr, number: int) -> Expr:
        """The index of row `number` of a line in x and y; that of the last row where there is no such row."""
        joined = self.format.joined
        return line if joined == 1 else materialize(T.min(line * joined + number, self.count - 1))

    def weight(self, p: Expr, step: Expr, column: int) -> Expr:
        """A vector of panel p's weights of one step, as an instruction takes it."""
        offset, lanes = self.columns[column]
        read = load if self.format.dot else load_wide
        return read(self.packed[0], [p, step, T.int64(offset)], lanes)

    def widen(self, p: Expr, part: _Part, wide: Expr) -> None:
        """Writes the part's steps of panel p to `wide`, as float32."""
        with T.serial(part.end - part.first) as step:
            for c, (offset, lanes) in enumerate(self.columns):
                store(wide, [step, T.int64(offset)], self.weight(p, part.first + step, c), lanes)

    def prefetch(self, p: Expr, slot: Expr) -> None:
        """Asks for PREFETCHED cache lines of the panel after p, from line `slot` * PREFETCHED on; for the last ones,
        where that panel has no more."""
        size, line = self.format.steps * self.format.panel, self._line
        self._ask((p + 1) * size + T.min(slot * (PREFETCHED * line), T.int64(size - PREFETCHED * line)), PREFETCHED)

    def prefetch_ahead(self, p: Expr, step: Expr, steps: int) -> None:
        """Asks for as many lines as `steps` steps from `step` on take, AHEAD of them: panels lie one behind the
        other."""
        lines = -(-steps * self.format.panel // self._line)
        ahead = AHEAD // DTYPE_BYTES[self.format.weight]
        self._ask((p * self.format.steps + step) * self.format.panel + ahead, lines)

    @property
    def _line(self) -> int:
        """Elements of the packed weights in a cache line."""
        return CACHE_LINE // DTYPE_BYTES[self.format.weight]

    def _ask(self, first: Expr, lines: int) -> None:
        array, size = self.packed[0], self.format.panels * self.format.steps * self.format.panel
        flat, start = T.decl_buffer((T.int64(size),), array.dtype, data=array.data), materialize(first)
        for i in range(lines):
            vectors.prefetch(flat, [start + i * self._line])

    def result(self, value: Expr, row: Expr, p: Expr, column: int) -> Expr:
        """y of a sum. The bias comes last: sums that begin with it are rounded at its magnitude at every step."""
        offset, lanes = self.columns[column]
        bias, *more = (load(array, [p, T.int64(offset)], lanes) for array in self.packed[1:])
        if self.format.offset:
            value = T.cast(value - more[1], vector_type("float32", lanes))
        if self.rows.scales is not None:
            value = value * (more[0] * splat(self.rows.scales[row], lanes))
        return value + bias

    def apply_epilogue(self, p: Expr, first: Expr, end: Expr) -> None:
        """Turns panel p of y, whose lines first .. end are written, into what the epilogue makes of it."""
        steps, panel, joined = self.format.op.epilogue, self.format.panel, self.format.joined
        if steps is None:
            return
        rows = materialize(first * joined), materialize(T.min(end * joined, self.count))
        whole, rest = divmod(self.format.op.out_features, panel)

        def columns(width: int) -> None:
            epilogue.apply(steps, self.y, self.operands, rows, (p * panel, width), self.format.lanes)

        if rest == 0:
            columns(panel)
            return
        with T.If(p < whole):
            with T.Then():
                columns(panel)
            with T.Else():
                columns(rest)


def tasks(task: Product, cores: int, config: Config) -> None:
    """Deals panels and blocks of tiles to the threads: equal blocks, and as many that the cores share them evenly.

    The rows that fill no tile take a tile of half height, or one that reaches beyond the last row: there the last row
    is computed again, and written again with the same values.
    """
    rows, panels = config["rows"] // task.format.joined, T.int64(task.format.panels)
    rest = materialize(T.truncmod(task.lines, T.int64(rows)))
    tiles = materialize(T.truncdiv(task.lines, T.int64(rows)) + T.Select(rest > rows // 2, T.int64(1), T.int64(0)))
    has_half = materialize(T.Select(T.And(rest > 0, rest <= rows // 2), T.int64(1), T.int64(0)))
    # With a multiple of so many blocks, blocks * panels is a multiple of the cores.
    fair = cores // gcd(cores, task.format.panels)
    wanted = materialize(ceil_div(ceil_div(tiles, config["block"]), fair) * fair)
    blocks = materialize(T.max(T.int64(1), T.min(tiles, wanted)))
    with T.parallel(blocks * panels) as index:
        # Panel after panel: a thread goes on with the same rows of x, which its cache still has.
        p = materialize(T.truncmod(index, panels))
        block = materialize(T.truncdiv(index, panels))
        first = materialize(T.truncdiv(block * tiles, blocks))
        end = materialize(T.truncdiv((block + 1) * tiles, blocks))
        half = materialize(T.Select(end == tiles, has_half, T.int64(0)))
        _task(task, config, p, first, end, half)


def _task(task: Product, config: Config, p: Expr, first: Expr, end: Expr, half: Expr) -> None:
    """Tiles first .. end of x, and the half tile after them if there is one, times panel p."""
    rows, group, steps = config["rows"] // task.format.joined, config["group"], task.format.steps
    parts = -(-steps // config["depth"])
    # Parts of one size, rounded up to whole turns of the inner loop.
    turn = task.format.run * task.runs_at_once(rows)
    depth = -(-steps // parts // turn) * turn
    shape = (group * rows + rows // 2, task.format.joined * task.format.panel)
    sums = _scratch(shape, task.format.accumulator) if parts > 1 else None
    widens = _widens(task, rows)
    wide = None if widens is False else _scratch((depth, task.format.panel), "float32")
    with T.serial(T.max(T.int64(1), ceil_div(end - first, group))) as g:
        begin = materialize(first + g * group)
        full = materialize(T.min(end - begin, T.int64(group)))
        with T.serial(T.int64(parts)) as number:
            start = materialize(number * depth)
            part = _Part(number, parts, start, materialize(T.min(start + depth, T.int64(steps))), sums)

            def tiles(part: _Part) -> None:
                with T.serial(full) as i:
                    # A tile asks for lines of its own, so that together they ask for the panel once.
                    task.prefetch(p, materialize((begin - first) * parts + number * full + i))
                    _tile(task, part, p, materialize((begin + i) * rows), rows, materialize(i * rows), ahead=rows == 1)
                if rows > 1:
                    # Only behind the last group of tiles.
                    with T.If(T.And(half > 0, begin + full == end)), T.Then():
                        _tile(task, part, p, materialize(end * rows), rows // 2, materialize(full * rows), ahead=True)

            def widened() -> None:
                task.widen(p, part, wide)
                tiles(replace(part, wide=wide))

            if widens is None:
                with T.If(full >= WORTH_WIDENING):
                    with T.Then():
                        widened()
                    with T.Else():
                        tiles(part)
            elif widens:
                widened()
            else:
                tiles(part)
        behind = T.Select(T.And(half > 0, begin + full == end), T.int64(rows // 2), T.int64(0))
        task.apply_epilogue(p, begin * rows, (begin + full) * rows + behind)


def _widens(task: Product, rows: int) -> bool | None:
    """Whether the weights are too narrow to multiply, and rows enough to widen them once for a group of tiles; None if
    that is known when called only. Not where multiplications take their factors from memory: there widening costs as
    little, and the way through the cache 2 to 8 %."""
    if task.format.dot is not None or task.format.weight == "float32" or task.format.run == 1:
        return False
    fixed = [dim for dim in task.format.op.rows if isinstance(dim, int)]
    return prod(fixed) >= rows * WORTH_WIDENING if len(fixed) == len(task.format.op.rows) else None


def _scratch(shape: tuple[int, int], dtype: str) -> Expr:
    """Memory of the task's own. Seen through a second buffer, since TVM shrinks a buffer to what it can prove is used,
    and then loses its own proof."""
    return T.decl_buffer(shape, dtype, data=T.alloc_buffer(shape, dtype).data)


@dataclass(frozen=True)
class _Part:
    """Steps first .. end of K, part `number` of `count`.

    `sums` (lines of a group, joined * panel) holds those of the parts before, and is None where there is one part only.
    `wide` (steps, panel) holds the weights as float32 from `first` on, unless they are read where they are packed.
    """

    number: Expr
    count: int
    first: Expr
    end: Expr
    sums: Expr | None
    wide: Expr | None = None


def _tile(task: Product, part: _Part, p: Expr, first_line: Expr, lines: int, place: Expr, *, ahead: bool) -> None:
    """y[first_line ..., panel p] = x[first_line ..., :] W^T + b, one part of the sum at a time.

    A float32 sum of K terms drifts with sqrt(K): it runs in parts, and the parts are added up. `ahead` is whether it
    asks for the weights that come next.
    """
    at = [materialize(T.min(first_line + r, task.lines - 1)) for r in range(lines)]
    tile = task.tile(lines)
    columns, dot = tile.columns, task.format.dot

    def weight(step: Expr, column: int) -> Expr:
        if part.wide is None:
            return task.weight(p, step, column)
        offset, lanes = columns[column]
        return load(part.wide, [step - part.first, T.int64(offset)], lanes)

    def multiply(first: Expr, steps: int) -> None:
        if ahead:
            task.prefetch_ahead(p, first, steps)
        factors = [task.rows.steps(line, first, steps) for line in at]
        for i in range(steps):
            tile.outer_product(
                lambda line: factors[line][i],
                lambda column: weight(first + i, column),
                dot.accumulate if dot else None,
            )

    vectors.each_run(part.first, part.end, task.format.run, multiply, at_once=task.runs_at_once(lines))
    if part.sums is None:
        _finish(task, tile, p, at)
        return
    # The first part finds what the task before left there.
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


def _finish(task: Product, tile: RegisterTile, p: Expr, at: list[Expr]) -> None:
    """Writes the tile's part of y. The last panel is padded: only its real columns are written, the last vector of them
    in ever smaller parts."""
    columns, panel = task.columns, task.format.panel
    whole, rest = divmod(task.format.op.out_features, panel)
    rows = [[task.row(line, number) for number in range(task.format.joined)] for line in at]
    # Before the branch: inside, the arithmetic would stand there twice.
    values = [
        (row, c, let(task.result(sums, row, p, c)))
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

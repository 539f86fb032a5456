"""One task of a linear: a panel of the weights against a block of rows of x, a register tile at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import gcd
from typing import ClassVar

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.formats.choice import store_narrow
from mhsa_compile.kernels.cpu.linear import epilogue
from mhsa_compile.kernels.cpu.linear.activations import PackedRows
from mhsa_compile.kernels.cpu.linear.lookahead import Lookahead
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, let, load, materialize, splat, store, vector_type
from mhsa_compile.kernels.cpu.units.unit import Columns
from mhsa_compile.kernels.interface.kernel import Config

PREFETCHED = 8
"""Cache lines of the next panel that a tile asks for in each part: the tiles of a full block ask for all of them. The
first tile of the next task would wait for them otherwise."""
WORTH_WIDENING = 3
"""Tiles of a group from which on its weights, where they are too narrow to multiply, are widened once for all of them
and not by each."""
FEW_ROWS, CHAINS, FOLDED = 16, 16, 4
"""Up to so many rows of x PyTorch's library sums K in as many chains as its vectors have lanes, and adds their sums in
pairs; in one chain from there on. So many chains of 16 to 32 terms, whose sums are added up by fours first, are as
exact; four chains of 64 terms have 1.6 times its error: the budget is twice that, of largest errors, which scatter."""


@dataclass(frozen=True)
class Product:
    """The buffers of the product, x, y and the epilogue's operands seen as matrices, and the packed weights. `lines`
    are rows of x, or the pairs of them that are multiplied together: tiles are made of these. Of `pages` pages of
    memory weights are asked for in turn."""

    layout: PackedLayout
    rows: PackedRows
    packed: list[Expr]
    y: Expr
    columns: list[vectors.Chunk]
    count: Expr
    lines: Expr
    operands: list[Expr]
    pages: int = 1
    sums_few_apart: ClassVar[bool] = True
    """Whether FEW_ROWS are summed in more chains; else a row has the same bits whatever their number."""

    def row(self, line: Expr, number: int) -> Expr:
        """The index of row `number` of a line in x and y; that of the last row where there is no such row."""
        joined = self.layout.unit.rows
        return line if joined == 1 else materialize(T.min(line * joined + number, self.count - 1))

    def weights(self, p: Expr) -> Columns:
        """Panel p of the weights, as the unit takes it."""
        read = self.layout.format.load if self.layout.widens else load
        return Columns(self.packed[0], lambda step, column: [p, step, column], self.columns, read)

    def add_products(self, tile: RegisterTile, lines: list[Expr], p: Expr, part: DepthPart, *, ahead: bool) -> None:
        """Adds to a tile what a part of K gives for lines and for panel p; `ahead` is whether it asks for the weights
        that come next."""
        unit = self.layout.unit
        weights = self.weights(p) if part.wide is None else part.weights(self.columns)

        def ask(first: Expr, steps: int) -> None:
            if ahead:
                self.lookahead.ask_beyond(p, first, steps)

        turn = self.layout.run, unit.runs_at_once(len(lines), len(self.columns))
        unit.add_products(tile, self.rows.of(lines), weights, (part.first, part.end), turn=turn, before=ask)

    def widen(self, p: Expr, part: DepthPart, wide: Expr) -> None:
        """Writes the part's steps of panel p to `wide`, as float32."""
        weights = self.weights(p)
        with T.serial(part.end - part.first) as step:
            for c, (offset, lanes) in enumerate(self.columns):
                store(wide, [step, T.int64(offset)], weights.vector(part.first + step, c), lanes)

    @property
    def lookahead(self) -> Lookahead:
        return Lookahead(self.layout, self.packed[0], self.pages)

    def result(self, value: Expr, row: Expr, p: Expr, column: int) -> Expr:
        """y of a sum."""
        return self.scaled(value, row, self.features(p, column), self.columns[column][1])

    def features(self, p: Expr, column: int) -> list[Expr]:
        """What is packed of each feature of a column beside its weights."""
        offset, lanes = self.columns[column]
        return [load(array, [p, T.int64(offset)], lanes) for array in self.packed[1:]]

    def scaled(self, value: Expr, row: Expr, features: list[Expr], lanes: int) -> Expr:
        """y of a sum. The bias comes last: sums that begin with it are rounded at its magnitude at every step."""
        bias, *more = features
        if self.layout.offset:
            value = T.cast(value - more[1], vector_type("float32", lanes))
        if self.layout.format.is_scaled:
            step = more[0] if self.rows.scales is None else more[0] * splat(self.rows.scales[row], lanes)
            value = value * step
        return value + bias

    def real_columns(self, p: Expr, body: Callable[[int, Expr], None]) -> None:
        """body(width, first) of panel p in y: the last panel is padded, and narrower there."""
        panel = self.layout.panel
        whole, rest = divmod(self.layout.op.out_features, panel)
        if rest == 0:
            body(panel, p * panel)
            return
        with T.If(p < whole):
            with T.Then():
                body(panel, p * panel)
            with T.Else():
                body(rest, T.int64(whole * panel))

    def write_vector(self, row: Expr, first: Expr, column: int, value: Expr, width: int) -> None:
        """y[row, first ...] of vector `column` of a panel, if it is among the panel's `width` real columns; the last
        one of them in ever smaller parts."""
        offset, lanes = self.columns[column]
        for start, size in vectors.chunks(min(lanes, max(0, width - offset)), lanes):
            store_narrow(self.y, [row, first + offset + start], vectors.part(value, start, size, lanes), size)

    def apply_epilogue(self, p: Expr, first: Expr, end: Expr) -> None:
        """Turns panel p of y, whose lines first .. end are written, into what the epilogue makes of it."""
        steps, joined = self.layout.op.epilogue, self.layout.unit.rows
        if steps is None:
            return
        rows = materialize(first * joined), materialize(T.min(end * joined, self.count))

        def columns(width: int, column: Expr) -> None:
            epilogue.apply(steps, self.y, self.operands, rows, (column, width), self.layout.lanes)

        self.real_columns(p, columns)


def tasks(task: Product, cores: int, config: Config) -> None:
    """Deals panels and blocks of tiles to the threads: equal blocks, and as many that the cores share them evenly.

    The rows that fill no tile take a tile of half height, or one that reaches beyond the last row: there the last row
    is computed again, and written again with the same values.
    """
    rows = config["rows"] // task.layout.unit.rows
    rest = materialize(T.truncmod(task.lines, T.int64(rows)))
    tiles = materialize(T.truncdiv(task.lines, T.int64(rows)) + T.Select(rest > rows // 2, T.int64(1), T.int64(0)))
    has_half = materialize(T.Select(T.And(rest > 0, rest <= rows // 2), T.int64(1), T.int64(0)))

    def body(p: Expr, first: Expr, end: Expr) -> None:
        half = materialize(T.Select(end == tiles, has_half, T.int64(0)))
        _task(task, config, p, first, end, half)

    each_panel(task.layout.panels, tiles, config["block"], cores, body)


def each_panel(panels: int, tiles: Expr, block: int, cores: int, body: Callable[[Expr, Expr, Expr], None]) -> None:
    """In parallel body(panel, first, end) for each panel and for blocks of up to so many tiles of rows, which differ by
    one at most."""
    # With a multiple of so many blocks, blocks * panels is a multiple of the cores.
    fair = cores // gcd(cores, panels)
    count = materialize(ceil_div(ceil_div(tiles, block), fair) * fair)
    blocks = materialize(T.max(T.int64(1), T.min(tiles, count)))
    with T.parallel(blocks * panels) as index:
        # Panel after panel: a thread goes on with the same rows of x, which its cache still has.
        p = materialize(T.truncmod(index, T.int64(panels)))
        number = materialize(T.truncdiv(index, T.int64(panels)))
        first = materialize(T.truncdiv(number * tiles, blocks))
        end = materialize(T.truncdiv((number + 1) * tiles, blocks))
        body(p, first, end)


def _task(task: Product, config: Config, p: Expr, first: Expr, end: Expr, half: Expr) -> None:
    """Tiles first .. end of x, and the half tile after them if there is one, times panel p."""
    rows, group, steps = config["rows"] // task.layout.unit.rows, config["group"], task.layout.steps
    parts = _depth_parts(task, config["depth"], rows)
    waiting, width = group * rows + rows // 2, task.layout.unit.rows * task.layout.panel
    sums = vectors.seen_whole((parts.levels * waiting, width), task.layout.unit.sums) if parts.levels else None
    folded = waiting if parts.levels > 1 else 0
    count = task.layout.op.row_count
    ahead = rows == 1 or (task.pages > 1 and count is not None and count <= FEW_ROWS)
    widens = _widens(task, rows)
    wide = None if widens is False else vectors.seen_whole((parts.longest, task.layout.panel))
    with T.serial(T.max(T.int64(1), ceil_div(end - first, group))) as g:
        begin = materialize(first + g * group)
        full = materialize(T.min(end - begin, T.int64(group)))
        with T.serial(parts.count) as number:
            start = materialize(number * parts.depth)
            end_of_part = materialize(T.min(start + parts.depth, T.int64(steps)))
            part = DepthPart(number, parts.count, start, end_of_part, sums, folded)

            def half_tile(part: DepthPart, lines: int) -> None:
                _tile(task, part, p, materialize(end * rows), lines, materialize(full * rows), ahead=True)

            def rest(part: DepthPart) -> None:
                if not task.layout.has_tiles_of_one or rows < 4:
                    half_tile(part, rows // 2)
                    return
                with T.If(task.lines - end * rows == 1):
                    with T.Then():
                        half_tile(part, 1)
                    with T.Else():
                        half_tile(part, rows // 2)

            def tiles(part: DepthPart) -> None:
                with T.serial(full) as i:
                    # A tile asks for lines of its own, so that together they ask for the panel once.
                    share = materialize((begin - first) * parts.count + number * full + i)
                    task.lookahead.ask_for_panel(p + 1, share * PREFETCHED, PREFETCHED)
                    _tile(task, part, p, materialize((begin + i) * rows), rows, materialize(i * rows), ahead=ahead)
                if rows > 1:
                    # Only behind the last group of tiles.
                    with T.If(T.And(half > 0, begin + full == end)), T.Then():
                        rest(part)

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


@dataclass(frozen=True)
class _DepthParts:
    """`count` parts of K, of `depth` steps, or fewer in the last one; `longest` at most, whatever the call. `levels`:
    the kinds of sums that wait, none, those of parts, those of FOLDED parts, too."""

    count: Expr
    depth: Expr
    longest: int
    levels: int


def _depth_parts(task: Product, most: int, rows: int) -> _DepthParts:
    """Parts of one size, up to `most`, rounded up to whole turns of the inner loop."""
    steps, turn, count = task.layout.steps, task.layout.turn(rows), task.layout.op.row_count

    def parts(most: int) -> tuple[int, int]:
        pieces = -(-steps // most)
        return pieces, -(-steps // pieces // turn) * turn

    many = few = parts(most)
    if task.sums_few_apart and task.layout.unit.group == 1 and (count is None or count <= FEW_ROWS):
        few = parts(min(most, max(16, min(32, steps // CHAINS))))
    levels = int(few[0] > 1) + int(few[0] > max(FOLDED, many[0]))
    if count is not None or few == many:
        return _DepthParts(T.int64(few[0]), T.int64(few[1]), few[1], levels)
    has_few = task.count <= FEW_ROWS
    number, depth = (materialize(T.Select(has_few, T.int64(a), T.int64(b))) for a, b in zip(few, many, strict=True))
    return _DepthParts(number, depth, max(few[1], many[1]), levels)


def _widens(task: Product, rows: int) -> bool | None:
    """Whether the weights are too narrow to multiply, and rows enough to widen them once for a group of tiles; None if
    that is known when called only."""
    if not task.layout.is_worth_widening:
        return False
    count = task.layout.op.row_count
    return None if count is None else count >= rows * WORTH_WIDENING


@dataclass(frozen=True)
class DepthPart:
    """Steps first .. end of K, part `number` of `count`.

    `sums` (lines of a group, joined * panel) holds those of the parts before, and is None where there is one part only.
    Behind so many lines as `folded` says it holds those of FOLDED parts each; of 0 these are not apart.
    `wide` (steps, panel) holds the weights as float32 from `first` on, unless they are read where they are packed.
    """

    number: Expr
    count: Expr
    first: Expr
    end: Expr
    sums: Expr | None
    folded: int
    wide: Expr | None = None

    def weights(self, columns: Sequence[vectors.Chunk]) -> Columns:
        """Columns of the weights in `wide`."""
        return Columns(self.wide, lambda step, column: [step - self.first, column], columns)


def _tile(task: Product, part: DepthPart, p: Expr, first_line: Expr, lines: int, place: Expr, *, ahead: bool) -> None:
    """y[first_line ..., panel p] = x[first_line ..., :] W^T + b, one part of the sum at a time.

    A float32 sum of K terms drifts with sqrt(K): it runs in parts, and the parts are added up.
    """
    at = [materialize(T.min(first_line + r, task.lines - 1)) for r in range(lines)]
    tile = task.layout.unit.zeros(lines, task.columns)
    columns = tile.columns
    task.add_products(tile, at, p, part, ahead=ahead)
    if part.sums is None:
        _finish(task, tile, p, at)
        return

    def add(place: Expr) -> None:
        tile.each(lambda row, c: tile.get(row, c) + load(part.sums, _at(place, row, columns[c]), columns[c][1]))

    def wait(place: Expr) -> None:
        for row, c in product(range(lines), range(len(columns))):
            store(part.sums, _at(place, row, columns[c]), tile.get(row, c), columns[c][1])

    number = T.truncmod(part.number, T.int64(FOLDED)) if part.folded else part.number
    # The first part finds what the task before left there.
    with T.If(number > 0), T.Then():
        add(place)
    if part.folded:
        with T.If(part.number < part.count - 1):
            with T.Then():
                with T.If(number < FOLDED - 1):
                    with T.Then():
                        wait(place)
                    with T.Else():
                        with T.If(part.number >= FOLDED), T.Then():
                            add(place + part.folded)
                        wait(place + part.folded)
            with T.Else():
                with T.If(part.number >= FOLDED), T.Then():
                    add(place + part.folded)
                _finish(task, tile, p, at)
        return
    with T.If(part.number < part.count - 1):
        with T.Then():
            wait(place)
        with T.Else():
            _finish(task, tile, p, at)


def _at(place: Expr, row: int, chunk: vectors.Chunk) -> list[Expr]:
    return [place + row, T.int64(chunk[0])]


def _finish(task: Product, tile: RegisterTile, p: Expr, at: list[Expr]) -> None:
    """Writes the tile's part of y. The last panel is padded: only its real columns are written."""
    panel = task.layout.panel
    whole, rest = divmod(task.layout.op.out_features, panel)
    rows = [task.row(line, number) for line in at for number in range(task.layout.unit.rows)]
    # Before the branch: inside, the arithmetic would stand there twice.
    values: list[tuple[Expr, int, Expr]] = []

    def take(number: int, c: int, sums: Expr) -> None:
        row = rows[number]
        values.append((row, c, let(task.result(sums, row, p, c))))

    task.layout.unit.each_row(tile, take)
    with T.If(p < whole):
        with T.Then():
            for row, c, value in values:
                task.write_vector(row, p * panel, c, value, panel)
        with T.Else():
            for row, c, value in values:
                task.write_vector(row, T.int64(whole * panel), c, value, rest)

"""Y = A B on matrix tiles, both factors computed in the call: of 16 bits, and of float32 by bfloat16 terms, with the
products that `spec/float32_products.py` lists.

A task is a block of Y, of one entry of the batch. Part by part along K it writes the rows of A as tiles into a scratch
of its own, then panel by panel 32 columns of B; a panel's tiles are multiplied by those of A, one tile of rows by two
of columns, or two where there are terms. A of 16 bits whose rows lie along K is read where it lies, but for the last
tile of K where that is not whole, and a block is one panel then. Sums wait in a second scratch for the next part; those
that are Y, whole tiles of float32, tiles store there.

A chain of float32 sums drifts: that of three terms starts anew after CHAIN tiles of K, and vectors add what it gave.

What terms would make something else of, Inf, NaN, and lines whose largest number is from 2^60 on or below 2^-50 (see
units/float32_terms.py), is multiplied in float32 by the steps of the vector kernel: tiles of rows, and panels, of
which a line is such in this part of K.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES, SizeVars, ceil_div, prim_func
from mhsa_compile.kernels.cpu.products import kernel, tile_factors
from mhsa_compile.kernels.cpu.products.kernel import Matrices, PanelTask, ProductArguments, SumPart
from mhsa_compile.kernels.cpu.products.tile_factors import DEPTH, LINES, TILE, FactorScratch, TileFactor, store_first
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import let, load, materialize, store
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.cpu.units.float32_lanes import Float32Lanes
from mhsa_compile.kernels.cpu.units.float32_terms import CHAIN, ORDER
from mhsa_compile.kernels.interface.kernel import CACHE_LINE, Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import ProductOp
from mhsa_compile.spec.float32_products import TERM_PRODUCTS, Float32Products

COLUMNS = 2
"""Tiles of a panel."""
PANEL = COLUMNS * LINES
PARTS = {1: 12, 2: 24, 3: 24}
"""Tiles of K in a part, by terms: a panel's part of one stays in the first cache, a block's of A with three in the
second."""
BLOCKS = ((256, 512), (256, 256), (128, 128))
"""Rows and columns of a block where A is split: the more columns, the less often is A."""
SHORTEST, LEAST = 16, 1 << 13
"""Terms of a sum, and multiply-adds of an entry, from which on tiles take no longer than vectors."""
PLAIN_ROWS = 8
"""Of a register tile where products are float32's."""


class CpuTileProductKernel(Fixed):
    """Batched matrix product of two activations on matrix tiles."""

    name = "cpu.product_on_tiles"
    op_type = ProductOp

    def why_not(self, op: ProductOp, profile: CpuProfile) -> str | None:
        if op.dtype == "float32" and op.float32_products not in TERM_PRODUCTS:
            return "products of bfloat16 terms, not IEEE's"
        if not (unit := tiles.unit_of(op.dtype)).is_on(profile):
            return f"a CPU with {unit.feature}"
        if (reason := _is_small(op)) is not None:
            return reason
        for operand in (op.left, op.right):
            if len(operand.dims) - 1 not in (operand.rows, operand.columns):
                return "factors whose neighbours in memory are neighbours in a row or a column"
        return None

    def float32_products(self, op: ProductOp, profile: CpuProfile) -> tuple[Float32Products, ...]:
        return tuple(TERM_PRODUCTS) if op.dtype == "float32" and tiles.BFLOAT16.is_on(profile) else ()

    def exact_products(self, op: ProductOp, profile: CpuProfile) -> tuple[Float32Products, ...]:
        """None: both factors are split in the call, which takes what six products gain; the gain that remains where all
        sizes are 512 or more, 3 to 25 %, does not outlast a neighbour on the core."""
        return ()

    def emit(self, op: ProductOp, profile: CpuProfile, config: Config) -> Emitted:
        return Emitted(_product(op, profile))


def _is_small(op: ProductOp) -> str | None:
    """Why tiles, of 16 rows by 32 of K, take longer than vectors, or None."""
    if isinstance(op.inner, int) and op.inner < SHORTEST:
        return f"sums of {SHORTEST} terms or more, not {op.inner}"
    sizes = [size for size in (op.rows, op.inner, op.columns) if isinstance(size, int)]
    if len(sizes) == 3 and prod(sizes) < LEAST:
        return f"{LEAST} multiply-adds or more in an entry, not {prod(sizes)}"
    return None


@dataclass(frozen=True)
class _Plan:
    """What an operation's products are, known while it is compiled."""

    op: ProductOp
    profile: CpuProfile

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Terms of A and of B that are multiplied."""
        return ((0, 0),) if self.op.dtype != "float32" else ORDER[self.op.float32_products]

    @property
    def terms(self) -> int:
        return 1 + max(max(pair) for pair in self.pairs)

    @property
    def tall(self) -> int:
        """Tiles of rows that are multiplied together: four tiles in use where products of a load are few."""
        return 1 if self.terms == 1 else 2

    @property
    def rights(self) -> tuple[int, ...]:
        return (tiles.RIGHT,) * COLUMNS if self.terms == 1 else tiles.RIGHTS

    @property
    def part(self) -> int:
        """Tiles of K in a part."""
        return PARTS[self.terms]

    @property
    def blocks(self) -> Sequence[tuple[int, int]]:
        """Rows and columns of a task's block of Y, the larger ones first."""
        return [(rows, PANEL) for rows in kernel.BLOCKS] if self.reads_a else BLOCKS

    @property
    def chain(self) -> int | None:
        """Tiles of K after which a chain of sums starts anew, if it does."""
        return CHAIN if self.terms == 3 else None

    @property
    def reads_a(self) -> bool:
        """Whether tiles of A are read where A lies."""
        return self.op.dtype != "float32" and tile_factors.is_along(self.op, of_left=True)

    @property
    def has_whole_tiles(self) -> bool:
        """Whether K is known to have no tile that is not whole."""
        return isinstance(self.op.inner, int) and self.op.inner % DEPTH == 0


def _product(op: ProductOp, profile: CpuProfile) -> Expr:
    dim, unit = SizeVars(), tiles.unit_of(op.dtype)
    with prim_func("product") as builder:
        arguments = ProductArguments.of(op, dim)
        plan = _Plan(arguments.op, profile)
        with unit.imported(), T.attr(0, "pragma_import_llvm", tile_factors.TEXT):
            M, K, N = (materialize(size) for size in (arguments.rows, dim(op.inner), dim(op.columns)))
            pitch = materialize(prod(arguments.dims[plan.op.left.rows + 1 :], start=T.int64(1)))
            batch = [materialize(extent) for extent in arguments.batch]

            def run(place: list[Expr], rows: tuple[Expr, Expr], columns: tuple[Expr, Expr]) -> None:
                matrices = Matrices(arguments.op, arguments.a, arguments.b, arguments.y, place)
                ProductTask(plan, matrices, pitch, M, K, N, _Scratch.allocated(plan)).run_block(rows, columns)

            kernel.each_block((M, N), batch, plan.blocks, profile.hardware.cores, run)
    return builder.get()


class _Part(NamedTuple):
    """Tiles first .. end of K, part `number`."""

    number: Expr
    first: Expr
    end: Expr
    is_last: Expr


class _Height(NamedTuple):
    """`tall` tiles of rows, from `row` on: from tile `place` on of those that are in scratch. Sums lie at `sums`, and
    begin with row `start`: a tile that is read where A lies moves back so far that it is whole."""

    row: Expr
    start: Expr
    place: Expr
    tall: int
    sums: tuple[Expr, Expr]


@dataclass(frozen=True)
class _Scratch:
    """A task's own. A part of the block of A (tiles of rows, tiles of K, terms, 16 * 32), None where it is read in its
    place, and which tiles of rows ask for float32; the same of a panel of B; sums of the block, and of a chain; the
    last tile of K of a tile of rows; a part of a panel in float32."""

    left: Expr | None
    left_flags: Expr
    right: Expr
    right_flag: Expr
    sums: Expr
    chain: Expr | None
    rest: Expr | None
    plain: Expr | None
    factors: FactorScratch

    @staticmethod
    def allocated(plan: _Plan) -> _Scratch:
        rows, columns = plan.blocks[0]
        shape = (plan.part, plan.terms, TILE)
        reads_a, has_flags = plan.reads_a, plan.op.dtype == "float32"
        return _Scratch(
            left=None if reads_a else vectors.scratch((rows // LINES, *shape), "uint16"),
            left_flags=vectors.scratch((rows // LINES,), "int32"),
            right=vectors.scratch((COLUMNS, *shape), "uint16"),
            right_flag=T.alloc_buffer((1,), "int32"),
            sums=vectors.seen_whole((rows, columns)),
            chain=None if plan.chain is None else vectors.seen_whole((plan.tall * LINES, PANEL)),
            rest=vectors.scratch((LINES, DEPTH), "uint16") if reads_a and not plan.has_whole_tiles else None,
            plain=vectors.seen_whole((kernel.DEPTH, PANEL)) if has_flags else None,
            factors=FactorScratch.allocated(plan.terms, COLUMNS),
        )


@dataclass(frozen=True)
class ProductTask:
    """A block of Y, of one entry of the batch. `pitch` is that of the rows of A."""

    plan: _Plan
    matrices: Matrices
    pitch: Expr
    M: Expr
    K: Expr
    N: Expr
    scratch: _Scratch

    def run_block(self, rows: tuple[Expr, Expr], columns: tuple[Expr, Expr]) -> None:
        """Part by part along K, panel by panel; a panel's parts where nothing is written of A, one after another."""
        depth = materialize(ceil_div(self.K, DEPTH))
        parts = materialize(T.max(T.int64(1), ceil_div(depth, self.plan.part)))
        tiles.configure(T.min(self.M, T.int64(LINES)), right=(tiles.RIGHT, *self.plan.rights))
        with T.serial(parts) as number:
            ends = [materialize(T.truncdiv(n * depth, parts)) for n in (number, number + 1)]
            part = _Part(number, ends[0], ends[1], number == parts - 1)
            if self.scratch.left is not None:
                self._write_left(part, rows)
            with T.serial(ceil_div(columns[1] - columns[0], PANEL)) as p:
                column = materialize(columns[0] + p * PANEL)
                self._write_right(part, column)
                at = materialize(T.Select(parts == 1, T.int64(0), p * PANEL))
                self._run_panel(part, rows, column, (parts, at))
        tiles.release()

    def _run_panel(self, part: _Part, rows: tuple[Expr, Expr], column: Expr, sums: tuple[Expr, Expr]) -> None:
        """A part of K: of all rows of the block, and of the panel whose sums lie where these of a block do; of one part
        only they need not wait."""
        (first, end), (parts, at), plan = rows, sums, self.plan

        def multiply(row: Expr, tall: int) -> None:
            start = materialize(T.min(row, T.max(T.int64(0), self.M - LINES))) if plan.reads_a else row
            line = materialize(T.Select(parts == 1, T.int64(0), row - first))
            place = materialize(T.truncdiv(row - first, T.int64(LINES)))
            height = _Height(row, start, place, tall, (line, at))
            flag = T.int32(0) if self.scratch.plain is None else materialize(self._flag(height), "int32")
            direct = self._is_whole(part, parts, height, column)
            if self.plan.terms > 1:
                with T.If(part.is_last), T.Then():
                    self._ask_for_y(height, column)
            if self.scratch.plain is None:
                self._by_tiles(part, height, column, direct)
            else:
                with T.If(flag == 0):
                    with T.Then():
                        self._by_tiles(part, height, column, direct)
                    with T.Else():
                        self._in_float32(part, height, column)
            with T.If(T.And(part.is_last, T.Or(flag > 0, direct == 0))), T.Then():
                self._write(height, column)

        with T.serial(materialize(ceil_div(end - first, plan.tall * LINES))) as i:
            row = materialize(first + i * (plan.tall * LINES))
            with T.If(row + (plan.tall - 1) * LINES < end):
                with T.Then():
                    multiply(row, plan.tall)
                with T.Else():
                    multiply(row, 1)

    def _ask_for_y(self, height: _Height, column: Expr) -> None:
        """Asks for what is written next."""
        y = self.matrices.y
        with T.serial(T.min(T.int64(height.tall * LINES), self.M - height.row)) as i:
            for offset in range(0, PANEL, CACHE_LINE // DTYPE_BYTES[str(y.dtype)]):
                vectors.prefetch(y, self.matrices.result(height.row + i, column + offset), write=True)

    def _is_whole(self, part: _Part, parts: Expr, height: _Height, column: Expr) -> Expr:
        """1 where the sums are Y as tiles hold them, float32 of one chain and no row or column of others; else 0."""
        if self.matrices.y.dtype != "float32":
            return T.int64(0)
        is_whole = T.And(T.And(parts == 1, height.start == height.row), column + PANEL <= self.N)
        if self.plan.chain is not None:
            is_whole = T.And(is_whole, part.end - part.first <= self.plan.chain)
        if not self.plan.reads_a:
            is_whole = T.And(is_whole, height.row + height.tall * LINES <= self.M)
        return materialize(T.cast(is_whole, "int64"))

    def _write_left(self, part: _Part, rows: tuple[Expr, Expr]) -> None:
        """The part of the block of A as tiles."""
        factor, scratch = self._factor(of_left=True), self.scratch
        with T.serial(ceil_div(rows[1] - rows[0], LINES)) as i:
            flag, line = (scratch.left_flags, [i]), materialize(rows[0] + i * LINES)
            factor.write(scratch.left, [[i]], line, (part.first, part.end), flag)

    def _write_right(self, part: _Part, column: Expr) -> None:
        """The part of a panel of B as tiles."""
        places, flag = [[T.int64(c)] for c in range(COLUMNS)], (self.scratch.right_flag, [T.int64(0)])
        self._factor(of_left=False).write(self.scratch.right, places, column, (part.first, part.end), flag)

    def _factor(self, *, of_left: bool) -> TileFactor:
        count, terms = self.M if of_left else self.N, self.plan.terms
        return TileFactor(self.matrices, of_left, count, self.K, terms, self.scratch.factors)

    def _flag(self, height: _Height) -> Expr:
        """A word of which a bit is set where a factor of the tile asks for products in float32."""
        flag = self.scratch.right_flag[T.int64(0)]
        for r in range(height.tall):
            flag = flag | self.scratch.left_flags[height.place + r]
        return flag

    def _by_tiles(self, part: _Part, height: _Height, column: Expr, direct: Expr) -> None:
        """The sums, or Y if `direct`, += the products of a part."""
        places, scratch = [(r, c) for c in range(COLUMNS) for r in range(height.tall)], self.scratch

        def each_sum(
            move: Callable[..., None], buffer: Expr, at: tuple[Expr, Expr], pitch: Expr | int, of: Sequence[Expr] = ()
        ) -> None:
            for number, (r, c) in enumerate(places):
                move(number, buffer, [*of, at[0] + r * LINES, at[1] + c * LINES], pitch)

        def zero() -> None:
            for number in range(len(places)):
                tiles.zero(number)

        def put() -> None:
            if self.matrices.y.dtype != "float32":
                each_sum(tiles.store_tile, scratch.sums, height.sums, wide)
                return
            with T.If(direct > 0):
                with T.Then():
                    y, place = self.matrices.y, self.matrices.place
                    each_sum(tiles.store_tile, y, (height.start, column), self.N, place)
                with T.Else():
                    each_sum(tiles.store_tile, scratch.sums, height.sums, wide)

        wide, chain = self.plan.blocks[0][1], self.plan.chain
        if chain is None:
            with T.If(part.number > 0):
                with T.Then():
                    each_sum(tiles.load_tile, scratch.sums, height.sums, wide)
                with T.Else():
                    zero()
            self._products(part, height, part.first, part.end)
            put()
            return
        with T.serial(T.max(T.int64(1), ceil_div(part.end - part.first, chain))) as number:
            zero()
            first = materialize(part.first + number * chain)
            self._products(part, height, first, materialize(T.min(first + chain, part.end)))
            with T.If(part.number + number == 0):
                with T.Then():
                    put()
                with T.Else():
                    each_sum(tiles.store_tile, scratch.chain, (T.int64(0), T.int64(0)), PANEL)
                    self._add_chain(height)

    def _add_chain(self, height: _Height) -> None:
        """The sums += those of a chain."""
        sums, (line, column) = self.scratch.sums, height.sums
        with T.serial(T.int64(height.tall * LINES)) as i:
            for c in range(COLUMNS):
                at = [line + i, column + c * LINES]
                value = load(sums, at, LINES) + load(self.scratch.chain, [i, T.int64(c * LINES)], LINES)
                store(sums, at, value, LINES)

    def _products(self, part: _Part, height: _Height, first: Expr, end: Expr) -> None:
        """The tiles of sums += those of tiles first .. end of K."""
        left, factor = self.scratch.left, self._factor(of_left=True)

        def in_scratch(tile: Expr) -> None:
            def at(r: int, term: int) -> tuple[Expr, list[Expr], Expr | int]:
                return left, [height.place + r, tile - part.first, T.int64(term), T.int64(0)], DEPTH

            self._step(tile - part.first, height.tall, at)

        def where_it_lies(tile: Expr) -> None:
            index = factor.at(height.start, materialize(tile * DEPTH))
            self._step(tile - part.first, 1, lambda r, term: (self.matrices.a, index, self.pitch))

        if left is not None or self.plan.has_whole_tiles:
            with T.serial(first, end) as tile:
                (where_it_lies if left is None else in_scratch)(tile)
            return
        whole, rest = materialize(T.truncdiv(self.K, T.int64(DEPTH))), self.scratch.rest
        with T.If(end > whole), T.Then(), T.serial(T.min(T.int64(LINES), self.M)) as i:
            row = factor.row(materialize(height.start + i), materialize(whole * DEPTH))
            store(rest, [i, T.int64(0)], row, DEPTH)
        with T.serial(first, T.min(end, whole)) as tile:
            where_it_lies(tile)
        with T.If(end > whole), T.Then():
            self._step(whole - part.first, 1, lambda r, term: (rest, [T.int64(0), T.int64(0)], DEPTH))

    def _step(self, tile: Expr, tall: int, left: Callable[[int, int], tuple[Expr, list[Expr], Expr | int]]) -> None:
        """The sums += all products of a tile of K, the part's `tile`. left(r, term) is where a tile of A lies, its
        first row and its pitch. A tile that the next product needs too stays where it is."""
        resident: dict[int, tuple[int, int]] = {}
        lefts, rights = tiles.LEFTS if tall > 1 else (tiles.LEFT,), self.plan.rights

        def hold(register: int, what: tuple[int, int], buffer: Expr, at: list[Expr], pitch: Expr | int) -> None:
            if resident.get(register) != what:
                tiles.load_tile(register, buffer, at, pitch)
            resident[register] = what

        for i, j in self.plan.pairs:
            for r, c in itertools.product(range(tall), range(COLUMNS)):
                hold(lefts[r], (r, i), *left(r, i))
                at = [T.int64(c), tile, T.int64(j), T.int64(0)]
                hold(rights[c], (c, j), self.scratch.right, at, DEPTH)
                tiles.unit_of(self.plan.op.dtype).product(r + tall * c, lefts[r], rights[c])

    def _in_float32(self, part: _Part, height: _Height, column: Expr) -> None:
        """What `_by_tiles` adds, by the vector kernel's steps in float32."""
        unit, plain = Float32Lanes.of(self.plan.profile), self.scratch.plain
        if not tile_factors.is_along(self.plan.op, of_left=True):
            unit = replace(unit, run=1)
        task = PanelTask(self.matrices, self.M, self.K, self.N, column, unit, COLUMNS, PLAIN_ROWS)
        is_whole = materialize(T.cast(column + PANEL <= self.N, "int64"))
        since, until = materialize(part.first * DEPTH), materialize(T.min(part.end * DEPTH, self.K))
        with T.serial(materialize(ceil_div(until - since, kernel.DEPTH))) as number:
            begin = materialize(since + number * kernel.DEPTH)
            length = materialize(T.min(until - begin, T.int64(kernel.DEPTH)))
            terms = SumPart(materialize(part.number + number), begin, length, T.bool(False))
            task.pack(plain, terms, is_whole)
            with T.serial(T.int64(height.tall * LINES // PLAIN_ROWS)) as i:
                first, line = (materialize(at + i * PLAIN_ROWS) for at in (height.row, height.sums[0]))
                task.add_tile(plain, self.scratch.sums, first, (line, height.sums[1]), terms, is_whole)

    def _write(self, height: _Height, column: Expr) -> None:
        """Y of what was summed up. Of the last panel only the columns that there are."""
        y, (line, at) = self.matrices.y, height.sums
        end, there = T.min(height.start + height.tall * LINES, self.M), materialize(self.N - column)
        with T.serial(height.row, end) as row:
            place = materialize(line + (row - height.start))
            values = [let(load(self.scratch.sums, [place, at + c * LINES], LINES)) for c in range(COLUMNS)]
            if y.dtype == "bfloat16":
                store_first(y, self.matrices.result(row, column), tiles.narrowed_pair(*values), there, PANEL)
            else:
                for c, value in enumerate(values):
                    half = T.reinterpret("uint16x16", T.cast(value, "float16x16")) if y.dtype == "float16" else value
                    store_first(y, self.matrices.result(row, column + c * LINES), half, there - c * LINES, LINES)

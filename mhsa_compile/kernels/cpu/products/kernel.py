"""Y = A B on a vector CPU, both factors computed in the call, so that nothing is packed at load.

A task is a panel of B's columns against a block of A's rows, of one entry of the batch. Part by part along K it copies
the panel into a scratch of its own, as float32, K rows of vectors; a register tile of rows x columns passes over that
part for all rows of the block, and their sums wait in a second scratch for the next part. A is read where it lies,
element by element, in whatever order its axes are stored; where it is narrow, it is widened once before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, ceil_div, prim_func
from mhsa_compile.kernels.cpu.formats.choice import load_wide, store_narrow
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import let, load, materialize, register_tile, store
from mhsa_compile.kernels.cpu.units.float32_lanes import Float32Lanes
from mhsa_compile.kernels.cpu.units.unit import Columns, Rows, Unit
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import ProductOp, ProductOperand


def place_of(number: Expr, batch: Sequence[Expr]) -> list[Expr]:
    """Along each axis of the batch the place of an entry, of which the last axis counts the neighbours."""
    place: list[Expr] = []
    for extent in reversed(batch):
        place.insert(0, materialize(T.truncmod(number, extent)))
        number = materialize(T.truncdiv(number, extent))
    return place


def indices(operand: ProductOperand, place: Sequence[Expr], row: Expr, column: Expr) -> list[Expr]:
    """The indices of an operand's element, as it is stored."""
    index: list[Expr] = [T.int64(0)] * len(operand.dims)
    for axis, number in zip(operand.batch, place, strict=True):
        if axis is not None:
            index[axis] = number
    index[operand.rows], index[operand.columns] = row, column
    return index


DEPTH = 128
"""Terms of a part of a sum: the panel's part stays in the caches, and rounding grows with the parts' root."""
BLOCKS, TASKS = (512, 192), 4
"""Rows of a block, about: so often is an element of B read once it is copied, and so many sums stay in L2. The larger
one where that makes so many tasks for each core."""
CHUNK = 1 << 12
"""Elements of A that are widened in one task."""


class CpuProductKernel(Fixed):
    """Batched matrix product of two activations, for any vector CPU; sums are float32 whatever the dtype."""

    name = "cpu.product"
    op_type = ProductOp

    def emit(self, op: ProductOp, profile: CpuProfile, config: Config) -> Emitted:
        unit = Float32Lanes.of(profile)
        if op.left.columns != len(op.left.dims) - 1:
            unit = replace(unit, run=1)  # only neighbours in memory are loaded as one vector
        rows, columns = _tile_shape(op, unit, profile.hardware.vector_registers)
        return Emitted(_product(op, unit, rows, columns, profile.hardware.cores))


def _tile_shape(op: ProductOp, unit: Unit, registers: int) -> tuple[int, int]:
    """(rows, vectors of columns) of the register tile: the least padding, then the fewest loads a product."""
    room = unit.room(registers)
    most = op.rows if isinstance(op.rows, int) and not op.is_flat else 8
    heights = [n for n in (1, 2, 4, 6, 8) if n <= max(1, most)]
    tiles = [register_tile(room, heights, [c]) for c in (1, 2, 3, 4) if c == 1 or 2 * c < room]

    def cost(tile: tuple[int, int]) -> float:
        lines, wide = tile[0], tile[1] * unit.lanes
        padded = -(-op.columns // wide) * wide if isinstance(op.columns, int) else 1
        return padded * (1 + (tile[0] + tile[1]) / (lines * tile[1]))

    return min(tiles, key=cost)


@dataclass(frozen=True)
class Matrices:
    """One entry of the batch: A (M, K), B (K, N) and Y (M, N) as elements of what is stored."""

    op: ProductOp
    a: Expr
    b: Expr
    y: Expr
    place: list[Expr]

    def left(self, row: Expr, k: Expr) -> list[Expr]:
        return indices(self.op.left, self.place, row, k)

    def right(self, k: Expr, column: Expr) -> list[Expr]:
        return indices(self.op.right, self.place, k, column)

    def result(self, row: Expr, column: Expr) -> list[Expr]:
        return [*self.place, row, column]


@dataclass(frozen=True)
class ProductArguments:
    """Arguments of the function being built, and `op` as what they are: where all entries of the batch share B, their
    rows of A and Y are those of one."""

    op: ProductOp
    a: Expr
    b: Expr
    y: Expr
    dims: list[Expr]
    batch: list[Expr]
    rows: Expr

    @staticmethod
    def of(op: ProductOp, dim: SizeVars) -> ProductArguments:
        dims = [dim(d) for d in op.left.dims]
        a = argument("a", dims, op.dtype)
        b = argument("b", [dim(d) for d in op.right.dims], op.dtype)
        batch, size, width = [dim(d) for d in op.batch], dim(op.rows), dim(op.columns)
        y = argument("y", [*batch, size, width], op.result)
        if op.is_flat:
            size, batch = prod(batch, start=size), []
            dims = [size, dim(op.inner)]
            a = T.decl_buffer(tuple(dims), op.dtype, data=a.data)
            y = T.decl_buffer((size, width), op.result, data=y.data)
            left = ProductOperand(op.left.dims[-2:], (), 0, 1)
            op = replace(op, batch=(), left=left, right=replace(op.right, batch=()))
        return ProductArguments(op, a, b, y, dims, batch, size)


def each_block(
    sizes: tuple[Expr, Expr],
    batch: Sequence[Expr],
    choices: Sequence[tuple[int, int]],
    cores: int,
    body: Callable[[list[Expr], tuple[Expr, Expr], tuple[Expr, Expr]], None],
) -> None:
    """In parallel body(place, rows, columns) for each entry of the batch and each block of Y: rows and columns from one
    to another. A block is of the first of the `choices`, (rows, columns), that makes enough tasks for each core, or of
    the last; `sizes` are M and N."""
    M, N = sizes
    rows, columns = (T.int64(size) for size in choices[-1])
    for tall, wide in reversed(choices[:-1]):
        is_enough = prod(batch, start=ceil_div(M, tall) * ceil_div(N, wide)) >= TASKS * cores
        rows, columns = T.Select(is_enough, T.int64(tall), rows), T.Select(is_enough, T.int64(wide), columns)
    rows, columns = materialize(rows), materialize(columns)
    panels, blocks = materialize(ceil_div(N, columns)), materialize(ceil_div(M, rows))
    with T.parallel(materialize(prod(batch, start=panels * blocks))) as task:
        column = materialize(T.truncmod(task, panels) * columns)
        rest = materialize(T.truncdiv(task, panels))
        first = materialize(T.truncmod(rest, blocks) * rows)
        place = place_of(materialize(T.truncdiv(rest, blocks)), batch)
        ends = materialize(T.min(first + rows, M)), materialize(T.min(column + columns, N))
        body(place, (first, ends[0]), (column, ends[1]))


def _product(op: ProductOp, unit: Unit, rows: int, columns: int, cores: int) -> Expr:
    dim, panel = SizeVars(), columns * unit.lanes
    blocks = [(rows * max(1, size // rows), panel) for size in BLOCKS]
    with prim_func("product") as builder:
        arguments = ProductArguments.of(op, dim)
        a = arguments.a if op.dtype == unit.dtype else _in_float32(arguments.a, arguments.dims)
        M, K, N = materialize(arguments.rows), materialize(dim(op.inner)), materialize(dim(op.columns))

        def run(place: list[Expr], block: tuple[Expr, Expr], columns_: tuple[Expr, Expr]) -> None:
            matrices = Matrices(arguments.op, a, arguments.b, arguments.y, place)
            PanelTask(matrices, M, K, N, columns_[0], unit, columns, rows).run_block(*block, blocks[0][0])

        each_block((M, N), [materialize(extent) for extent in arguments.batch], blocks, cores, run)
    return builder.get()


def _in_float32(a: Expr, dims: list[Expr]) -> Expr:
    """A as float32, laid out as it is stored."""
    size = prod(dims[1:], start=dims[0])
    wide = T.alloc_buffer((size,), "float32")
    flat, count = T.decl_buffer((size,), a.dtype, data=a.data), materialize(size)
    with T.parallel(ceil_div(count, CHUNK)) as chunk:
        first = materialize(chunk * CHUNK)
        end = materialize(T.min(first + CHUNK, count))

        def widen(i: Expr, n: int) -> None:
            store(wide, [i], load_wide(flat, [i], n), n)

        vectors.each_run(first, end, 16, widen)
    return T.decl_buffer(tuple(dims), "float32", data=wide.data)


class SumPart(NamedTuple):
    """Some terms of all sums, `length` from `begin` on."""

    number: Expr
    begin: Expr
    length: Expr
    is_last: Expr


@dataclass(frozen=True)
class PanelTask:
    """The panel from column `column` on, against a block of rows."""

    matrices: Matrices
    M: Expr
    K: Expr
    N: Expr
    column: Expr
    unit: Unit
    columns: int
    rows: int

    @property
    def panel(self) -> int:
        return self.columns * self.unit.lanes

    def run_block(self, first: Expr, end: Expr, most: int) -> None:
        """Rows first .. end, at most so many."""
        packed, sums = (vectors.seen_whole((rows, self.panel)) for rows in (DEPTH, most))
        tiles = materialize(ceil_div(end - first, self.rows))
        parts = materialize(T.max(T.int64(1), ceil_div(self.K, DEPTH)))
        is_whole = materialize(T.cast(self.column + self.panel <= self.N, "int64"))
        with T.serial(parts) as number:
            begin = materialize(number * DEPTH)
            part = SumPart(number, begin, materialize(T.min(self.K - begin, T.int64(DEPTH))), number == parts - 1)
            self.pack(packed, part, is_whole)
            with T.serial(tiles) as i:
                line = materialize(i * self.rows)
                self.add_tile(packed, sums, materialize(first + line), (line, T.int64(0)), part, is_whole)

    def pack(self, packed: Expr, part: SumPart, is_whole: Expr) -> None:
        """packed[k] = B[part.begin + k, the panel's columns], all of which there are if it `is_whole`."""
        with T.If(is_whole > 0):
            with T.Then():
                self._pack_whole(packed, part)
            with T.Else():
                self._pack_rest(packed, part)

    def _pack_whole(self, packed: Expr, part: SumPart) -> None:
        matrices, lanes = self.matrices, self.unit.lanes
        right = matrices.op.right
        if right.columns == len(right.dims) - 1:
            with T.serial(part.length) as k:
                for c in range(self.columns):
                    value = load_wide(matrices.b, matrices.right(part.begin + k, self.column + c * lanes), lanes)
                    store(packed, [k, T.int64(c * lanes)], value, lanes)
            return
        if right.rows != len(right.dims) - 1:
            self._pack_rest(packed, part)
            return

        def pack(k: Expr, size: int) -> None:
            """`size` terms of `lanes` columns: a square, whose rows become columns, or single elements."""
            with T.serial(T.int64(self.columns)) as c:
                at = materialize(c * lanes)
                places = [matrices.right(part.begin + k, self.column + at + i) for i in range(lanes)]
                loaded = [let(load_wide(matrices.b, place, size)) for place in places]
                if size == lanes:
                    for e, column in enumerate(vectors.transpose(loaded)):
                        store(packed, [k + e, at], column, lanes)
                else:
                    for i, value in enumerate(loaded):
                        store(packed, [k, at + i], value, 1)

        vectors.each_run(T.int64(0), part.length, lanes, pack)

    def _pack_rest(self, packed: Expr, part: SumPart) -> None:
        """The same by single elements; columns that are not there are copies of the last, which nobody reads."""
        matrices = self.matrices
        with T.serial(part.length) as k, T.serial(T.int64(self.panel)) as j:
            column = T.min(self.column + j, self.N - 1)
            store(packed, [k, j], load_wide(matrices.b, matrices.right(part.begin + k, column), 1), 1)

    def add_tile(
        self, packed: Expr, sums: Expr, first: Expr, place: tuple[Expr, Expr], part: SumPart, is_whole: Expr
    ) -> None:
        """Adds a part's products to the sums of rows from `first` on, which lie at `place`, or writes these with the
        last part."""
        matrices, lanes, (line, at_column) = self.matrices, self.unit.lanes, place
        at = [materialize(T.min(first + r, self.M - 1)) for r in range(self.rows)]
        tile = self.unit.zeros(self.rows, vectors.chunks(self.panel, lanes))
        rows = Rows(matrices.a, lambda row, k: matrices.left(row, part.begin + k), at)
        packed_columns = Columns(packed, lambda k, column: [k, column], tile.columns)
        turn = self.unit.run, self.unit.runs_at_once(self.rows, self.columns)
        self.unit.add_products(tile, rows, packed_columns, (T.int64(0), part.length), turn=turn)
        with T.If(part.number > 0), T.Then():
            tile.each(lambda r, c: tile.get(r, c) + load(sums, [line + r, at_column + c * lanes], lanes))
        with T.If(T.And(part.is_last, is_whole > 0)):
            with T.Then():
                for r, row in enumerate(at):
                    for c in range(self.columns):
                        store_narrow(matrices.y, matrices.result(row, self.column + c * lanes), tile.get(r, c), lanes)
            with T.Else():
                for r in range(self.rows):
                    for c in range(self.columns):
                        store(sums, [line + r, at_column + c * lanes], tile.get(r, c), lanes)
                with T.If(part.is_last), T.Then():
                    for r, row in enumerate(at):
                        with T.serial(self.N - self.column) as j:
                            store_narrow(
                                matrices.y, matrices.result(row, self.column + j), sums[line + r, at_column + j], 1
                            )

"""Y = A B on a vector CPU where A has few rows or B few columns, so that each element of the other factor, the wide
one, is needed for a few multiply-adds only: it is read once, in the order in which it lies, and never copied.

Where neighbours of the wide factor in memory are terms of one sum, a sum is a vector of sums at first, each over every
so many terms. Where they are terms of sums beside each other, a vector holds one term of each of these.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from math import prod

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import SizeVars, argument, ceil_div, prim_func
from mhsa_compile.kernels.cpu.formats.choice import load_wide, store_narrow
from mhsa_compile.kernels.cpu.products.kernel import indices, place_of
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, let, materialize, store
from mhsa_compile.kernels.interface.kernel import Config, Emitted, Fixed
from mhsa_compile.kernels.interface.ops import Dim, ProductOp, ProductOperand

WORK = 1 << 16
"""Elements of the wide factor that a task reads, about."""
STREAMS, BESIDE = 8, 16
"""Lines that are read at once, each along its terms; vectors that are read at once of lines beside each other. With 16
lines the first took a fifth longer."""
FEWEST_BESIDE, TASKS = 4, 4
"""Of fewer vectors there are as few as this where that makes more tasks, up to so many for each core."""
CHAINS = 8
"""Sums that hide the latency of a multiply-add on two units."""


class CpuSkinnyProductKernel(Fixed):
    """Product of two activations of which one has few vectors; sums are float32 whatever the dtype."""

    name = "cpu.product.skinny"
    op_type = ProductOp

    def why_not(self, op: ProductOp, profile: CpuProfile) -> str | None:
        return None if _shape(op, profile) else "neither few rows nor few columns of a factor whose axes lie in order"

    def emit(self, op: ProductOp, profile: CpuProfile, config: Config) -> Emitted:
        shape = _shape(op, profile)
        assert shape is not None
        return Emitted(_product(op, shape, profile.vector_lanes("float32"), _breadth(shape, profile)))


@dataclass(frozen=True)
class _Shape:
    """The product as the kernel sees it: `op` of the same memory, `count` vectors of the skinny factor, which is A or
    else B, and whether neighbours of the wide one are terms of one sum."""

    op: ProductOp
    count: int
    is_left: bool
    is_along: bool

    @property
    def wide(self) -> ProductOperand:
        return self.op.right if self.is_left else self.op.left

    @property
    def skinny(self) -> ProductOperand:
        return self.op.left if self.is_left else self.op.right

    @property
    def lines(self) -> Dim:
        """Vectors of the wide factor: columns of B or rows of A."""
        return self.op.columns if self.is_left else self.op.rows


def _shape(op: ProductOp, profile: CpuProfile) -> _Shape | None:
    """The product with a skinny factor; None where it has none, or where panels take fewer multiply-adds or lines."""
    op, lanes = _flat(op), profile.vector_lanes("float32")
    for is_left, count in ((False, op.columns), (True, op.rows)):
        if not isinstance(count, int) or count < 1:
            continue
        wide = op.right if is_left else op.left
        terms, lines = (wide.rows, wide.columns) if is_left else (wide.columns, wide.rows)
        last = _length(wide.dims) - 1
        if (last == terms and count <= lanes // 2) or (last == lines and _fits(2, count, profile)):
            return _Shape(op, count, is_left, last == terms)
    return None


def _flat(op: ProductOp) -> ProductOp:
    """Where all entries of the batch share B, their rows of A and Y as those of one, if their number is known."""
    outer = [d for d in (*op.batch, op.rows) if isinstance(d, int)]
    if not op.is_flat or len(outer) <= len(op.batch):
        return op
    rows = prod(outer)
    left = ProductOperand((rows, op.left.dims[-1]), (), 0, 1)
    return replace(op, batch=(), rows=rows, left=left, right=replace(op.right, batch=()))


def _length(dims: tuple[Dim, ...]) -> int:
    """The number of axes without those of one element at the end."""
    return max((i + 1 for i, size in enumerate(dims) if size != 1), default=1)


def _product(op: ProductOp, shape: _Shape, lanes: int, breadth: int) -> Expr:
    dim = SizeVars()
    with prim_func("product") as builder:
        # 1. The arguments, without axes of one element at the end, so that a vector lies along the last one.
        a = argument("a", [dim(d) for d in op.left.dims], op.dtype)
        b = argument("b", [dim(d) for d in op.right.dims], op.dtype)
        y = argument("y", [dim(d) for d in (*op.batch, op.rows, op.columns)], op.result)
        op = shape.op
        a, b = (
            T.decl_buffer(tuple(dim(d) for d in one.dims[: _length(one.dims)]), op.dtype, data=buffer.data)
            for one, buffer in ((op.left, a), (op.right, b))
        )
        y = T.decl_buffer(tuple(dim(d) for d in (*op.batch, op.rows, op.columns)), op.result, data=y.data)
        batch = [materialize(dim(d)) for d in op.batch]
        arrays = _Arrays(shape, *((b, a) if shape.is_left else (a, b)), y, [])
        lines, terms = materialize(dim(shape.lines)), materialize(dim(op.inner))
        if shape.is_along:
            arrays = arrays.with_skinny_along(dim)
        tile = _Tile(arrays, lines, terms, lanes, breadth)
        # 2. The tasks.
        if shape.is_along:
            runs = T.truncdiv(T.int64(WORK), T.max(terms * tile.breadth, T.int64(1)))
            block = materialize(T.max(runs, T.int64(1)) * tile.breadth)
        else:
            block = materialize(T.int64(tile.breadth * lanes))
        blocks = materialize(ceil_div(lines, block))

        def run(task: Expr) -> None:
            place = place_of(materialize(T.truncdiv(task, blocks)), batch)
            first = materialize(T.truncmod(task, blocks) * block)
            end = materialize(T.min(first + block, lines))
            here = replace(tile, arrays=replace(arrays, place=place))
            (here.run_along if shape.is_along else here.run_beside)(first, end)

        count, sizes = materialize(prod(batch, start=blocks)), (*op.batch, shape.lines, op.inner)
        few = [size for size in sizes if isinstance(size, int)]
        if len(few) == len(sizes) and prod(few) <= vectors.WORTH_SHARING:
            with T.serial(count) as task:
                run(task)
        else:
            with T.parallel(count) as task:
                run(task)
    return builder.get()


def _fits(breadth: int, count: int, profile: CpuProfile) -> bool:
    """Whether a tile's sums are registers: beside them there are the fewer of a step's operands, and one of the
    others."""
    registers = vectors.tile_registers(profile.hardware.vector_registers)
    return breadth * count + min(breadth, count) + 1 <= registers


def _breadth(shape: _Shape, profile: CpuProfile) -> int:
    """Lines, or vectors of them, of the register tile."""
    sizes = [size for size in (*shape.op.batch, shape.lines) if isinstance(size, int)]
    most = STREAMS if shape.is_along else BESIDE
    if shape.is_along and isinstance(shape.lines, int):
        most = min(most, shape.lines)
    elif not shape.is_along and len(sizes) > len(shape.op.batch):
        shared = prod(sizes) // (TASKS * profile.hardware.cores * profile.vector_lanes("float32"))
        most = min(most, max(FEWEST_BESIDE, shared))
    fitting = [n for n in (2, 4, 8, 16) if n <= most and _fits(n, shape.count, profile)]
    return max(fitting, default=1)


@dataclass(frozen=True)
class _Arrays:
    """One entry of the batch: elements of the factors and of Y by line of the wide factor, vector of the skinny one
    and term."""

    shape: _Shape
    wide: Expr
    skinny: Expr
    y: Expr
    place: list[Expr]
    is_in_order: bool = False

    def of_wide(self, line: Expr, term: Expr) -> list[Expr]:
        operand = self.shape.wide
        row, column = (term, line) if self.shape.is_left else (line, term)
        return _at(operand, self.place, row, column)

    def of_skinny(self, vector: Expr, term: Expr) -> list[Expr]:
        operand = self.shape.skinny
        if self.is_in_order:
            return [*(i for axis, i in zip(operand.batch, self.place, strict=True) if axis is not None), vector, term]
        row, column = (vector, term) if self.shape.is_left else (term, vector)
        return _at(operand, self.place, row, column)

    def of_y(self, line: Expr, vector: Expr) -> list[Expr]:
        return [*self.place, *((vector, line) if self.shape.is_left else (line, vector))]

    def with_skinny_along(self, dim: SizeVars) -> _Arrays:
        """With the skinny factor's terms as neighbours and in float32: a copy, unless they are."""
        shape, operand = self.shape, self.shape.skinny
        axis = operand.columns if shape.is_left else operand.rows
        if shape.op.dtype == "float32" and axis == _length(operand.dims) - 1:
            return self
        own = [dim(operand.dims[axis]) for axis in operand.batch if axis is not None]
        rows, terms = prod(own, start=T.int64(1)) * shape.count, dim(shape.op.inner)
        dims = (*own, T.int64(shape.count), terms)
        copy = T.decl_buffer(dims, "float32", data=T.alloc_buffer((rows * terms,), "float32").data)

        def turn(row: Expr) -> None:
            entry, place = materialize(T.truncdiv(row, T.int64(shape.count))), list[Expr]()
            for axis, extent in reversed(list(zip(operand.batch, shape.op.batch, strict=True))):
                place.insert(0, T.int64(0) if axis is None else materialize(T.truncmod(entry, dim(extent))))
                entry = entry if axis is None else materialize(T.truncdiv(entry, dim(extent)))
            source, vector = replace(self, place=place), materialize(T.truncmod(row, T.int64(shape.count)))
            target = replace(source, is_in_order=True)
            with T.serial(terms) as k:
                store(copy, target.of_skinny(vector, k), load_wide(self.skinny, source.of_skinny(vector, k), 1), 1)

        vectors.each_task(rows, terms, turn)
        return replace(self, skinny=copy, is_in_order=True)


def _at(operand: ProductOperand, place: list[Expr], row: Expr, column: Expr) -> list[Expr]:
    """The indices of an operand's element, as it is stored, without axes of one element at the end."""
    return indices(operand, place, row, column)[: _length(operand.dims)]


@dataclass(frozen=True)
class _Tile:
    """Lines of one entry, `breadth` of them, or vectors of them, at once."""

    arrays: _Arrays
    lines: Expr
    terms: Expr
    lanes: int
    breadth: int

    def run_along(self, first: Expr, end: Expr) -> None:
        with T.serial(materialize(ceil_div(end - first, self.breadth))) as i:
            begin = materialize(first + i * self.breadth)
            self._along([materialize(T.min(begin + r, self.lines - 1)) for r in range(self.breadth)])

    def _along(self, lines: list[Expr]) -> None:
        """Whole sums of these lines with each vector of the skinny factor; the same line twice is none too many."""
        arrays, lanes, count = self.arrays, self.lanes, self.arrays.shape.count
        chains = max(1, CHAINS // (len(lines) * count))
        tiles = [RegisterTile(len(lines), [(c * lanes, lanes) for c in range(count)]) for _ in range(chains)]
        rest, turn = RegisterTile(len(lines), [(c, 1) for c in range(count)]), itertools.cycle(tiles)
        for tile in (*tiles, rest):
            tile.fill(0.0)

        def multiply(k: Expr, size: int) -> None:
            def wide(r: int) -> Expr:
                return load_wide(arrays.wide, arrays.of_wide(lines[r], k), size)

            def skinny(c: int) -> Expr:
                return vectors.load(arrays.skinny, arrays.of_skinny(T.int64(c), k), size)

            tile = next(turn) if size == lanes else rest
            if len(lines) < count:  # the fewer operands wait in registers
                factors = [let(wide(r)) for r in range(len(lines))]
                for c in range(count):
                    other = let(skinny(c))
                    for r, value in enumerate(factors):
                        tile.set(r, c, tile.get(r, c) + value * other)
            else:
                tile.outer_product(wide, skinny, lambda total, one, other: total + one * other)

        at_once = max(chains, vectors.runs_at_once(len(lines) * count))
        vectors.each_run(T.int64(0), self.terms, lanes, multiply, at_once=at_once)
        for tile in tiles[1:]:
            tiles[0].each(lambda r, c, tile=tile: tiles[0].get(r, c) + tile.get(r, c))  # type: ignore[misc]
        places = list(itertools.product(range(len(lines)), range(count)))
        sums = vectors.sums([tiles[0].get(r, c) for r, c in places], lanes)
        for (r, c), value in zip(places, sums, strict=True):
            store_narrow(arrays.y, arrays.of_y(lines[r], T.int64(c)), value + rest.get(r, c), 1)

    def run_beside(self, first: Expr, end: Expr) -> None:
        """Lines first .. end, whose terms lie beside each other."""
        lines, lanes, width = self.arrays.shape.lines, self.lanes, self.breadth * self.lanes
        rest = lines % width if isinstance(lines, int) else None
        if rest == 0:
            self._beside(first, vectors.chunks(width, lanes))
            return
        with T.If(first + width <= end):
            with T.Then():
                self._beside(first, vectors.chunks(width, lanes))
            with T.Else():
                if rest is not None:
                    self._beside(first, vectors.chunks(rest, lanes))
                else:
                    vectors.each_run(first, end, lanes, lambda line, size: self._beside(line, [(0, size)]))

    def _beside(self, first: Expr, columns: list[vectors.Chunk]) -> None:
        """Whole sums of lines from `first` on, in vectors of these sizes."""
        arrays, count = self.arrays, self.arrays.shape.count
        tile = RegisterTile(count, columns)
        tile.fill(0.0)

        def multiply(k: Expr, size: int) -> None:
            factors = [let(load_wide(arrays.skinny, arrays.of_skinny(T.int64(c), k), 1)) for c in range(count)]
            tile.outer_product(
                factors.__getitem__,
                lambda i: load_wide(arrays.wide, arrays.of_wide(first + columns[i][0], k), columns[i][1]),
            )

        at_once = vectors.runs_at_once(count * len(columns))
        vectors.each_run(T.int64(0), self.terms, 1, multiply, at_once=at_once)
        for c in range(count):
            for i, (offset, size) in enumerate(columns):
                self._store_beside(first + offset, c, tile.get(c, i), size)

    def _store_beside(self, first: Expr, vector: int, value: Expr, size: int) -> None:
        """Sums of `size` lines: neighbours in Y, or not."""
        arrays = self.arrays
        if arrays.shape.is_left:
            store_narrow(arrays.y, arrays.of_y(first, T.int64(vector)), value, size)
            return
        for i, element in enumerate(vectors.elements(value, size)):
            store_narrow(arrays.y, arrays.of_y(first + i, T.int64(vector)), element, 1)

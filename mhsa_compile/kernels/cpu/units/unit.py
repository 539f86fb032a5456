"""A unit that multiplies: what the inner loop of a matrix product is made of, and how its factors lie.

    sums (lines, columns) += A (lines, K) B (K, columns)

A step takes `group` neighbours along K, which lie in one word. A line is a row of A, or `rows` of them, where one
instruction multiplies so many; B has for each step a word for each column, and `lanes` columns are a vector; so a line
has `rows * lanes` sums with each of these. Kernels say where A and B lie; the loop over K and all in it is the unit's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, elements, load, splat
from mhsa_compile.kernels.interface.kernel import why_not_tile

At = Callable[[Expr, Expr], list[Expr]]  # the index of an element by its row and column


@dataclass(frozen=True)
class Columns:
    """B: `at(step, column)` is where a word lies, and its neighbours along the columns behind it. `chunks` are the
    vectors of a tile; `read` brings one of them into a register."""

    buffer: Expr
    at: At
    chunks: Sequence[Chunk]
    read: Callable[[Expr, Sequence[Expr], int], Expr] = load

    def vector(self, step: Expr, column: int) -> Expr:
        offset, lanes = self.chunks[column]
        return self.read(self.buffer, self.at(step, T.int64(offset)), lanes)


@dataclass(frozen=True)
class Strips:
    """`count` columns of B as they come: rows of `width` elements along K, which lie at `at(row, k)`. numbers(first, n)
    are the rows of so many columns."""

    buffer: Expr
    at: At
    count: int
    width: int
    numbers: Callable[[Expr, int], list[Expr]]


@dataclass(frozen=True)
class Rows:
    """A: `at(row, k)` is where an element lies, and its neighbours along K behind it. `rows` are those of a tile."""

    buffer: Expr
    at: At
    rows: Sequence[Expr]

    def factors(self, unit: Unit, first: Expr, count: int) -> Iterable[Sequence[Expr]]:
        """For each of `count` steps from `first` on what each line is multiplied by."""
        lines = [self.rows[i : i + unit.rows] for i in range(0, len(self.rows), unit.rows)]
        return zip(*(unit.steps(self.buffer, self.at, line, first, count) for line in lines), strict=True)


@dataclass(frozen=True)
class Joined:
    """A, of which the rows of a line lie side by side, step by step: `at(line, word)`."""

    buffer: Expr
    at: At
    lines: Sequence[Expr]

    def factors(self, unit: Unit, first: Expr, count: int) -> Iterable[Sequence[Expr]]:
        words, size = unit.rows * count, unit.rows * unit.group
        steps = (unit.words(self.buffer, self.at(line, first * size), words) for line in self.lines)
        return zip(*(elements(step, count) for step in steps), strict=True)


@dataclass(frozen=True)
class Turned:
    """A^T in words: `at(step, row)` is where one lies, and its neighbours along the rows behind it. `count` lines from
    row `base` on are those of a tile, all loaded at once where a `vector` of them serves."""

    buffer: Expr
    at: At
    base: Expr
    count: int
    vector: bool

    def factors(self, unit: Unit, first: Expr, count: int) -> Iterable[Sequence[Expr]]:
        for step in (first + i for i in range(count)):
            if self.vector:
                yield elements(load(self.buffer, self.at(step, self.base), self.count), self.count)
            else:
                rows = (self.base + unit.rows * line for line in range(self.count))
                yield [load(self.buffer, self.at(step, row), unit.rows) for row in rows]


@dataclass(frozen=True)
class Unit:
    """An instruction, or a few, that one step of an inner loop is.

    dtype     of the factors
    sums      "float32", or "int32", which wraps around
    run       words that a vector holds, where a machine multiplies by each of them in place; else one
    feature   what the CPU must have, named as in /proc/cpuinfo
    unsigned  for "int8": whether those of A are; those of B are signed
    """

    dtype: str
    sums: str
    lanes: int
    group: int = 1
    rows: int = 1
    run: int = 1
    feature: str = ""
    unsigned: bool = False

    def is_on(self, profile: CpuProfile) -> bool:
        """Whether a machine has it, in vectors that it has."""
        return self.feature in profile.hardware.features and self.lanes <= profile.vector_lanes("float32")

    @property
    def word(self) -> str:
        """dtype of a group of neighbours."""
        raise NotImplementedError

    @property
    def keeps_sums(self) -> bool:
        """Whether sums become factors again, by `as_factors`."""
        return False

    def room(self, registers: int) -> int:
        """How many of a machine's vector registers a tile may have, with the vectors of a step and a factor. Of sixteen
        all: eight sums are too few to hide the latency of two units."""
        return max(vectors.tile_registers(registers), min(registers, 16))

    def why_not_tile(self, rows: int, columns: int, registers: int) -> str | None:
        """Why a tile does not fit a machine's vector registers, or None."""
        if rows % self.rows:
            return f"a tile of {rows} rows, where an instruction takes {self.rows} at once"
        # So many rows of sums lie in one register, which then holds so many columns fewer.
        return why_not_tile(rows // self.rows, columns * self.rows, registers)

    def imported(self) -> AbstractContextManager[Any]:
        """Stands around the body of a PrimFunc that multiplies. Any number of PrimFuncs of a module may."""
        return nullcontext()

    # ---- The products

    def zeros(self, lines: int, columns: Sequence[Chunk]) -> RegisterTile:
        """The sums of a tile, in as many registers as they take."""
        sums = RegisterTile(lines, [(self.rows * first, self.rows * lanes) for first, lanes in columns], self.sums)
        zero = T.int32(0) if self.sums == "int32" else T.float32(0)
        sums.each(lambda _, column: splat(zero, sums.columns[column][1]))
        return sums

    def add_products(
        self,
        sums: RegisterTile,
        a: Rows | Joined | Turned,
        b: Columns,
        steps: tuple[Expr, Expr],
        *,
        turn: tuple[int, int],
        columns_first: bool = True,
        before: Callable[[Expr, int], None] = lambda first, count: None,
    ) -> None:
        """sums += A B over these steps. `turn` is (steps whose factors are loaded at once, such runs in a turn of the
        loop). `before` comes before each run; the vectors of a step before its factors, unless there is no room for all
        of them beside the sums."""

        def multiply(first: Expr, count: int) -> None:
            before(first, count)
            for i, factors in enumerate(a.factors(self, first, count)):
                self.multiply(sums, factors, [b.vector(first + i, c) for c in range(len(b.chunks))], columns_first)

        run, at_once = turn
        vectors.each_run(*steps, run, multiply, at_once=at_once)

    def multiply(self, sums: RegisterTile, a: Sequence[Expr], b: Sequence[Expr], columns_first: bool) -> None:
        """One step: a line's factor for each line, and a vector for each of its columns."""
        raise NotImplementedError

    def each_row(self, sums: RegisterTile, take: Callable[[int, int, Expr], None]) -> None:
        """take(row, column, vector) for what was summed up, row by row of each line."""
        for line in range(sums.rows):
            for c in range(len(sums.columns)):
                for number, part in enumerate(self.parted(sums.get(line, c))):
                    take(self.rows * line + number, c, part)

    def parted(self, sums: Expr) -> list[Expr]:
        """A line's sums with a vector of columns, (lanes,) for each of its rows."""
        return [sums]

    def runs_at_once(self, lines: int, columns: int) -> int:
        """Runs in a turn of a tile's inner loop: one where the sums of rows that are multiplied together fill the
        registers."""
        return 1 if self.rows > 1 else vectors.runs_at_once(lines * columns * self.run)

    # ---- How factors lie

    def words(self, buffer: Expr, index: Sequence[Expr], count: int) -> Expr:
        """`count` words of neighbours."""
        raise NotImplementedError

    def steps(self, buffer: Expr, at: At, rows: Sequence[Expr], first: Expr, count: int) -> list[Expr]:
        """`count` steps from `first` on of a line whose rows lie where they are."""
        return elements(self.words(buffer, at(rows[0], first * self.group), count), count)

    def pack_columns(self, packed: Expr, strips: Strips, scale: float) -> None:
        """B of these columns. Factors in float32 take the products' scale."""
        raise NotImplementedError

    def pack_rows(self, packed: Expr, columns: Sequence[Chunk], view: HeadView, first: Expr, count: Expr) -> None:
        """B of `count` rows of `view` from `first` on, each with all columns; zeros beyond them, as far as a step
        reaches."""
        raise NotImplementedError

    def as_factors(self, sums: Sequence[Expr], lanes: int) -> Expr:
        """A step of words, of `group` vectors of sums."""
        raise NotImplementedError

    def element(self, word: Expr, place: Expr) -> Expr:
        """The element at one of the places of a word, as float32."""
        raise NotImplementedError

    def rescaled(self, words: Expr, factor: Expr, lanes: int) -> Expr:
        """All elements of a vector of words times a vector of factors."""
        raise NotImplementedError

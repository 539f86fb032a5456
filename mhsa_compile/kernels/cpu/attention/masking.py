"""What the queries of one task see, and what their scores are: a window around their place, the steps of scores, bits
known beforehand.

`kv_length` is the number of keys of the task's batch entry: nothing beyond it is read.

Query lane i is row first_query + i. A hidden score becomes -inf by a select, so that NaN cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.attention.matmuls import TaskOperands
from mhsa_compile.kernels.cpu.score_parts import TilePart, place_of
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, constant, materialize, splat
from mhsa_compile.kernels.interface.score_step import first


@dataclass(frozen=True)
class Bits:
    """A static mask's visible pairs: bit i of `buffer[row, column]` is lane i of that column of queries."""

    buffer: Expr
    row: Expr  # of the block's first key
    lanes: int


class TileMask:
    """Which keys the rows of one tile see, and what their scores are: by its place, by `parts` of the steps."""

    def __init__(self, operands: TaskOperands, queries: int, keys: int, parts: Sequence[TilePart], lanes: int) -> None:
        self.op, self.queries, self.parts = operands.op, queries, parts
        self.first_query, self.q_length, self.kv_length = operands.first_query, operands.q_length, operands.kv_length
        self.bits: Bits | None = None
        self.place = place_of(self.op, self.first_query, self.q_length, self.kv_length)  # of lane 0 among the keys
        self.leftmost = self.rightmost = None  # the first and the last key that lane 0 sees; lane i sees i further
        if (window := self.op.window) is not None:
            self.leftmost = None if window.left is None else materialize(self.place - window.left)
            self.rightmost = None if window.right is None else materialize(self.place + window.right)
        self.lanes, self.columns = lanes, vectors.chunks(queries, lanes)
        for part in parts:
            part.begin(self, keys)
        self.hides = self.op.any_step("hides")
        self.blind = any(part.blind for part in parts)
        self.looks = any(part.looks for part in parts)
        self.score_hides = any(part.score_hides for part in parts)

    # Blocks of keys.

    def look(self, first_key: Expr, count: Expr) -> Expr | None:
        """Whether any row sees any key of a block, as far as the steps tell; None: they do not."""
        looks = [own for part in self.parts if (own := part.look(first_key, count)) is not None]
        return reduce(T.And, looks) if looks else None

    def read_block(self, first_key: Expr, count: Expr) -> None:
        """Reads what the steps need of a block."""
        for part in self.parts:
            part.read_block(first_key, count)

    def visible_to_any(self) -> tuple[Expr, Expr]:
        """(first, end): no row sees a key outside."""
        first, end = T.int64(0), self.kv_length
        if self.leftmost is not None:
            first = materialize(T.max(first, T.min(self.leftmost, self.kv_length)))
        if self.rightmost is not None:
            # What the last lane sees: it is `queries` - 1 further than lane 0, and the end is one behind.
            end = materialize(T.max(first, T.min(end, self.rightmost + self.queries)))
        return first, end

    def visible_to_all(self) -> tuple[Expr, Expr]:
        """(first, end): every row sees the keys between them; possibly none."""
        if self.blind:
            return T.int64(0), T.int64(0)
        first, end = T.int64(0), self.kv_length
        if self.leftmost is not None:
            first = self.leftmost + (self.queries - 1)
        if self.rightmost is not None:
            end = T.min(end, self.rightmost + 1)
        for part in self.parts:
            end = part.whole_end(end)
        return materialize(first), materialize(end)

    def visible_to_rows(self, base: Expr, rows: int, first_key: Expr, count: Expr) -> tuple[Expr, Expr]:
        """(first, end) within a block: no lane of base .. base + rows sees a key of it outside."""
        first, end = T.int64(0), count
        if self.leftmost is not None:
            first = materialize(T.max(first, T.min(count, self.leftmost + base - first_key)))
        if self.rightmost is not None:
            end = materialize(T.max(first, T.min(count, self.rightmost + (base + rows) - first_key)))
        return first, end

    # Scores.

    def score(self, tile: RegisterTile, keys: list[Expr], base: Expr) -> None:
        """Products of queries and keys, times score_factor, become scores in units of log2. Row r is of keys[r], number
        base + r of its block."""
        for part in self.parts:
            part.score(tile, keys, base)

    def hide(self, score: Expr, row: Expr, key: Expr, column: Chunk) -> Expr:
        """The scores of a column of queries for `key`, number `row` of its block; -inf where it is hidden."""
        first, lanes = column
        minus_infinity = constant(-math.inf, lanes)
        lane = T.Ramp(T.int32(0), T.int32(1), lanes) if lanes > 1 else T.int32(0)
        if self.bits is not None:
            word = T.cast(self.bits.buffer[self.bits.row + row, first // lanes], "int32")
            flag = splat(T.int32(1), lanes) << lane
            score = T.Select((splat(word, lanes) & flag) != splat(T.int32(0), lanes), score, minus_infinity)
            if not self.op.any_step("counts_keys"):  # the bits hold all the rest
                return score
        for part in self.parts:
            score = part.hide(score, row, key, column)
        # One subtraction a key in int64, then int32, whose vectors have as many lanes as the scores'.
        if self.rightmost is not None:  # lane i sees it if it is at most rightmost + i
            frontier = T.cast(materialize(key - self.rightmost - first), "int32")
            score = T.Select(splat(frontier, lanes) <= lane, score, minus_infinity)
        if self.leftmost is not None:
            frontier = T.cast(materialize(key - self.leftmost - first), "int32")
            score = T.Select(splat(frontier, lanes) >= lane, score, minus_infinity)
        # Beyond the last key its row was read again; the number tells.
        return T.Select(splat(key < self.kv_length, lanes), score, minus_infinity)

    def sees(self, lane: Expr, row: Expr, key: Expr) -> Expr:
        """Whether query `lane` sees `key`, number `row` of its block: a single pair, where speed does not matter."""
        visible = key < self.kv_length
        if self.bits is not None:
            width = self.bits.lanes
            column, bit = T.truncdiv(lane, T.int64(width)), T.cast(T.truncmod(lane, T.int64(width)), "int32")
            word = T.cast(self.bits.buffer[self.bits.row + row, column], "int32")
            visible = T.And(visible, ((word >> bit) & T.int32(1)) == T.int32(1))
        for part in self.parts:
            if (own := part.sees(lane, row, key)) is not None:
                visible = T.And(visible, own)
        if self.rightmost is not None:
            visible = T.And(visible, key <= self.rightmost + lane)
        if self.leftmost is not None:
            visible = T.And(visible, key >= self.leftmost + lane)
        return visible

    # What moves with the reference of the softmax: origins of a bias, of at most one part.

    def listen(self, key_tile: int) -> None:
        for part in self.parts:
            part.listen(key_tile)

    def prepare(self) -> None:
        for part in self.parts:
            part.prepare(self.columns)

    def add_bias(self, tile: RegisterTile, first_key: Expr) -> None:
        for part in self.parts:
            part.add_bias(tile, first_key)

    def renew_bias(self, tile: RegisterTile, first_key: Expr) -> None:
        for part in self.parts:
            part.renew_bias(tile, first_key)

    def move(self, column: Chunk, whether: Expr, key: Expr) -> Expr | None:
        """What each lane's scores lose where origins move to `key`, None where nothing moves."""
        return first(part.move(column, whether, key) for part in self.parts)

    def lack(self, column: Chunk) -> Expr | None:
        """What the scores of each query lack, None where that is nothing."""
        return first(part.lack(column) for part in self.parts)

    def no_key(self, column: Chunk) -> Expr | None:
        """The score of no key for a column of queries; None where there is none."""
        return first(part.no_key(column) for part in self.parts)

"""What the queries of one task see: a band around their place, a mask that the call brings, bits known beforehand.

`kv_length` is the number of keys of the task's batch entry: nothing beyond it is read.

Query lane i is row first_query + i. A hidden score becomes -inf by a select, so that NaN cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_emission import Value
from mhsa_compile.kernels.cpu.attention.inputs import mask_bias, place_of
from mhsa_compile.kernels.cpu.score_functions import HIDDEN, SEEN, CapturedTensors, TaskFunction, number
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import (
    Chunk,
    Expr,
    any_lane,
    constant,
    let,
    load,
    materialize,
    splat,
    store,
)
from mhsa_compile.kernels.interface.ops import AttentionOp

MaskReader = Callable[[Expr, Expr], Expr]
"""(query row, key) -> the mask's element, as a bool or a float32."""


@dataclass(frozen=True)
class Bits:
    """A static mask's visible pairs: bit i of `buffer[row, column]` is lane i of that column of queries."""

    buffer: Expr
    row: Expr  # of the block's first key
    lanes: int


@dataclass(frozen=True)
class FunctionInputs:
    """What the functions of scores of one task are told beside its rows and keys."""

    tensors: CapturedTensors
    b: Expr
    h: Expr


class TileMask:
    """Which keys the rows of one tile see."""

    def __init__(
        self,
        op: AttentionOp,
        *,
        queries: int,
        keys: int,
        first_query: Expr,
        q_length: Expr,
        kv_length: Expr,
        mask: MaskReader | None,
        functions: FunctionInputs,
        lanes: int,
    ) -> None:
        self.op, self.queries, self.mask = op, queries, mask
        self.first_query, self.q_length, self.kv_length = first_query, q_length, kv_length
        self.bits: Bits | None = None
        self.place = place_of(op, first_query, q_length, kv_length)  # of lane 0 among the keys
        self.leftmost = self.rightmost = None  # the first and the last key that lane 0 sees; lane i sees i further
        if op.band is not None:
            self.leftmost = None if op.band.left is None else materialize(self.place - op.band.left)
            self.rightmost = None if op.band.right is None else materialize(self.place + op.band.right)
        self._bias = T.alloc_buffer((keys, queries), "float32") if self._is_dense else None
        self.columns = vectors.chunks(queries, lanes)
        self.mask_mod, self.score_mod = (self._function(functions, name) for name in ("mask_mod", "score_mod"))
        self._mod_bias = None if self.mask_mod is None else T.alloc_buffer((keys, queries), "float32")
        self._mod_hides: Expr | None = None  # whether mask_mod hides anything of the block
        self._modified = T.alloc_buffer((keys, queries), "float32") if self.score_hides else None

    def _function(self, given: FunctionInputs, name: str) -> TaskFunction | None:
        """The spec's function of this name, ready to be computed with the scores of the tile."""
        if getattr(self.op, name) is None:
            return None
        function = TaskFunction(given.tensors, name, self.queries, frozenset({"q_idx"}))
        first, last = (place_of(self.op, i, self.q_length, self.kv_length) for i in (T.int64(0), self.q_length - 1))
        low, high = (materialize(T.cast(end, "int32"), "int32") for end in (first, last))
        b, h = (number(materialize(value)) for value in (given.b, given.h))
        for lane, lanes in self.columns:
            # Rows beyond the last one are as the last one, so that nothing is read from outside of a tensor.
            ahead = T.Ramp(T.int32(0), T.int32(1), lanes) if lanes > 1 else T.int32(0)
            place = splat(materialize(T.cast(self.place + lane, "int32"), "int32"), lanes) + ahead
            held = T.max(splat(low, lanes), T.min(splat(high, lanes), place))
            q_idx = Value(materialize(held, "int32", lanes), "int32", lanes)
            function.prepare(lane, lanes, {"b": b, "h": h, "q_idx": q_idx})
        return function

    @property
    def score_hides(self) -> bool:
        """Whether score_mod may make a score -inf."""
        return self.op.score_mod is not None and self.op.score_mod.may_be_infinite

    def keep_modified(self, score: Expr, row: Expr, column: Chunk) -> Expr:
        """The scores that score_mod gave a column of queries for key number `row` of the block, once `sees` has
        them."""
        if self._modified is None:
            return score
        score = materialize(score, "float32", column[1])
        store(self._modified, [row, T.int64(column[0])], score, column[1])
        return score

    def read_function(self, first_key: Expr, count: Expr) -> Expr:
        """Computes mask_mod over the keys of a block, and tells whether any row sees any of them."""
        assert self.mask_mod is not None and self._mod_bias is not None
        function, buffer = self.mask_mod, self._mod_bias
        seen, hidden = (vectors.RegisterTile(1, self.columns, "int32") for _ in range(2))
        for tile in (seen, hidden):
            tile.each(lambda r, c: splat(T.int32(0), self.columns[c][1]))
        with T.serial(count) as row:
            key = number(materialize(first_key + row))
            for c, (lane, lanes) in enumerate(self.columns):
                bias = materialize(function.bias(lane, lanes, key), "float32", lanes)
                store(buffer, [row, T.int64(lane)], bias, lanes)
                one, nothing = splat(T.int32(1), lanes), constant(HIDDEN, lanes)
                seen.set(0, c, T.Select(bias == nothing, seen.get(0, c), one))
                # NaN is not seen, either: the masks make a score of it.
                hidden.set(0, c, T.Select(bias == constant(SEEN, lanes), hidden.get(0, c), one))
        self._mod_hides = materialize(T.cast(self._any(hidden), "int32"), "int32")
        return self._any(seen)

    def _any(self, flags: vectors.RegisterTile) -> Expr:
        found = None
        for c, (_, lanes) in enumerate(self.columns):
            one = any_lane(flags.get(0, c) != splat(T.int32(0), lanes), lanes)
            found = one if found is None else T.Or(found, one)
        return found

    @property
    def _is_dense(self) -> bool:
        """Whether the mask may differ from query to query (a key padding mask is the same for all)."""
        return self.op.mask is not None and self.op.mask.dims[2] != 1

    @property
    def hides(self) -> bool:
        """Whether any key is hidden from any query."""
        op = self.op
        return self.score_hides or any(x is not None for x in (op.band, op.mask, op.static_mask, op.mask_mod))

    def seen_by_any(self) -> tuple[Expr, Expr]:
        """(first, end): no row sees a key outside."""
        first, end = T.int64(0), self.kv_length
        if self.leftmost is not None:
            first = materialize(T.max(first, T.min(self.leftmost, self.kv_length)))
        if self.rightmost is not None:
            # What the last lane sees: it is `queries` - 1 further than lane 0, and the end is one behind.
            end = materialize(T.max(first, T.min(end, self.rightmost + self.queries)))
        return first, end

    def seen_by_all(self) -> tuple[Expr, Expr]:
        """(first, end): every row sees the keys between them; possibly none."""
        if self.mask is not None:
            return T.int64(0), T.int64(0)
        first, end = T.int64(0), self.kv_length
        if self.leftmost is not None:
            first = self.leftmost + (self.queries - 1)
        if self.rightmost is not None:
            end = T.min(end, self.rightmost + 1)
        if self._mod_hides is not None:
            end = T.Select(self._mod_hides != T.int32(0), T.int64(0), end)
        return materialize(first), materialize(end)

    def seen_by_rows(self, base: Expr, rows: int, first_key: Expr, count: Expr) -> tuple[Expr, Expr]:
        """(first, end) within a block: no lane of base .. base + rows sees a key of it outside."""
        first, end = T.int64(0), count
        if self.leftmost is not None:
            first = materialize(T.max(first, T.min(count, self.leftmost + base - first_key)))
        if self.rightmost is not None:
            end = materialize(T.max(first, T.min(count, self.rightmost + (base + rows) - first_key)))
        return first, end

    def read_block(self, first_key: Expr, count: Expr) -> None:
        """Reads the mask over a block: bias[j, i] = the mask at (query i, key j) as a number to add, in units of log2;
        -inf where it hides."""
        if self._bias is None:
            return
        assert self.mask is not None
        # Row by row, as the mask lies in memory; stored with the queries along the lanes, as scores are.
        with T.serial(T.int64(self.queries)) as i:
            query = materialize(T.min(self.first_query + i, self.q_length - 1))
            with T.serial(count) as j:
                store(self._bias, [j, i], mask_bias(self.op.mask, self.mask(query, first_key + j)), 1)

    def hide(self, score: Expr, row: Expr, key: Expr, column: Chunk) -> Expr:
        """The scores of a column of queries for `key`, number `row` of its block; -inf where it is hidden."""
        first, lanes = column
        hidden = constant(-math.inf, lanes)
        lane = T.Ramp(T.int32(0), T.int32(1), lanes) if lanes > 1 else T.int32(0)
        if self.bits is not None:
            word = T.cast(self.bits.buffer[self.bits.row + row, first // lanes], "int32")
            flag = splat(T.int32(1), lanes) << lane
            score = T.Select((splat(word, lanes) & flag) != splat(T.int32(0), lanes), score, hidden)
            if not self.op.lengths:  # the bits hold all the rest
                return score
        if self.mask is not None:
            if self._bias is not None:
                bias = let(load(self._bias, [row, T.int64(first)], lanes))
            else:
                bias = splat(let(mask_bias(self.op.mask, self.mask(T.int64(0), key))), lanes)
            # Not the sum alone: NaN - infinity would be NaN, where the score is hidden.
            score = T.Select(bias == hidden, hidden, score + bias)
        if self._mod_bias is not None:
            bias = let(load(self._mod_bias, [row, T.int64(first)], lanes))
            score = T.Select(bias == hidden, hidden, score + bias)
        # One subtraction a key in int64, then int32, whose vectors have as many lanes as the scores'.
        if self.rightmost is not None:  # lane i sees it if it is at most rightmost + i
            frontier = T.cast(materialize(key - self.rightmost - first), "int32")
            score = T.Select(splat(frontier, lanes) <= lane, score, hidden)
        if self.leftmost is not None:
            frontier = T.cast(materialize(key - self.leftmost - first), "int32")
            score = T.Select(splat(frontier, lanes) >= lane, score, hidden)
        # Beyond the last key its row was read again; the number tells.
        return T.Select(splat(key < self.kv_length, lanes), score, hidden)

    def sees(self, lane: Expr, row: Expr, key: Expr) -> Expr:
        """Whether query `lane` sees `key`, number `row` of its block: a single pair, where speed does not matter."""
        seen = key < self.kv_length
        if self.bits is not None:
            width = self.bits.lanes
            column, bit = T.truncdiv(lane, T.int64(width)), T.cast(T.truncmod(lane, T.int64(width)), "int32")
            word = T.cast(self.bits.buffer[self.bits.row + row, column], "int32")
            seen = T.And(seen, ((word >> bit) & T.int32(1)) == T.int32(1))
        if self.mask is not None:
            query = T.min(self.first_query + lane, self.q_length - 1)
            seen = T.And(seen, mask_bias(self.op.mask, self.mask(query, key)) != T.float32(-math.inf))
        if self._modified is not None:
            seen = T.And(seen, self._modified[row, lane] != T.float32(HIDDEN))
        if self._mod_bias is not None:
            seen = T.And(seen, self._mod_bias[row, lane] != T.float32(HIDDEN))
        if self.rightmost is not None:
            seen = T.And(seen, key <= self.rightmost + lane)
        if self.leftmost is not None:
            seen = T.And(seen, key >= self.leftmost + lane)
        return seen

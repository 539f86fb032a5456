"""The scores of a few query rows of one head, by one warp: 32 keys at a time, a key for each lane.

It is what looks into a softmax: float32 throughout, for any width of heads, without tensor cores. What a lane reads of
its key serves all rows of the warp; rows of queries are the same for all lanes, and come from the first cache.

A score has two parts, in units of log2: base + tilt * (key - place of the row). Distances enter only as
differences between two keys of a row. So they are small, and exact, wherever its largest scores lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
from numpy.typing import NDArray
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments, attention_arguments
from mhsa_compile.kernels.common.buffers import argument
from mhsa_compile.kernels.common.head_layout import head_view
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.attention.key_range import FAR
from mhsa_compile.kernels.cuda.attention.thread_scores import thread_parts
from mhsa_compile.kernels.cuda.primitives.inputs import keys_of
from mhsa_compile.kernels.cuda.primitives.simt import WARP, clear, materialize, registers, set_register
from mhsa_compile.kernels.cuda.primitives.vector_copy import Piece, piece_of, row_steps
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.interface.score_step import first

ROWS, WARPS = 4, 4
"""Rows of a warp, and warps of a block."""


def packed_bits(pairs: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """(1 or H, L, words): bit i of word w says whether the query sees key 32 w + i."""
    heads, L, S = pairs.shape
    padded = np.zeros((heads, L, -(-S // WARP) * WARP), np.bool_)
    padded[:, :, :S] = pairs
    return np.packbits(padded, axis=-1, bitorder="little").view(np.uint32)


@dataclass(frozen=True)
class RowCall(AttentionArguments):
    """The arguments of a call that looks into an attention, those of the attention and a static mask's bits."""

    bits: Expr | None

    @classmethod
    def arguments(cls, op: AttentionOp) -> RowCall:
        arguments, bits = attention_arguments(op), None
        if op.pairs is not None:
            heads, L, S = op.pairs.shape
            bits = argument("bits", [T.int64(heads), T.int64(L), T.int64(-(-S // WARP))], "uint32")
        return cls(**vars(arguments), bits=bits)


class RowScores:
    """ROWS rows of head `h` of batch entry `b`: `numbers`, int32, are held to those that there are."""

    def __init__(self, call: RowCall, b: Expr, h: Expr, numbers: list[Expr], lane: Expr) -> None:
        op = self.op = call.op
        self.lane, self.bits, self._head = lane, call.bits, h
        queries = materialize(T.cast(call.q_length, "int32"))
        self.kv_length, self._has_queries = keys_of(call, b), queries > 0
        self._parts = thread_parts(call, b, h)
        for part in self._parts:
            part.read()
        self.no_key = first(part.no_key(0) for part in self._parts)
        self.tilt = first(part.tilt() for part in self._parts)
        self.rows = [materialize(T.max(T.int32(0), T.min(number, queries - 1))) for number in numbers]
        shift = materialize(self.kv_length - queries) if op.from_end else T.int32(0)
        self.places = [materialize(row + shift) for row in self.rows]
        left, right = (None, None) if op.window is None else (op.window.left, op.window.right)
        self._left = None if left is None else [materialize(place - min(left, FAR)) for place in self.places]
        self._end = [self.kv_length for _ in self.rows]
        """The first key that each row does not see any more."""
        if right is not None:
            self._end = [materialize(T.min(self.kv_length, p + (min(right, FAR) + 1))) for p in self.places]
        group = T.int64(op.num_heads // op.num_kv_heads)
        self._query = head_view(call.inputs[op.query.buffer], op.query, op.head_dim, b, h)
        key_head = materialize(T.truncdiv(h, group), "int64")
        self._key = head_view(call.inputs[op.key.buffer], op.key, op.head_dim, b, key_head)
        self._piece = piece_of(op.dtype, op.head_dim, *row_steps(op.query), *row_steps(op.key))
        self.bases = registers(len(self.rows))
        """The base of the score of each row and this lane's key; -inf where it is hidden."""

    def groups(self) -> tuple[Expr, Expr]:
        """(first, end) in groups of 32 keys: no row sees a key outside."""
        begin = T.int32(0) if self._left is None else T.max(T.int32(0), reduce(T.min, self._left))
        end = reduce(T.max, self._end)
        end = T.Select(self._has_queries, T.max(T.int32(0), end), T.int32(0))  # where nobody asks, nothing is read
        begin = materialize(T.truncdiv(begin, T.int32(WARP)))
        return begin, materialize(T.max(begin, T.truncdiv(end + (WARP - 1), T.int32(WARP))))

    def over(self, body: Callable[[Expr], None]) -> None:
        """body(first key) for every group that some row may see, the bases made."""
        first, end = self.groups()
        with T.serial(first, end) as group:
            first_key = materialize(group * WARP)
            if self.bits is None:
                self._score(first_key, [])
                body(first_key)
                return
            words = self._words(group)
            # The words are the warp's, so no lane goes another way.
            with T.If(self._any(words)), T.Then():
                self._score(first_key, words)
                body(first_key)

    def at(self, group: Expr, ends: tuple[Expr, Expr]) -> None:
        """Makes the bases of one group, of which the rows see nothing outside of `ends`."""
        for r in range(len(self.rows)):
            set_register(self.bases, r, T.float32(-math.inf))
        with T.If(T.And(group >= ends[0], group < ends[1])), T.Then():
            words = [] if self.bits is None else self._words(group)
            with T.If(self._any(words)), T.Then():
                self._score(materialize(group * WARP), words)

    def _words(self, group: Expr) -> list[Expr]:
        """The static mask's bits of a group, for each row."""
        assert self.bits is not None
        head = T.int64(0) if int(self.bits.shape[0]) == 1 else self._head
        rows, word = (T.cast(row, "int64") for row in self.rows), T.cast(group, "int64")
        return [materialize(self.bits[head, row, word], "uint32") for row in rows]

    def _any(self, words: list[Expr]) -> Expr:
        """Whether a group has to be visited: where there is a static mask, only if bits of it are set for some row."""
        if not words:
            return T.bool(True)
        return reduce(or_, words) != T.uint32(0)

    def _score(self, first_key: Expr, words: list[Expr]) -> None:
        key = materialize(first_key + self.lane)
        # A lane beyond the last key reads that one; its own number hides it.
        there = materialize(T.max(T.int32(0), T.min(key, self.kv_length - 1)))
        self._multiply(T.cast(there, "int64"))
        for r, row in enumerate(self.rows):
            base = self._scaled(self.bases[r])
            for part in self._parts:
                base = part.masked(base, 0, row, there)
            visible = key < self._end[r]
            if self._left is not None:
                visible = T.And(visible, key >= self._left[r])
            if words:
                flag = (words[r] >> T.cast(self.lane, "uint32")) & T.uint32(1)
                visible = T.And(visible, flag != T.uint32(0))
            set_register(self.bases, r, T.Select(visible, base, T.float32(-math.inf)))

    def _multiply(self, key: Expr) -> None:
        """Puts the products of all rows with this lane's key into the bases."""
        of_key, of_query = (Piece(self._piece, self.op.dtype) for _ in range(2))
        clear(self.bases, len(self.rows))
        with T.serial(T.int64(self.op.head_dim // self._piece)) as step:
            column = step * self._piece
            of_key.load(self._key.buffer, self._key.at(key, column))
            for r, row in enumerate(self.rows):
                of_query.load(self._query.buffer, self._query.at(T.cast(row, "int64"), column))
                for i in range(self._piece):
                    set_register(self.bases, r, self.bases[r] + of_query[i] * of_key[i])

    def _scaled(self, product: Expr) -> Expr:
        own = first(part.exact(product) for part in self._parts)
        score = product * T.float32(self.op.scale * LOG2_E) if own is None else own
        for part in self._parts:
            score = part.element(score)
        return score

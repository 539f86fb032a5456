"""What of a thread's scores is hidden: by the place of its rows, by a mask that the call brings, by bits known
beforehand.

A hidden score becomes -inf by a select, so that NaN cannot pass.
"""

from __future__ import annotations

import math

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_scale import LARGEST, LOG2_E
from mhsa_compile.kernels.cuda.attention.block_sparsity import WORD
from mhsa_compile.kernels.cuda.attention.key_range import BlockKeyRange
from mhsa_compile.kernels.cuda.primitives.fragments import Fragment, OfRows, of_row
from mhsa_compile.kernels.cuda.primitives.inputs import wide
from mhsa_compile.kernels.cuda.primitives.mask_reader import MaskReader
from mhsa_compile.kernels.cuda.primitives.warp import (
    COLUMNS,
    ROWS,
    Expr,
    ThreadIndex,
    materialize,
    registers,
    set_register,
)


def rows_of(place: ThreadIndex, first: Expr, queries: int, warps: int) -> tuple[Expr, ...]:
    """The numbers of the rows that a thread has, of those from `first` on, where each warp has as many of the block's
    rows as another, and a thread those two of C that it holds of each tile of its warp: number 2 m + h is row
    16 m + g + 8 h of the warp."""
    share = queries // warps
    base = materialize(first + place.warp * share + place.g)
    return tuple(base + (ROWS * m + 8 * h) for m in range(share // ROWS) for h in range(2))


class ScoreMask:
    """Which of a thread's scores are hidden: those in its `cells`, of the rows with these `numbers` among all queries,
    of a block that sees the keys of `key_range`."""

    def __init__(
        self, key_range: BlockKeyRange, cells: Fragment, numbers: tuple[Expr, ...], mask: OfRows[MaskReader]
    ) -> None:
        self.op, self.key_range, self.cells, self.numbers, self.mask = key_range.op, key_range, cells, numbers, mask

    def hide(
        self, scores: Expr, tiles: int, first_key: Expr, bits_row: Expr | None, first_word: Expr | int = 0
    ) -> None:
        """Adds the mask to scores of the keys from `first_key` on, in units of log2; what is hidden becomes -inf. The
        word `first_word` of a tile's rows of bits is that of `first_key`."""
        if self.mask is None or not self.cells.in_pairs:
            self._hide_by_place(scores, tiles, first_key, bits_row, first_word)
            return
        # 1. What the call brings.
        self._add_mask(scores, tiles, first_key)
        # 2. Edges, where there are any.
        with T.If(T.Not(self.key_range.seen_but_for_mask(first_key, tiles * COLUMNS))), T.Then():
            self._hide_by_place(scores, tiles, first_key, None, 0)

    def _add_mask(self, scores: Expr, tiles: int, first_key: Expr) -> None:
        """Adds the mask of the call, two rows at a time, so that enough is under way at once, and not more than there
        are registers for."""
        # Every other offset: the one behind it is the other half of a pair.
        base, offsets = materialize(first_key + self.cells.first), self.cells.offsets(tiles)[::2]
        readers = [of_row(self.mask, row) for row in range(len(self.numbers))]
        assert readers[0] is not None
        # One branch for all rows: it depends on the mask's width and on these keys alone.
        has_pairs = materialize(readers[0].has_pairs(first_key + tiles * COLUMNS), "bool")
        for first in range(0, len(readers), 2):
            rows = [(row, reader) for row, reader in enumerate(readers[first : first + 2], first) if reader is not None]
            count = len(offsets) * readers[0].pair_words
            words = registers(len(rows) * count, "uint32")
            queries = [T.min(self.numbers[row], self.key_range.q_length - 1) for row, _ in rows]
            with T.If(has_pairs):
                with T.Then():
                    for i, (_, reader) in enumerate(rows):
                        reader.read_pairs(words, i * count, queries[i], base, offsets)
                with T.Else():
                    for i, (_, reader) in enumerate(rows):
                        reader.read_each(words, i * count, queries[i], base, offsets)
            for i, (row, reader) in enumerate(rows):
                for number in range(2 * len(offsets)):
                    at = self.cells.at(row, tiles, number)
                    element = reader.element(words, i * count + number // 2 * reader.pair_words, number % 2)
                    set_register(scores, at, self._with_mask(scores[at], element))

    def _hide_by_place(
        self, scores: Expr, tiles: int, first_key: Expr, bits_row: Expr | None, first_word: Expr | int
    ) -> None:
        base = materialize(first_key + self.cells.first)
        offsets, left = self.cells.offsets(tiles), self.key_range.left
        for row, number in enumerate(self.numbers):
            # A thread's words are shifted to its first key, so that offsets are constant bits of them.
            words = None if bits_row is None else self._bits(number, bits_row, offsets[-1], first_word)
            end = materialize(self.key_range.end_of(number) - base)
            first = None if left is None else materialize(number + self.key_range.shift - left - base)
            for i, offset in enumerate(offsets):
                at = self.cells.at(row, tiles, i)
                score = scores[at] if self.cells.in_pairs else self._masked(scores[at], row, base + offset)
                if words is not None:
                    flag = words[offset // WORD] & T.uint32(1 << offset % WORD)
                    score = _select(flag != T.uint32(0), score)
                if words is None or self.op.lengths:  # else the bits hold what is beyond the last key
                    score = _select(T.int32(offset) < end, score)
                if first is not None:
                    score = _select(T.int32(offset) >= first, score)
                set_register(scores, at, score)

    def _bits(self, number: Expr, bits_row: Expr, last: int, first_word: Expr | int) -> Expr:
        """The words of a query from `first_word` on, its thread's first key in bit 0, up to that at offset
        `last`; all ones for a whole tile."""
        visits = self.key_range.visits
        assert visits is not None
        count, row = last // WORD + 1, number - self.key_range.first_row
        words, shift = registers(count, "uint32"), T.cast(self.cells.first, "uint32")
        for w in range(count):
            read = visits.bits[T.max(bits_row, T.int32(0)) + row, first_word + w]
            set_register(words, w, T.if_then_else(bits_row >= 0, read >> shift, T.uint32(0xFFFFFFFF)))
        return words

    def _masked(self, score: Expr, row: int, key: Expr) -> Expr:
        """A score with what the mask of the call adds to it."""
        reader = of_row(self.mask, row)
        if reader is None or self.op.mask is None:
            return score
        # Beyond the last key the last one's element is read; the number hides it.
        last_key = T.max(T.int32(0), self.key_range.kv_length - 1)
        element = reader(T.min(self.numbers[row], self.key_range.q_length - 1), T.min(key, last_key))
        return self._with_mask(score, element)

    def _with_mask(self, score: Expr, element: Expr) -> Expr:
        """A score with an element of the mask, which says whether it takes part, or what is added to it."""
        if self.op.mask is not None and self.op.mask.dtype == "bool":
            return _select(element, score)
        bias = materialize(wide(element), "float32")
        # What overflows to -inf in units of log2 hides as -inf does, whatever the score.
        return T.Select(bias < T.float32(-LARGEST / LOG2_E), T.float32(-math.inf), score + bias * T.float32(LOG2_E))


def _select(seen: Expr, score: Expr) -> Expr:
    return T.Select(seen, score, T.float32(-math.inf))

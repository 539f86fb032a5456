"""The scores of a thread's rows: what the steps of scores make of products, what of them is hidden, scores of no key.
Steps give kernels for GPUs their parts, `ThreadPart`, which are the identity where a step does not say otherwise.
Scores are in units of log2, so that 2^x makes probs of them.

Plain products become probs in one multiply-add, 2^(factor s - m). Where something is added to the scores or bends
them, they are brought to units of log2 first, and the factor is 1. A hidden score becomes -inf by a select, so that NaN
cannot pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.attention.block_sparsity import WORD
from mhsa_compile.kernels.cuda.attention.key_range import BlockKeyRange
from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.inputs import wide
from mhsa_compile.kernels.cuda.primitives.simt import COLUMNS, ROWS, Fragment, OfRows, materialize, set_register
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.interface.score_step import ScoreStep, first

CellScore = Callable[[Expr, int], Expr]
"""(score, offset of its key from the thread's first one) -> what becomes of it."""


class CudaMath:
    """Arithmetic on single scores."""

    unit: ClassVar[float] = LOG2_E

    def constant(self, value: float) -> Expr:
        return T.float32(value)

    def tanh(self, x: Expr) -> Expr:
        return T.tanh(x)

    def element(self, buffer: Expr, at: Sequence[Expr]) -> Expr:
        return materialize(wide(buffer[tuple(at)]) * T.float32(self.unit), "float32")


@dataclass(frozen=True)
class ThreadTask:
    """The rows of a thread: of batch entry `b`, and of one head, or each of its own."""

    op: AttentionOp
    own: Sequence[Expr]
    b: Expr
    heads: OfRows[Expr]


class ThreadPart:
    """What a step does to the scores of a thread."""

    masks = False
    """Whether it hides pairs that only the call knows, by `add` and `masked`."""

    def __init__(self, step: ScoreStep, task: ThreadTask) -> None:
        self.step, self.task = step, task

    def of_heads(self, read: Callable[[Expr], Any]) -> OfRows[Any]:
        """What is read of the thread's head, or of that of each of its rows."""
        heads = self.task.heads
        return tuple(map(read, heads)) if isinstance(heads, tuple) else read(heads)

    def read(self) -> None:
        """Reads what the step needs of its heads."""

    def begin(self, mask: ThreadScores) -> None:
        """Computes what depends on the rows alone."""

    def of_product(self, product: Expr) -> Expr | None:
        """The score of a product, where the step wants it in units of its own."""
        return self.exact(product)

    def exact(self, product: Expr) -> Expr | None:
        """`of_product` to the last bits: without the quick instructions that tiles of 16-bit types can afford."""
        factor = self.step.factor(self.task.op.scale)
        return None if factor is None else self.step.score(CudaMath(), product * T.float32(factor))

    def element(self, score: Expr) -> Expr:
        """What becomes of a score by itself, after `exact`."""
        changes = self.step.elementwise and self.step.factor(self.task.op.scale) is None
        return self.step.score(CudaMath(), score) if changes else score

    def of_row(self, row: int, first_key: Expr) -> CellScore | None:
        """What becomes of the scores of a row and the keys of a tile; None: they stay."""
        return (lambda score, _: self.element(score)) if self.step.elementwise else None

    def add(self, scores: Expr, tiles: int, first_key: Expr, mask: ThreadScores) -> None:
        """Hides scores, and changes them, whose keys come in pairs."""

    def masked(self, score: Expr, row: int, query: Expr, key: Expr) -> Expr:
        """`add` of a single score, of a query and a key that there are."""
        return score

    def no_key(self, row: int) -> Expr | None:
        """A score of no key, counted from the row's place; None where there is none."""
        return None

    def lack(self, row: int) -> Expr | None:
        """What the scores of a row lack, since they are not counted from its place."""
        return None

    def tilt(self) -> Expr | None:
        """What the head adds to a score for each key further on, where rows are of one head and may ask for it."""
        return None


def thread_parts(arguments: AttentionArguments, b: Expr, heads: OfRows[Expr]) -> list[ThreadPart]:
    """The parts of all steps, in their order."""
    tasks = [(step, ThreadTask(arguments.op, own, b, heads)) for step, own in arguments.steps()]
    return [(step.cuda_rows or ThreadPart)(step, task) for step, task in tasks]


def rows_of(place: simt.ThreadIndex, first: Expr, queries: int, warps: int) -> tuple[Expr, ...]:
    """The numbers of the rows that a thread has, of those from `first` on, where each warp has as many of the block's
    rows as another, and a thread those two of C that it holds of each tile of its warp: number 2 m + h is row
    16 m + g + 8 h of the warp."""
    share = queries // warps
    base = materialize(first + place.warp * share + place.g)
    return tuple(base + (ROWS * m + 8 * h) for m in range(share // ROWS) for h in range(2))


class ThreadScores:
    """The scores in a thread's `cells`, of the rows with these `numbers` among all queries, of a block that sees the
    keys of `key_range`."""

    def __init__(
        self, key_range: BlockKeyRange, cells: Fragment, numbers: tuple[Expr, ...], parts: Sequence[ThreadPart]
    ) -> None:
        self.op, self.key_range, self.cells, self.numbers, self.parts = key_range.op, key_range, cells, numbers, parts
        self.masking = [part for part in parts if part.masks]
        # A maximum of products is one of scores only if the factor is positive.
        self.is_plain = not self.op.any_step("bends") and self.op.scale > 0
        self.factor = self.op.scale * LOG2_E if self.is_plain else 1.0
        for part in parts:
            part.read()
        for part in parts:
            part.begin(self)

    def begin(self, row_max: Expr, row_sum: Expr, row: int) -> None:
        """The maximum and the sum of a row before its first key: those of the score of no key, which one of its threads
        holds."""
        score = first(part.no_key(row) for part in self.parts)
        if score is None:
            set_register(row_max, row, T.float32(-math.inf))
            set_register(row_sum, row, T.float32(0))
            return
        for part in self.parts:
            if (lack := part.lack(row)) is not None:
                score = score - lack
        set_register(row_max, row, score)
        # Sums of the threads that share a row are added up in the end: one of them counts it.
        counts = T.And(self.cells.leads, T.Not(row_max[row] == T.float32(-math.inf)))
        set_register(row_sum, row, T.Select(counts, T.float32(1), T.float32(0)))

    def convert(self, scores: Expr, tiles: int, first_key: Expr) -> None:
        """Products become scores in units of log2, before anything is masked; nothing to do for plain ones."""
        if self.is_plain:
            return
        for row in range(len(self.numbers)):
            changes = [change for part in self.parts if (change := part.of_row(row, first_key)) is not None]
            for i, offset in enumerate(self.cells.offsets(tiles)):
                at = self.cells.at(row, tiles, i)
                score = self._of_product(scores[at])
                for change in changes:
                    score = change(score, offset)
                set_register(scores, at, score)

    def _of_product(self, product: Expr) -> Expr:
        own = first(part.of_product(product) for part in self.parts)
        return product * T.float32(self.op.scale * LOG2_E) if own is None else own

    def hide(
        self, scores: Expr, tiles: int, first_key: Expr, bits_row: Expr | None, first_word: Expr | int = 0
    ) -> None:
        """Masks scores of the keys from `first_key` on, in units of log2; what is hidden becomes -inf. The
        word `first_word` of a tile's rows of bits is that of `first_key`."""
        if not self.masking or not self.cells.in_pairs:
            self._hide_by_place(scores, tiles, first_key, bits_row, first_word)
            return
        # 1. What the call brings.
        for part in self.masking:
            part.add(scores, tiles, first_key, self)
        # 2. Edges, where there are any.
        with T.If(T.Not(self.key_range.visible_by_place(first_key, tiles * COLUMNS))), T.Then():
            self._hide_by_place(scores, tiles, first_key, None, 0)

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
                if words is None or self.op.any_step("counts_keys"):  # else the bits hold what is beyond the last key
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
        words, shift = simt.registers(count, "uint32"), T.cast(self.cells.first, "uint32")
        for w in range(count):
            word = visits.bits[T.max(bits_row, T.int32(0)) + row, first_word + w]
            set_register(words, w, T.if_then_else(bits_row >= 0, word >> shift, T.uint32(0xFFFFFFFF)))
        return words

    def _masked(self, score: Expr, row: int, key: Expr) -> Expr:
        """A score after the steps that only the call knows."""
        if not self.masking:
            return score
        # Beyond the last key the last one's element is read; the number hides it.
        last_key = T.max(T.int32(0), self.key_range.kv_length - 1)
        query, key = T.min(self.numbers[row], self.key_range.q_length - 1), T.min(key, last_key)
        for part in self.masking:
            score = part.masked(score, row, query, key)
        return score


def _select(visible: Expr, score: Expr) -> Expr:
    return T.Select(visible, score, T.float32(-math.inf))

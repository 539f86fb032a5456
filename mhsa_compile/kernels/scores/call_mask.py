"""A mask that the call brings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.plain_parts import Pair, PlainMath, PlainPart
from mhsa_compile.kernels.common.score_scale import LARGEST, LOG2_E
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.formats.choice import load_wide
from mhsa_compile.kernels.cpu.score_parts import RowPart, RowTask, TilePart, TileTask, with_bias
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, let, load, splat, store
from mhsa_compile.kernels.cpu.simd.vectors import materialize as cpu_materialize
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadPart, ThreadScores, ThreadTask
from mhsa_compile.kernels.cuda.primitives.inputs import MaskReader, wide
from mhsa_compile.kernels.cuda.primitives.simt import COLUMNS, materialize, of_row, registers, set_register
from mhsa_compile.kernels.interface.ops import AttentionOp, Dim, TensorInput
from mhsa_compile.kernels.interface.score_step import NodeScores, RowMeaning, ScoreStep, SomeRows

Reader = Callable[[Expr, Expr, Expr], Expr]
"""(head, query, key) -> the mask's element, a bool or a float32."""


class _CallMaskPlain(PlainPart):
    step: CallMask

    def _at(self, pair: Pair) -> list[Expr]:
        """Where the element is; an axis of 1 is for all."""
        at = (pair.b, pair.h, pair.i, pair.j)
        return [tirx.min(i, size - 1) for i, size in zip(at, self.task.own[0].shape, strict=True)]

    def score(self, score: Expr, pair: Pair) -> Expr:
        if self.step.dtype == "bool":
            return score
        return score + PlainMath().element(self.task.own[0], self._at(pair))

    def sees(self, pair: Pair) -> Expr:
        mask = self.task.own[0]
        if self.step.dtype == "bool":
            return mask[tuple(self._at(pair))]
        return PlainMath().element(mask, self._at(pair)) != PlainMath().constant(-math.inf)


class _CallMaskTile(TilePart):
    blind = True
    step: CallMask

    def __init__(self, step: CallMask, task: TileTask) -> None:
        super().__init__(step, task)
        self._reader = self.reader()

    def reader(self) -> Reader:
        return self.step.cpu_reader(tuple(self.task.own), self.task.b)

    def _element(self, query: Expr, key: Expr) -> Expr:
        return self.step.bias(self._reader(self.task.h, query, key))

    def begin(self, mask: TileMask, keys: int) -> None:
        self.mask = mask
        # A mask of keys is the same for all queries.
        dense = self.step.dims[2] != 1
        self._bias = T.alloc_buffer((keys, mask.queries), "float32") if dense else None

    def read_block(self, first_key: Expr, count: Expr) -> None:
        """bias[j, i] = the mask at (query i, key j) as a number to add."""
        if self._bias is None:
            return
        # Row by row, as the mask lies in memory; stored with the queries along the lanes, as scores are.
        with T.serial(T.int64(self.mask.queries)) as i:
            query = cpu_materialize(T.min(self.mask.first_query + i, self.mask.q_length - 1))
            with T.serial(count) as j:
                store(self._bias, [j, i], self._element(query, first_key + j), 1)

    def hide(self, score: Expr, row: Expr, key: Expr, column: Chunk) -> Expr:
        first, lanes = column
        if self._bias is not None:
            bias = let(load(self._bias, [row, T.int64(first)], lanes))
        else:
            bias = splat(let(self._element(T.int64(0), key)), lanes)
        return with_bias(score, bias, lanes)

    def sees(self, lane: Expr, row: Expr, key: Expr) -> Expr:
        query = T.min(self.mask.first_query + lane, self.mask.q_length - 1)
        return self._element(query, key) != T.float32(-math.inf)


class _CallMaskRows(RowPart):
    masked = True
    step: CallMask

    def __init__(self, step: CallMask, task: RowTask) -> None:
        super().__init__(step, task)
        self._reader = step.cpu_reader(tuple(task.own), task.b)

    def allocate(self, keys: int) -> None:
        self._bias = T.alloc_buffer((keys * self.task.layout.padded_rows,), "float32")

    def read_block(self, begin: Expr, count: Expr) -> None:
        layout = self.task.layout
        if self.step.dims[1:3] == (1, 1):  # the same for every row: a key's is stored for all of them at once
            with T.serial(count) as j:
                bias = let(self.step.bias(self._reader(T.int64(0), T.int64(0), begin + j)))
                for offset, lanes in vectors.chunks(layout.padded_rows, layout.lanes):
                    store(self._bias, [layout.place(j, 0) + offset], splat(bias, lanes), lanes)
            return
        with T.serial(T.int64(layout.rows)) as row:
            ratio = T.int64(self.task.ratio)
            query, head = cpu_materialize(T.truncdiv(row, ratio)), cpu_materialize(T.truncmod(row, ratio))
            head = cpu_materialize(self.task.first_head + head)
            with T.serial(count) as j:
                element = self._reader(head, query, begin + j)
                store(self._bias, [layout.place(j, 0) + row], self.step.bias(element), 1)

    def hide(self, score: Expr, begin: Expr, key: Expr, vector: int) -> Expr:
        lanes = self.task.layout.lanes
        return with_bias(score, let(load(self._bias, [self.task.layout.place(key, vector)], lanes)), lanes)


class _CallMaskThread(ThreadPart):
    masks = True
    step: CallMask

    def __init__(self, step: CallMask, task: ThreadTask) -> None:
        super().__init__(step, task)
        self._readers = self.of_heads(self._reader)

    def _reader(self, head: Expr) -> MaskReader:
        return MaskReader(self.task.own[0], self.task.b, head)

    def add(self, scores: Expr, tiles: int, first_key: Expr, mask: ThreadScores) -> None:
        """Two rows at a time, so that enough is under way at once, and not more than there are registers for."""
        # Every other offset: the one behind it is the other half of a pair.
        base, offsets = materialize(first_key + mask.cells.first), mask.cells.offsets(tiles)[::2]
        readers: list[MaskReader] = [of_row(self._readers, row) for row in range(len(mask.numbers))]  # type: ignore[misc]
        # One branch for all rows: it depends on the mask's width and on these keys alone.
        has_pairs = materialize(readers[0].has_pairs(first_key + tiles * COLUMNS), "bool")
        for first in range(0, len(readers), 2):
            rows = list(enumerate(readers[first : first + 2], first))
            count = len(offsets) * readers[0].pair_words
            words = registers(len(rows) * count, "uint32")
            queries = [T.min(mask.numbers[row], mask.key_range.q_length - 1) for row, _ in rows]
            with T.If(has_pairs):
                with T.Then():
                    for i, (_, reader) in enumerate(rows):
                        reader.read_pairs(words, i * count, queries[i], base, offsets)
                with T.Else():
                    for i, (_, reader) in enumerate(rows):
                        reader.read_each(words, i * count, queries[i], base, offsets)
            for i, (row, reader) in enumerate(rows):
                for number in range(2 * len(offsets)):
                    at = mask.cells.at(row, tiles, number)
                    element = reader.element(words, i * count + number // 2 * reader.pair_words, number % 2)
                    set_register(scores, at, self._with(scores[at], element))

    def masked(self, score: Expr, row: int, query: Expr, key: Expr) -> Expr:
        reader = of_row(self._readers, row)
        assert reader is not None
        return self._with(score, reader(query, key))

    def _with(self, score: Expr, element: Expr) -> Expr:
        """A score with an element of the mask, which says whether it takes part, or what is added to it."""
        if self.step.dtype == "bool":
            return T.Select(element, score, T.float32(-math.inf))
        bias = materialize(wide(element), "float32")
        # What overflows to -inf in units of log2 hides as -inf does, whatever the score.
        return T.Select(bias < T.float32(-LARGEST / LOG2_E), T.float32(-math.inf), score + bias * T.float32(LOG2_E))


@dataclass(frozen=True)
class CallMask(ScoreStep):
    """A mask (mB, mH, mL, mS), each axis 1 or full; True takes part, floats are added."""

    dtype: Literal["bool", "float32", "bfloat16", "float16"]
    dims: tuple[Dim, Dim, Dim, Dim]
    hides = True
    blind = True
    not_beside = dict.fromkeys(("cpu", "cuda"), "one that the call brings")
    absent_key = {"mask": None}  # noqa: RUF012
    role = "attn_mask"
    plain = _CallMaskPlain
    cpu_tile = _CallMaskTile
    cpu_rows = _CallMaskRows
    cuda_rows = _CallMaskThread

    @classmethod
    def mistake(cls, node: NodeScores) -> tuple[str, ...] | None:
        ((dtype, _),) = node.inputs.get(cls.role, ((node.dtype, None),))
        return None if dtype in ("bool", node.dtype) else (f"a bool or {node.dtype} {cls.role}", str(dtype))

    @classmethod
    def read(cls, node: NodeScores) -> CallMask | None:
        return None if cls.role not in node.inputs else CallMask(*node.inputs[cls.role][0])

    @property
    def bends(self) -> bool:  # type: ignore[override]
        return self.dtype != "bool"

    def arguments(self, op: AttentionOp) -> tuple[tuple[str, TensorInput], ...]:
        return (("mask", TensorInput(self.dtype, self.dims)),)

    def random_inputs(self, rng: np.random.Generator, kinds: Sequence[tuple[str, tuple[int, ...]]]) -> list[np.ndarray]:
        if self.dtype == "bool":
            return [rng.random(shape) < 0.9 for _, shape in kinds]
        return super().random_inputs(rng, kinds)

    def meaning(self, own: Sequence[np.ndarray], rows: SomeRows) -> RowMeaning:
        (mask,) = own
        mask = mask[rows.entries] if len(mask) > 1 else mask
        mask = mask[:, :, rows.rows] if mask.shape[2] > 1 else mask
        return RowMeaning(mask) if self.dtype == "bool" else RowMeaning(bias=mask.astype(np.float64))

    def semantics(self) -> dict[str, Any]:
        return {"mask": f"{self.dtype} {list(self.dims)}"}

    def key(self) -> dict[str, Any]:
        return {"mask": [self.dtype, *(dim != 1 for dim in self.dims)]}

    def cpu_reader(self, own: tuple[Expr, ...], b: Expr) -> Reader:
        """Reads an element; clamping each index makes an axis of 1 broadcast."""
        (mask,) = own
        last = [let(size - 1) for size in mask.shape]

        def read(head: Expr, query: Expr, key: Expr) -> Expr:
            at = [T.min(i, end) for i, end in zip((b, head, query, key), last, strict=True)]
            return mask[tuple(at)] if mask.dtype == "bool" else load_wide(mask, at, 1)

        return read

    def bias(self, element: Expr) -> Expr:
        """An element as a number to add to a score, in units of log2; -inf where it hides."""
        if self.dtype == "bool":
            return T.Select(element, T.float32(0), T.float32(-math.inf))
        return element * T.float32(LOG2_E)

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        if self.dtype != "bool":
            registers = row_tiles * (keys // 2 + 16)
            # What elements wait in is more than a formula takes beside them, so nothing is added for one.
            shared = max(0, min(40, registers - 24))
            return {"masks": registers - shared, "bent": shared}
        return {"masks": 24 + (8 * row_tiles if stages > 1 else 0)}


class _ChosenRowsTile(_CallMaskTile):
    def reader(self) -> Reader:
        """Reads the chosen row, whichever query asks."""
        bits: Expr = self.task.own[0]
        one_for_all = int(bits.shape[0]) == 1
        return lambda head, _, key: bits[T.int64(0) if one_for_all else head, self.task.place, key]


class ChosenRows(CallMask):
    """Rows of a static mask, nothing for one that is not there: a constant (1 or H, rows, S). A row of it is as a mask
    that is the same for all queries."""

    cpu_tile = _ChosenRowsTile

    def arguments(self, op: AttentionOp) -> tuple[tuple[str, TensorInput], ...]:
        return ()

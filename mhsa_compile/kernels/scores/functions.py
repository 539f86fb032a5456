"""mask_mod and score_mod, in FlexAttention's form: traced functions of a score and its places, with tensors that they
capture. A mask_mod says whether a query sees a key; a score_mod what a score becomes, after the formulas of one number
(limit.py) and before any mask or bias. Places of queries are counted as windows count them, from the first or from the
last key."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from types import MappingProxyType
from typing import Any, Self

from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.plain_parts import Pair, PlainMath, PlainPart, PlainTask, plain_function
from mhsa_compile.kernels.common.score_emission import TracedFunction, Value
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.score_functions import HIDDEN, SEEN, TaskFunction, number
from mhsa_compile.kernels.cpu.score_parts import RowPart, RowTask, TilePart, TileTask, place_of, with_bias
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, constant, let, load, materialize, splat, store
from mhsa_compile.kernels.cuda.attention.score_functions import ThreadFunction
from mhsa_compile.kernels.cuda.attention.thread_scores import CellScore, ThreadPart, ThreadScores, ThreadTask
from mhsa_compile.kernels.interface.ops import AttentionOp, TensorInput
from mhsa_compile.kernels.interface.score_step import NodeScores, ScoreStep
from mhsa_compile.spec.score_functions import ScoreFunction


@dataclass(frozen=True)
class FunctionStep(ScoreStep):
    """A function, and what it captures: inputs, in their order."""

    function: ScoreFunction
    tensors: tuple[TensorInput, ...] = ()
    read_as = MappingProxyType({"bool": "int32", "bfloat16": "float32", "float16": "float32"})
    from_places = True
    bends = True

    @classmethod
    def captured(cls, word: Any) -> int:
        return len(ScoreFunction.from_json(cls.attribute, word).tensors)

    @classmethod
    def mistake(cls, node: NodeScores) -> tuple[str, ...] | None:
        if not (word := node.words.get(cls.attribute)):
            return None
        if beside := [what for what in node.beside if what in ("past_key", "qk_matmul_output")]:
            return f"{cls.attribute} without a past and without scores as they are", f"both and {beside[0]}"
        kinds = ScoreFunction.from_json(cls.attribute, word).tensors
        for i, ((dtype, dims), kind) in enumerate(zip(node.inputs.get(cls.role, ()), kinds, strict=False)):
            if dtype != kind.dtype or len(dims or ()) != len(kind.shape):
                expected = f"tensor {i} of {cls.attribute} of {kind.dtype} and {len(kind.shape)} axes, as it says"
                return expected, f"{dtype} of {dims}"
        return None

    @classmethod
    def read(cls, node: NodeScores) -> Self | None:
        if not (word := node.words.get(cls.attribute)):
            return None
        tensors = tuple(TensorInput(*kind) for kind in node.inputs.get(cls.role, ()))
        return cls(ScoreFunction.from_json(cls.attribute, word), tensors)

    def arguments(self, op: AttentionOp) -> tuple[tuple[str, TensorInput], ...]:
        return tuple((f"{self.attribute}_{i}", tensor) for i, tensor in enumerate(self.tensors))

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        return {"functions": row_tiles * keys + 32}

    def traced(self, task: PlainTask | TileTask | RowTask | ThreadTask) -> TracedFunction:
        return TracedFunction(task.op, self.function, self.tensors, task.own)

    def summary(self) -> str:
        return self.attribute

    def semantics(self) -> dict[str, str]:
        return {self.attribute: self.function.text()}


def _place(value: Expr, lanes: int) -> Value:
    return Value(materialize(value, "int32", lanes), "int32", lanes)


class FunctionTile(TilePart):
    """Prepares a function for the rows of a tile."""

    step: FunctionStep

    def begin(self, mask: TileMask, keys: int) -> None:
        op = self.task.op
        self.columns = mask.columns
        self.computed = TaskFunction(self.step.traced(self.task), mask.queries, frozenset({"q_idx"}))
        first, last = (place_of(op, i, mask.q_length, mask.kv_length) for i in (T.int64(0), mask.q_length - 1))
        low, high = (materialize(T.cast(end, "int32"), "int32") for end in (first, last))
        b, h = (number(materialize(value)) for value in (self.task.b, self.task.h))
        for lane, lanes in mask.columns:
            # Rows beyond the last one are as the last one, so that nothing is read from outside of a tensor.
            ahead = T.Ramp(T.int32(0), T.int32(1), lanes) if lanes > 1 else T.int32(0)
            place = splat(materialize(T.cast(mask.place + lane, "int32"), "int32"), lanes) + ahead
            inside = T.max(splat(low, lanes), T.min(splat(high, lanes), place))
            q_idx = _place(inside, lanes)
            self.computed.prepare(lane, lanes, {"b": b, "h": h, "q_idx": q_idx})


class FunctionRows(RowPart):
    """Prepares a function for the lanes of a task: each is a query row and, where few share a vector, one key of it."""

    masked = True
    step: FunctionStep

    def allocate(self, keys: int) -> None:
        layout = self.task.layout
        self.lanes, self.size = layout.lanes, layout.lanes * layout.row_vectors
        self.computed = TaskFunction(self.step.traced(self.task), self.size, frozenset({"q_idx", "h"}))

    def prepare(self) -> None:
        task, op, layout = self.task, self.task.op, self.task.layout
        assert isinstance(op.q_length, int)
        place = place_of(op, T.int64(0), op.q_length, task.kv_length)
        first_place = materialize(T.cast(place, "int32"), "int32")
        first_head = materialize(T.cast(task.first_head, "int32"), "int32")
        places, numbers = (T.alloc_buffer((self.size,), "int32") for _ in range(2))
        for lane in range(self.size):
            # Rows of padding are as the last row.
            row = min(lane % layout.padded_rows, layout.rows - 1)
            T.buffer_store(places, first_place + T.int32(row // task.ratio), [T.int64(lane)])
            T.buffer_store(numbers, first_head + T.int32(row % task.ratio), [T.int64(lane)])
        b = number(materialize(task.b))
        for slot in range(0, self.size, self.lanes):
            q_idx, h = (_place(load(buffer, [T.int64(slot)], self.lanes), self.lanes) for buffer in (places, numbers))
            self.computed.prepare(slot, self.lanes, {"b": b, "h": h, "q_idx": q_idx})

    def keys(self, first: Expr) -> Value:
        """The key of each lane; beyond the last one the last again: nothing is read from outside of a tensor."""
        lanes = self.lanes
        keys = splat(T.cast(first, "int32"), lanes) + self.task.layout.key_of_lane()
        last = splat(T.cast(self.task.kv_length - 1, "int32"), lanes)
        return _place(T.min(keys, last), lanes)


class FunctionThread(ThreadPart):
    """Prepares a function for the rows of a thread, which are of one head."""

    step: FunctionStep

    def begin(self, mask: ThreadScores) -> None:
        self.mask = mask
        self.computed = ThreadFunction(self.step.traced(self.task), self.task.b, self.task.heads)


class _MaskModPlain(PlainPart):
    step: MaskMod

    def score(self, score: Expr, pair: Pair) -> Expr:
        """NaN where the function has no result."""
        _, holds = plain_function(self.step.traced(self.task), self.task, pair, None)
        return tirx.Select(holds, score, PlainMath().constant(math.nan))

    def sees(self, pair: Pair) -> Expr:
        visible, holds = plain_function(self.step.traced(self.task), self.task, pair, None)
        return tirx.Or(visible, tirx.Not(holds))


class _MaskModTile(FunctionTile):
    """Computes the function for a block before its scores, so that blocks of which nothing is seen are left out, and of
    blocks that are seen wholly nothing is masked."""

    looks = True

    def begin(self, mask: TileMask, keys: int) -> None:
        super().begin(mask, keys)
        self._bias = T.alloc_buffer((keys, mask.queries), "float32")
        self._hides: Expr | None = None  # whether anything of the block is hidden

    def look(self, first_key: Expr, count: Expr) -> Expr:
        visible, hidden = (RegisterTile(1, self.columns, "int32") for _ in range(2))
        for tile in (visible, hidden):
            tile.each(lambda r, c: splat(T.int32(0), self.columns[c][1]))
        with T.serial(count) as row:
            key = number(materialize(first_key + row))
            for c, (lane, lanes) in enumerate(self.columns):
                bias = materialize(self.computed.bias(lane, lanes, key), "float32", lanes)
                store(self._bias, [row, T.int64(lane)], bias, lanes)
                one, nothing = splat(T.int32(1), lanes), constant(HIDDEN, lanes)
                visible.set(0, c, T.Select(bias == nothing, visible.get(0, c), one))
                # NaN is not seen, either: the masks make a score of it.
                hidden.set(0, c, T.Select(bias == constant(SEEN, lanes), hidden.get(0, c), one))
        self._hides = materialize(T.cast(self._any(hidden), "int32"), "int32")
        return self._any(visible)

    def _any(self, flags: RegisterTile) -> Expr:
        columns = enumerate(self.columns)
        return reduce(T.Or, [vectors.any_lane(flags.get(0, c) != splat(T.int32(0), n), n) for c, (_, n) in columns])

    def whole_end(self, end: Expr) -> Expr:
        return end if self._hides is None else T.Select(self._hides != T.int32(0), T.int64(0), end)

    def hide(self, score: Expr, row: Expr, key: Expr, column: Chunk) -> Expr:
        first, lanes = column
        return with_bias(score, let(load(self._bias, [row, T.int64(first)], lanes)), lanes)

    def sees(self, lane: Expr, row: Expr, key: Expr) -> Expr:
        return self._bias[row, lane] != T.float32(HIDDEN)


class _MaskModRows(FunctionRows):
    def hide(self, score: Expr, begin: Expr, key: Expr, vector: int) -> Expr:
        lanes = self.lanes
        bias = self.computed.bias(vector * lanes, lanes, self.keys(begin + key))
        return with_bias(score, materialize(bias, "float32", lanes), lanes)


class _MaskModThread(FunctionThread):
    def of_row(self, row: int, first_key: Expr) -> CellScore:
        of_row = self.computed.of_row(self.mask, row)
        return lambda score, offset: of_row.hidden(score, first_key + self.mask.cells.first + offset)


@dataclass(frozen=True)
class MaskMod(FunctionStep):
    """Whether a query sees a key, beside all else that hides some."""

    attribute = role = "mask_mod"
    foreseeable = True
    hides = True
    blind = True
    not_beside = {"cpu": "a mask_mod"}  # noqa: RUF012
    plain = _MaskModPlain
    cpu_tile = _MaskModTile
    cpu_rows = _MaskModRows
    cuda_rows = _MaskModThread


class _ScoreModPlain(PlainPart):
    score_hides = True
    step: ScoreMod

    def score(self, score: Expr, pair: Pair) -> Expr:
        result, holds = plain_function(self.step.traced(self.task), self.task, pair, score)
        return tirx.Select(holds, result, PlainMath().constant(math.nan))


class _ScoreModTile(FunctionTile):
    def begin(self, mask: TileMask, keys: int) -> None:
        super().begin(mask, keys)
        self.score_hides = self.step.hides
        # The scores of a block, where some may be hidden by what they became.
        self._modified = T.alloc_buffer((keys, mask.queries), "float32") if self.score_hides else None

    def score(self, tile: RegisterTile, keys: list[Expr], base: Expr) -> None:
        numbers = [number(materialize(key)) for key in keys]

        def modified(r: int, c: int) -> Expr:
            score = self.computed.score(*tile.columns[c], numbers[r], tile.get(r, c))
            if self._modified is not None:
                first, lanes = tile.columns[c]
                score = materialize(score, "float32", lanes)
                store(self._modified, [base + r, T.int64(first)], score, lanes)
            return score

        tile.each(modified)

    def sees(self, lane: Expr, row: Expr, key: Expr) -> Expr | None:
        return None if self._modified is None else self._modified[row, lane] != T.float32(HIDDEN)


class _ScoreModRows(FunctionRows):
    def score(self, score: Expr, key: Expr, vector: int) -> Expr:
        score = self.computed.score(vector * self.lanes, self.lanes, self.keys(key), score)
        return materialize(score, "float32", self.lanes)


class _ScoreModThread(FunctionThread):
    def of_row(self, row: int, first_key: Expr) -> CellScore:
        of_row = self.computed.of_row(self.mask, row)
        return lambda score, offset: of_row.score(score, first_key + self.mask.cells.first + offset)


@dataclass(frozen=True)
class ScoreMod(FunctionStep):
    """What a score becomes; one of -inf hides its key."""

    attribute = role = "score_mod"
    plain = _ScoreModPlain
    cpu_tile = _ScoreModTile
    cpu_rows = _ScoreModRows
    cuda_rows = _ScoreModThread

    @property
    def hides(self) -> bool:  # type: ignore[override]
        return self.function.may_be_infinite

    @property
    def blind(self) -> bool:  # type: ignore[override]
        return self.hides

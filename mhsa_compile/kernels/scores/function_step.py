"""What mask_mod and score_mod have in common: a traced function of a score and its places, with tensors that it
captures. Places of queries are counted as windows count them, from the first or from the last key."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.plain_parts import PlainTask
from mhsa_compile.kernels.common.score_emission import TracedFunction, Value
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.score_functions import TaskFunction, number
from mhsa_compile.kernels.cpu.score_parts import RowPart, RowTask, TilePart, TileTask, place_of
from mhsa_compile.kernels.cpu.simd.vectors import load, materialize, splat
from mhsa_compile.kernels.cuda.attention.score_functions import ThreadFunction
from mhsa_compile.kernels.cuda.attention.thread_parts import ThreadPart, ThreadTask
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores
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
            q_idx = Value(materialize(inside, "int32", lanes), "int32", lanes)
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
            q_idx, h = (
                Value(materialize(load(buffer, [T.int64(slot)], self.lanes), "int32", self.lanes), "int32", self.lanes)
                for buffer in (places, numbers)
            )
            self.computed.prepare(slot, self.lanes, {"b": b, "h": h, "q_idx": q_idx})

    def keys(self, first: Expr) -> Value:
        """The key of each lane; beyond the last one the last again: nothing is read from outside of a tensor."""
        lanes = self.lanes
        keys = splat(T.cast(first, "int32"), lanes) + self.task.layout.key_of_lane()
        last = splat(T.cast(self.task.kv_length - 1, "int32"), lanes)
        return Value(materialize(T.min(keys, last), "int32", lanes), "int32", lanes)


class FunctionThread(ThreadPart):
    """Prepares a function for the rows of a thread, which are of one head."""

    step: FunctionStep

    def begin(self, mask: ThreadScores) -> None:
        self.mask = mask
        self.computed = ThreadFunction(self.step.traced(self.task), self.task.b, self.task.heads)

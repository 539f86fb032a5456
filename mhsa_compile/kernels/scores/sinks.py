"""A score of no key: a sink takes its share of the softmax, and has no value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.plain_parts import PlainMath, PlainPart
from mhsa_compile.kernels.common.score_scale import LARGEST
from mhsa_compile.kernels.cpu.score_parts import CpuMath, RowPart, TilePart, TileTask
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, splat
from mhsa_compile.kernels.cpu.simd.vectors import materialize as cpu_materialize
from mhsa_compile.kernels.cuda.attention.thread_scores import CudaMath, ThreadPart
from mhsa_compile.kernels.cuda.primitives.simt import materialize, of_row
from mhsa_compile.kernels.interface.ops import AttentionOp, TensorInput
from mhsa_compile.kernels.interface.score_step import NodeScores, RowMeaning, ScoreStep, SomeRows


def _finite(sink: Expr) -> Expr:
    """An infinite sink is held to the largest number: what is infinitely below its row's maximum has a weight of 0, but
    the maximum itself must be one that can be subtracted from."""
    largest = T.float32(LARGEST)
    return T.Select(sink > largest, largest, sink)


class _SinksPlain(PlainPart):
    def no_key(self, h: Expr) -> Expr:
        return PlainMath().element(self.task.own[0], [h])


class _SinksTile(TilePart):
    def __init__(self, step: Sinks, task: TileTask) -> None:
        super().__init__(step, task)
        self._sink = cpu_materialize(_finite(CpuMath().element(task.own[0], [task.h])), "float32")

    def no_key(self, column: Chunk) -> Expr:
        return splat(self._sink, column[1])


class _SinksRows(RowPart):
    def no_keys(self) -> Callable[[Expr], Expr]:
        return self._of

    def _of(self, head: Expr) -> Expr:
        return cpu_materialize(_finite(CpuMath().element(self.task.own[0], [self.task.first_head + head])), "float32")


class _SinksThread(ThreadPart):
    def read(self) -> None:
        self._sinks = self.of_heads(self._of)

    def _of(self, head: Expr) -> Expr:
        return materialize(_finite(CudaMath().element(self.task.own[0], [head])), "float32")

    def no_key(self, row: int) -> Expr:
        return of_row(self._sinks, row)


@dataclass(frozen=True)
class Sinks(ScoreStep):
    """An input (H,) of the attention's dtype holds for each head one more score that every query sees, after all that
    is done to the others."""

    role = "sinks"
    extra = "sinks"
    plain = _SinksPlain
    cpu_tile = _SinksTile
    cpu_rows = _SinksRows
    cuda_rows = _SinksThread

    @classmethod
    def mistake(cls, node: NodeScores) -> tuple[str, ...] | None:
        return node.mistake_of_heads(cls.role)

    def arguments(self, op: AttentionOp) -> tuple[tuple[str, TensorInput], ...]:
        return (("sinks", TensorInput(op.dtype, (op.num_heads,))),)

    def meaning(self, own: Sequence[np.ndarray], rows: SomeRows) -> RowMeaning:
        return RowMeaning(no_key=own[0])

    def semantics(self) -> dict[str, Any]:
        return {"sinks": True}

"""Scores within a softcap: softcap * tanh(score / softcap), before any mask or bias."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.attention.thread_parts import ThreadPart, ThreadTask
from mhsa_compile.kernels.cuda.primitives.warp import exp2, reciprocal, registers
from mhsa_compile.kernels.interface.score_step import Array, Expr, RowMeaning, ScoreMath, ScoreStep, SomeRows

LIMITS = (1e-12, 1e12)
QUICK = 256.0
"""Up to this softcap a quick tanh changes scores by less than 2^-13, so probs by less than half of what rounding to 16
bits does."""


@dataclass(frozen=True)
class Softcap(ScoreStep):
    """Bends scores so that they stay below `limit`."""

    limit: float
    extra = "softcap"
    bends = True
    elementwise = True

    def why_not(self) -> str | None:
        if LIMITS[0] <= self.limit <= LIMITS[1]:
            return None
        return f"a softcap from {LIMITS[0]:g} to {LIMITS[1]:g}, or 0 for none, not {self.limit:g}"

    def factor(self, scale: float) -> float:
        return scale / self.limit

    def score(self, math: ScoreMath, score: Expr) -> Expr:
        return math.tanh(score) * math.constant(self.limit * math.unit)

    def cuda_rows(self, task: ThreadTask) -> ThreadPart | None:
        return None if task.op.dtype == "float32" or self.limit > QUICK else _QuickThread(self, task)

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        return {"softcap": 40 if self.limit > QUICK else 4}

    def meaning(self, own: Sequence[Array], rows: SomeRows) -> RowMeaning:
        return RowMeaning(softcap=self.limit)

    def summary(self) -> str:
        return f"softcap {self.limit:g}"

    def semantics(self) -> dict[str, Any]:
        return {"softcap": self.limit}


class _QuickThread(ThreadPart):
    """tanh(x) = 1 - 2 / (1 + e^(2 x)): off by 2^-21, whatever x, which the softcap makes a part of a score. Where that
    would be too much, it is the function of CUDA's library, with its branches."""

    step: Softcap

    def of_product(self, product: Expr) -> Expr:
        inner, outer = self.step.factor(self.task.op.scale), self.step.limit * LOG2_E
        part = registers(1)
        # Infinite for large scores, whose reciprocal is 0, and 0 for small ones: both ends come out right.
        exp2(part, 0, product * T.float32(2 * LOG2_E * inner))
        reciprocal(part, 0, part[0] + T.float32(1))
        return part[0] * T.float32(-2 * outer) + T.float32(outer)

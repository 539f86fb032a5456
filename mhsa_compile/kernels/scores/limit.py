"""Steps of one number, which change a score by itself: formulas of the spec's, in kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from tvm import tirx
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadPart
from mhsa_compile.kernels.cuda.primitives.simt import exp2, reciprocal, registers
from mhsa_compile.kernels.interface.score_step import NodeScores, RowMeaning, ScoreMath, ScoreStep, SomeRows

SMALLEST, LARGEST = 1e-12, 1e12


@dataclass(frozen=True)
class Limit(ScoreStep):
    """Bends scores so that they stay between -limit and limit. `attribute` is the formula's name."""

    limit: float
    bends = True
    elementwise = True

    @classmethod
    def mistake(cls, node: NodeScores) -> tuple[str, ...] | None:
        value = float(node.words.get(cls.attribute, 0.0))
        return None if 0 <= value < math.inf else (f"{cls.attribute} of 0 (none) or more", str(value))

    @classmethod
    def read(cls, node: NodeScores) -> Self | None:
        value = node.words.get(cls.attribute, 0.0)
        return cls(float(value)) if value else None

    def why_not(self) -> str | None:
        if SMALLEST <= self.limit <= LARGEST:
            return None
        return f"a {self.attribute} from {SMALLEST:g} to {LARGEST:g}, or 0 for none, not {self.limit:g}"

    def meaning(self, own: Sequence[np.ndarray], rows: SomeRows) -> RowMeaning:
        return RowMeaning(limits={self.attribute: self.limit})

    def summary(self) -> str:
        return f"{self.attribute} {self.limit:g}"

    def semantics(self) -> dict[str, Any]:
        return {self.attribute: self.limit}


QUICK = 256.0
"""Up to this softcap a quick tanh changes scores by less than 2^-13, so probs by less than half of what rounding to 16
bits does."""


class _SoftcapThread(ThreadPart):
    """In 16 bits tanh(x) = 1 - 2 / (1 + e^(2 x)): off by 2^-21, whatever x, which the softcap makes a part of a score.
    Where that would be too much, it is the function of CUDA's library, with its branches."""

    step: Softcap

    def of_product(self, product: Expr) -> Expr:
        if self.task.op.dtype == "float32" or self.step.limit > QUICK:
            return super().of_product(product)
        inner, outer = self.step.factor(self.task.op.scale), self.step.limit * LOG2_E
        part = registers(1)
        # Infinite for large scores, whose reciprocal is 0, and 0 for small ones: both ends come out right.
        exp2(part, 0, product * T.float32(2 * LOG2_E * inner))
        reciprocal(part, 0, part[0] + T.float32(1))
        return part[0] * T.float32(-2 * outer) + T.float32(outer)


class Softcap(Limit):
    """Scores within a softcap: softcap * tanh(score / softcap), before any mask or bias."""

    attribute = "softcap"
    extra = "softcap"
    cuda_rows = _SoftcapThread

    def factor(self, scale: float) -> float:
        return scale / self.limit

    def score(self, math: ScoreMath, score: Expr) -> Expr:
        return math.tanh(score) * math.constant(self.limit * math.unit)

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        return {"bent": 40 if self.limit > QUICK else 4}


class SoftClamp(Limit):
    """Scores within a soft clamp, of no tanh: limit * score / (limit + |score|), before any mask or bias."""

    attribute = "softclamp"
    extra = "softclamp"

    def score(self, math: ScoreMath, score: Expr) -> Expr:
        limit = math.constant(self.limit * math.unit)
        return score / (limit + tirx.abs(score)) * limit  # the product last: before, it could overflow

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        return {"bent": 8}  # of a division, as nvcc has it

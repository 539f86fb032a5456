"""Scores within a softcap: softcap * tanh(score / softcap), before any mask or bias."""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.score_scale import LOG2_E
from mhsa_compile.kernels.cuda.attention.thread_parts import ThreadPart
from mhsa_compile.kernels.cuda.primitives.warp import exp2, reciprocal, registers
from mhsa_compile.kernels.interface.score_step import ScoreMath
from mhsa_compile.kernels.scores.limit import Limit

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
    attribute = "softcap"
    extra = "softcap"
    cuda_rows = _SoftcapThread

    def factor(self, scale: float) -> float:
        return scale / self.limit

    def score(self, math: ScoreMath, score: Expr) -> Expr:
        return math.tanh(score) * math.constant(self.limit * math.unit)

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        return {"bent": 40 if self.limit > QUICK else 4}

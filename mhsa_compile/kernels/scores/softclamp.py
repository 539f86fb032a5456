"""Scores within a soft clamp, of no tanh: limit * score / (limit + |score|), before any mask or bias."""

from __future__ import annotations

from tvm import tirx
from tvm.ir import Expr

from mhsa_compile.kernels.interface.score_step import ScoreMath
from mhsa_compile.kernels.scores.limit import Limit


class SoftClamp(Limit):
    attribute = "softclamp"
    extra = "softclamp"

    def score(self, math: ScoreMath, score: Expr) -> Expr:
        limit = math.constant(self.limit * math.unit)
        return score / (limit + tirx.abs(score)) * limit  # the product last: before, it could overflow

    def cuda_registers(self, row_tiles: int, keys: int, stages: int) -> dict[str, int]:
        return {"bent": 8}  # of a division, as nvcc has it

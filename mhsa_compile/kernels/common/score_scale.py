"""The units in which scores are computed: of log2, or those of the first step where it has some."""

from __future__ import annotations

import math

from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.kernels.interface.score_step import first
from mhsa_compile.spec.checks import LARGEST_FLOAT, SMALLEST_FLOAT

LOG2_E = math.log2(math.e)
LARGEST = LARGEST_FLOAT


def why_not_scores(op: AttentionOp, *, functions: bool = False, formats: bool = False) -> str | None:
    """Why scores cannot be computed in float32, or None if they can. `functions`: whether the kernel computes functions
    of scores; `formats`: whether it reads keys and values of another dtype than queries."""
    if op.kv_dtype is not None and not formats:
        return f"keys and values of {op.dtype}, not stored in {op.kv_dtype}"
    function = next((step.attribute for step in op.scores if step.function), "")
    if function and not functions:
        return f"no functions of scores, as its {function} is"
    if op.softmax != "float32":
        return f"its softmax is float32, not {op.softmax}"
    if reason := first(step.why_not() for step in op.scores):
        return reason
    factor = abs(score_factor(op))
    if factor and not SMALLEST_FLOAT <= factor <= LARGEST_FLOAT:
        return f"a factor of the scores that float32 holds, not {factor:g}"
    return None


def score_factor(op: AttentionOp) -> float:
    """Makes scores of the products of queries and keys: in units of log2, or in those that the first step wants."""
    factor = first(step.factor(op.scale) for step in op.scores)
    return op.scale * LOG2_E if factor is None else factor

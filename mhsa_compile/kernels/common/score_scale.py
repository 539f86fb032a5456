"""The units in which scores are computed: of log2, or of the softcap where there is one."""

from __future__ import annotations

import math

from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.spec.checks import LARGEST_FLOAT, SMALLEST_FLOAT

LOG2_E = math.log2(math.e)
LARGEST = LARGEST_FLOAT
SOFTCAPS = (1e-12, 1e12)


def why_not_scores(op: AttentionOp, *, functions: bool = False) -> str | None:
    """Why scores cannot be computed in float32, in units of the softcap where there is one, or None if they can.

    `functions`: whether the kernel computes mask_mod and score_mod.
    """
    if not functions and op.captured:
        return "no functions of scores, mask_mod and score_mod"
    if op.softmax != "float32":
        return f"its softmax is float32, not {op.softmax}"
    if op.softcap and not SOFTCAPS[0] <= op.softcap <= SOFTCAPS[1]:
        return f"a softcap from {SOFTCAPS[0]:g} to {SOFTCAPS[1]:g}, or 0 for none, not {op.softcap:g}"
    factor = abs(score_factor(op))
    if factor and not SMALLEST_FLOAT <= factor <= LARGEST_FLOAT:
        return f"a factor of the scores that float32 holds, not {factor:g}"
    return None


def score_factor(op: AttentionOp) -> float:
    """Makes scores of the products of queries and keys: in units of log2 or, before its tanh, of the softcap."""
    return op.scale / op.softcap if op.softcap else op.scale * LOG2_E

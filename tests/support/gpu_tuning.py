"""An operation that is tuned for a GPU."""

from __future__ import annotations

from dataclasses import replace

from mhsa_compile.kernels.interface.ops import AttentionOp, HeadLayout

OP = replace(
    AttentionOp(1, 128, 128, 4, 2, 64, 64, 0.125, None, None, *(HeadLayout(i, "heads", 0) for i in range(4))),
    dtype="bfloat16",
)

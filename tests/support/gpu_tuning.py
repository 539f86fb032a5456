"""An operation that is tuned for a GPU."""

from __future__ import annotations

from dataclasses import replace

from mhsa_compile.kernels.interface.ops import HeadLayout
from support.attention_ops import attention_of

OP = replace(
    attention_of(1, 128, 128, 4, 2, 64, 64, 0.125, *(HeadLayout(i, "heads", 0) for i in range(4))),
    dtype="bfloat16",
)

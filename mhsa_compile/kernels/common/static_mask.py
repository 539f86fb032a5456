"""A mask that is known when a kernel is compiled: how much of the band goes into the plan that is made of it, and the
arguments that bring the plan to the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import Expr, argument
from mhsa_compile.kernels.interface.ops import AttentionOp, WindowSpec


def divided_band(op: AttentionOp) -> tuple[WindowSpec | None, WindowSpec | None]:
    """(what a plan holds of the band, what is left to the kernel): a band counted from lengths is known when called
    only, and distances and places are counted from its edge."""
    counts = op.slopes or op.captured
    late = op.lengths and op.band is not None and op.band.alignment == "bottom_right"
    return None if late else op.band, op.band if late or counts else None


def seen_in_band(band: WindowSpec | None, rows: range, L: int, S: int) -> NDArray[np.bool_]:
    """(rows, S): which keys some of the L queries see by their place."""
    visible = np.ones((len(rows), S), np.bool_)
    if band is not None:
        place = np.array(rows)[:, np.newaxis] + (S - L if band.alignment == "bottom_right" else 0)
        distance = place - np.arange(S)
        visible &= True if band.left is None else distance <= band.left
        visible &= True if band.right is None else -distance <= band.right
    return visible


def constant_arguments(names: Sequence[str], arrays: Sequence[NDArray[Any]]) -> list[Expr]:
    """The arguments of constants."""
    return [
        argument(name, [T.int64(size) for size in array.shape], str(array.dtype))
        for name, array in zip(names, arrays, strict=True)
    ]

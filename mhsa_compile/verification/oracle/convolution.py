"""Conv for onnx's evaluator, which itself fills a dilated kernel up with zeros: a NaN between its taps is NaN then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx.reference.op_run import OpRun


class Conv(OpRun):  # type: ignore[misc]
    """x (N, C, ...), w (M, C / group, ...), b (M) -> (N, M, ...)."""

    def _run(
        self,
        x: np.ndarray,
        w: np.ndarray,
        b: np.ndarray | None = None,
        auto_pad: str | None = None,
        dilations: Sequence[int] | None = None,
        group: int | None = None,
        kernel_shape: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
    ) -> tuple[np.ndarray]:
        axes, groups = x.ndim - 2, group or 1
        steps, spread = list(strides or [1] * axes), list(dilations or [1] * axes)
        spans = [(size - 1) * step + 1 for size, step in zip(w.shape[2:], spread, strict=True)]
        edges = list(pads or [0] * (2 * axes))
        if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
            missing = [
                max(0, (-(-size // step) - 1) * step + span - size)
                for size, step, span in zip(x.shape[2:], steps, spans, strict=True)
            ]
            begins = [(count + (auto_pad == "SAME_LOWER")) // 2 for count in missing]
            edges = [*begins, *(count - begin for count, begin in zip(missing, begins, strict=True))]
        padded = np.pad(x, [(0, 0), (0, 0), *zip(edges[:axes], edges[axes:], strict=True)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, spans, tuple(range(2, x.ndim)))
        places: Any = (..., *(slice(None, None, step) for step in (*steps, *spread)))
        windows = windows[places]
        channels, outputs = w.shape[1], w.shape[0] // groups
        taps = range(x.ndim, 2 * axes + 2)
        parts = [
            np.tensordot(
                windows[:, g * channels : (g + 1) * channels],
                w[g * outputs : (g + 1) * outputs],
                ((1, *taps), range(1, w.ndim)),
            )
            for g in range(groups)
        ]
        y = np.moveaxis(np.concatenate(parts, axis=-1), -1, 1)
        return ((y if b is None else y + b.reshape(-1, *[1] * axes)).astype(x.dtype),)

"""Operators that onnx's evaluator has wrong, or does not know at some opsets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference.op_run import OpRun
from onnx.reference.ops.op_grid_sample import GridSample

_KNOWN = 19
"""The opset from which on onnx's evaluator has both; it hands on attributes of later ones, none of which is set."""


def quantised_operators(model: onnx.ModelProto) -> tuple[type[OpRun], ...]:
    """QuantizeLinear and DequantizeLinear of bytes, by one scale or several, where a model's evaluation lacks them."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), _KNOWN)
    return (_QuantizeLinear, _DequantizeLinear) if opset < _KNOWN else ()


class _QuantizeLinear(OpRun):  # type: ignore[misc]
    def _run(
        self, x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None, axis: int = 1, **_later: Any
    ) -> tuple[np.ndarray]:
        zero = np.zeros((), np.uint8) if zero is None else zero
        bounds = np.iinfo(zero.dtype)
        y = np.rint(x / _along(scale, x, axis)) + _along(zero, x, axis).astype(np.int64)
        return (np.clip(y, bounds.min, bounds.max).astype(zero.dtype),)


class _DequantizeLinear(OpRun):  # type: ignore[misc]
    def _run(
        self, x: np.ndarray, scale: np.ndarray, zero: np.ndarray | None = None, axis: int = 1, **_later: Any
    ) -> tuple[np.ndarray]:
        whole = x.astype(np.int64) - (0 if zero is None else _along(zero, x, axis).astype(np.int64))
        return (np.asarray(whole * _along(scale, x, axis)).astype(scale.dtype),)


def _along(numbers: np.ndarray, x: np.ndarray, axis: int) -> np.ndarray:
    """One number, or one for each place of an axis of x."""
    if numbers.size == 1:
        return numbers.reshape(())
    return numbers.reshape([-1 if i == axis % x.ndim else 1 for i in range(x.ndim)])


class _Conv(OpRun):  # type: ignore[misc]
    """x (N, C, ...), w (M, C / group, ...), b (M) -> (N, M, ...).

    onnx's own fills a dilated kernel up with zeros: a NaN between its taps is NaN then.
    """

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


class _Erf(OpRun):  # type: ignore[misc]  # onnx's own rounds to float32
    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.asarray(np.frompyfunc(math.erf, 1, 1)(x)).astype(x.dtype),)


class _GatherElements(OpRun):  # type: ignore[misc]  # onnx's own fails on one row of indices
    def _run(self, data: np.ndarray, indices: np.ndarray, axis: int | None = None) -> tuple[np.ndarray]:
        along = axis or 0
        others = tuple(slice(None) if i == along % data.ndim else slice(n) for i, n in enumerate(indices.shape))
        return (np.take_along_axis(data[others], indices, along),)


class _GridSample(GridSample):  # type: ignore[misc]
    """Pictures by lines. onnx's own goes from sample to sample of each channel, in Python: 200,000 of them take it
    two minutes; and it rounds places to float32."""

    def _run(
        self, x: np.ndarray, grid: np.ndarray, mode: str = "", padding_mode: str = "", align_corners: int = 0
    ) -> tuple[np.ndarray]:
        reflects = (padding_mode or self.padding_mode) == "reflection"
        if x.ndim != 4 or reflects or (mode or self.mode) not in ("linear", "bilinear"):
            return super()._run(x, grid, mode, padding_mode, align_corners)  # type: ignore[no-any-return]
        border = (padding_mode or self.padding_mode) == "border"
        places, sizes = [], x.shape[:1:-1]
        for axis, size in enumerate(sizes):
            along = grid[..., axis] + 1
            place = along / 2 * (size - 1) if align_corners or self.align_corners else (along * size - 1) / 2
            places.append(np.clip(place, 0, size - 1) if border else np.clip(place, -2, size + 1))
        y: Any = 0
        batch = np.arange(len(x))[:, None, None]
        for right, below in np.ndindex(2, 2):
            near = [np.floor(place) + second for place, second in zip(places, (right, below), strict=True)]
            weight = np.prod([1 - np.abs(place - one) for place, one in zip(places, near, strict=True)], axis=0)
            inside = np.all([(one >= 0) & (one < size) for one, size in zip(near, sizes, strict=True)], axis=0)
            j, i = (np.clip(one, 0, size - 1).astype(int) for one, size in zip(near, sizes, strict=True))
            value = x[batch, :, i, j]
            y = y + np.where(inside[..., None], value, 0) * weight[..., None]
        return (np.moveaxis(y, -1, 1).astype(x.dtype),)


class _GlobalMaxPool(OpRun):  # type: ignore[misc]  # onnx's own takes every input for an image
    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


REPAIRED: tuple[type[OpRun], ...] = (_Conv, _GatherElements, _GlobalMaxPool, _GridSample, _Erf)
for _operator in (*REPAIRED, _QuantizeLinear, _DequantizeLinear):
    _operator.__name__ = _operator.__name__.removeprefix("_")  # the evaluator goes by these names

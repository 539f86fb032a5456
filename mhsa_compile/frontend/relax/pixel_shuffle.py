"""Phases of an image as one: what the linears of a transposed convolution compute, put in its place."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, te, tirx

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.fusion.fused_nodes import FusedPixelShuffle
from mhsa_compile.frontend.relax.sizes.call_checks import OPAQUE
from mhsa_compile.frontend.relax.values import dims


def pixel_shuffle(bb: Any, fused: FusedPixelShuffle, rows: list[Any], bias: Any = None) -> Any:
    """rows (B, ..., phases x C), bias (C) -> (B, ..., C). Raises ModelError where fixed sizes leave no element."""
    batch, *places, width = dims(rows[0])
    channels = int(width) // math.prod(map(len, fused.phases[0]))
    sizes = [_size(fused, i, count) for i, count in enumerate(places)]
    function = _shuffle(fused, str(rows[0].ty.dtype), channels, [batch, *places], sizes, biased=bias is not None)
    kind = relax.TensorType([batch, *sizes, channels], rows[0].ty.dtype)
    arguments = [*rows] if bias is None else [*rows, bias]
    return bb.emit(relax.call_tir(bb.add_func(function, "pixel_shuffle"), arguments, kind))


def _size(fused: FusedPixelShuffle, axis: int, places: Any) -> Any:
    """How many elements are left of an axis."""
    cut = fused.before[axis] + fused.behind[axis]
    size = tvm.sym.Analyzer().simplify(tirx.convert(places) * fused.strides[axis] - cut)
    if isinstance(size, tirx.IntImm) and int(size) < 1:
        raise ModelError("model", "a transposed convolution whose pads leave an element", f"{size} elements")
    return size


def _shuffle(
    fused: FusedPixelShuffle, dtype: str, channels: int, source: list[Any], sizes: list[Any], *, biased: bool
) -> Any:
    """The function of all rows, and of the bias. Sizes that are no numbers are variables of its own. It is fused with
    nothing: with a Transpose behind it, each element's place would be found by itself."""
    batch, *places = map(_variable, source)
    widths = [math.prod(map(len, phases)) * channels for phases in fused.phases]
    rows = [te.placeholder((batch, *places, _variable(width)), dtype, "rows") for width in widths]
    bias = [te.placeholder((_variable(channels),), dtype, "bias")] * biased

    def element(b: Any, *at: Any) -> Any:
        *along, channel = at
        moved = [place + cut for place, cut in zip(along, fused.before, strict=True)]
        place = [tirx.floordiv(one, stride) for one, stride in zip(moved, fused.strides, strict=True)]
        phase = [tirx.floormod(one, stride) for one, stride in zip(moved, fused.strides, strict=True)]
        value = tirx.const(0, dtype)
        for array, phases in zip(rows, fused.phases, strict=True):
            block = tirx.const(0, "int64")
            for own, one in zip(phases, phase, strict=True):
                block = block * len(own) + _number_of(own, one)
            read = array[(b, *place, block * channels + channel)]
            mine = [_is_one_of(own, one, s) for own, one, s in zip(phases, phase, fused.strides, strict=True)]
            mine = [condition for condition in mine if condition is not None]
            value = tirx.if_then_else(tirx.all(*mine), read, value) if mine else read
        return value + bias[0][channel] if bias else value

    y = te.compute((batch, *map(_variable, sizes), _variable(channels)), element, "pixel_shuffle")
    function = te.create_prim_func([*rows, *bias, y])
    return function.without_attr("global_symbol").with_attr("op_pattern", OPAQUE)


def _variable(dim: Any) -> Any:
    return tirx.IntImm("int64", int(dim)) if isinstance(dim, int | tirx.IntImm) else tirx.Var("size", "int64")


def _are_neighbours(phases: tuple[int, ...]) -> bool:
    return phases == tuple(range(phases[0], phases[-1] + 1))


def _number_of(phases: tuple[int, ...], phase: Any) -> Any:
    """Which one of these a phase is."""
    if _are_neighbours(phases):
        return phase - phases[0] if len(phases) > 1 else 0
    number = tirx.const(0, "int64")
    for i, one in enumerate(phases):
        number = tirx.Select(phase == one, tirx.const(i, "int64"), number)
    return number


def _is_one_of(phases: tuple[int, ...], phase: Any, stride: int) -> Any:
    """Whether a phase is one of these; None where each is."""
    if len(phases) == stride:
        return None
    if _are_neighbours(phases):
        return tirx.all(phase >= phases[0], phase <= phases[-1])
    return tirx.any(*(phase == one for one in phases))

"""The patches of an image, or of a sequence, as rows: what a convolution's linear takes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, te, tirx

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.fusion.fused_nodes import FusedPatches
from mhsa_compile.frontend.relax.sizes.call_checks import OPAQUE
from mhsa_compile.frontend.relax.values import dims


def patches(bb: Any, fused: FusedPatches, x: Any, *zero: Any) -> Any:
    """x (B, ..., C), or (B, C, ...) unless its channels are last -> (B, ..., K), zeros where a patch reaches out of it,
    or the zero point of bytes, where they have one.

    A row is taps x C, or C x taps unless the channels are last, the last of these side by side in both. Raises
    ModelError where fixed sizes hold no patch at all.
    """
    batch, *sizes = dims(x)
    channels = sizes.pop(-1 if fused.channels_last else 0)
    counts = [_count(fused, i, size) for i, size in enumerate(sizes)]
    row = (*fused.kernel, channels) if fused.channels_last else (channels, *fused.kernel)
    outside = [bb.normalize(relax.op.reshape(value, [])) for value in zero]
    if any((*fused.before, *fused.behind)) and not (fused.channels_last and _is_wide(channels)):
        x, sizes = _widened(bb, fused, x, outside)
        fused, outside = replace(fused, before=(0,) * len(sizes), behind=(0,) * len(sizes)), []
    function = _gather(fused, str(x.ty.dtype), channels, [batch, *sizes], counts, zeroed=bool(outside))
    kind = relax.TensorType([batch, *counts, *row], x.ty.dtype)
    rows = bb.emit(relax.call_tir(bb.add_func(function, "patches"), [x, *outside], kind))
    return bb.emit(relax.op.reshape(rows, relax.ShapeExpr([batch, *counts, math.prod(map(int, row))])))


_LEAST_COPY = 16
"""Elements side by side from which on each of them may be asked whether it lies outside: LLVM asks once for all."""


def _is_wide(channels: Any) -> bool:
    return isinstance(channels, tirx.IntImm) and int(channels) >= _LEAST_COPY


def _widened(bb: Any, fused: FusedPatches, x: Any, zero: list[Any]) -> tuple[Any, list[Any]]:
    """(x with what patches find around it, its sizes): where few elements lie side by side, asking each of them in each
    patch takes several times as long as this copy."""
    batch, *sizes = dims(x)
    channels = sizes.pop(-1 if fused.channels_last else 0)
    wide = [size + before + behind for size, before, behind in zip(sizes, fused.before, fused.behind, strict=True)]
    every = replace(fused, kernel=(1,) * len(sizes), strides=(1,) * len(sizes), dilations=(1,) * len(sizes))
    function = _gather(every, str(x.ty.dtype), channels, [batch, *sizes], wide, zeroed=bool(zero), of_rows=False)
    shape = [batch, *wide, channels] if fused.channels_last else [batch, channels, *wide]
    kind = relax.TensorType(shape, x.ty.dtype)
    return bb.emit(relax.call_tir(bb.add_func(function, "edges"), [x, *zero], kind)), wide


def _gather(
    fused: FusedPatches,
    dtype: str,
    channels: Any,
    source: list[Any],
    counts: list[Any],
    *,
    zeroed: bool,
    of_rows: bool = True,
) -> Any:
    """The function of x (B, ...), of its zero point, if it has one, and of so many patches, as rows, or each of one
    element where that lies in x. Sizes that are no numbers are variables of its own, also where one follows from
    another: TVM cannot join loops over X - 4."""
    (batch, *sizes), counts = map(_size, source), [_size(count) for count in counts]

    def element(b: Any, places: Any, channel: Any, taps: Any) -> Any:
        along = [_source(fused, i, place, tap) for i, (place, tap) in enumerate(zip(places, taps, strict=True))]
        value = x[(b, *along, channel) if fused.channels_last else (b, channel, *along)]
        inside = [place >= 0 for place, pad in zip(along, fused.before, strict=True) if pad]
        inside += [place < size for place, size, pad in zip(along, sizes, fused.behind, strict=True) if pad]
        return tirx.if_then_else(tirx.all(*inside), value, outside) if inside else value

    def of_row(b: Any, *at: Any) -> Any:
        places, within = at[: len(sizes)], at[len(sizes) :]
        channel, taps = (within[-1], within[:-1]) if fused.channels_last else (within[0], within[1:])
        return element(b, places, channel, taps)

    def in_place(b: Any, *at: Any) -> Any:
        channel, places = (at[-1], at[:-1]) if fused.channels_last else (at[0], at[1:])
        return element(b, places, channel, [0] * len(sizes))

    x = te.placeholder((batch, *sizes, channels) if fused.channels_last else (batch, channels, *sizes), dtype, "x")
    zero = [te.placeholder((), dtype, "zero")] * zeroed
    outside = zero[0]() if zero else tirx.const(0, dtype)
    row = (*fused.kernel, channels) if fused.channels_last else (channels, *fused.kernel)
    shape, value = (batch, *counts, *row), of_row
    if not of_rows:
        shape, value = (batch, *counts, channels) if fused.channels_last else (batch, channels, *counts), in_place
    function = te.create_prim_func([x, *zero, te.compute(shape, value, "patches")])
    # fused with nothing: what reads patches by rows would take their loops apart
    return function.without_attr("global_symbol").with_attr("op_pattern", OPAQUE)


def _size(dim: Any) -> Any:
    return dim if isinstance(dim, int | tirx.IntImm) else tirx.Var("size", "int64")


def _count(fused: FusedPatches, axis: int, size: Any) -> Any:
    """How many patches lie along an axis."""
    reach = (fused.kernel[axis] - 1) * fused.dilations[axis] + 1
    room = size + (fused.before[axis] + fused.behind[axis] - reach)
    count = tvm.sym.Analyzer().simplify(tirx.floordiv(tirx.convert(room), fused.strides[axis]) + 1)
    if isinstance(count, tirx.IntImm) and int(count) < 1:
        raise ModelError("model", f"a convolution over at least {reach} elements, padding included", str(size))
    return count


def _source(fused: FusedPatches, axis: int, place: Any, tap: Any) -> Any:
    """Where a tap of a patch lies along an axis of x."""
    return place * fused.strides[axis] + tap * fused.dilations[axis] - fused.before[axis]

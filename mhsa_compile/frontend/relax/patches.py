"""The patches of an image, or of a sequence: as rows, what a convolution's linear takes, and convolutions of groups."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax, te, tirx

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.fusion.fused_nodes import FusedDepthwise, FusedGroupedConvolution, FusedPatches
from mhsa_compile.frontend.relax.sizes.call_checks import OPAQUE
from mhsa_compile.frontend.relax.values import dims


def patches(bb: Any, fused: FusedPatches, x: Any, *zero: Any) -> Any:
    """x (B, ..., C), or (B, C, ...) unless its channels are last -> (B, ..., K), zeros where a patch reaches out of it,
    or the zero point of bytes, where they have one.

    A row is groups x taps x C / groups, or C x taps unless the channels are last, the last of these side by side in
    both. Raises ModelError where fixed sizes hold no patch at all.
    """
    rows = _patches(bb, fused, x, [bb.normalize(relax.op.reshape(value, [])) for value in zero])
    batch, *others = dims(rows)
    counts, row = others[: len(fused.kernel)], others[len(fused.kernel) :]
    return bb.emit(relax.op.reshape(rows, relax.ShapeExpr([batch, *counts, math.prod(map(int, row))])))


def _patches(bb: Any, fused: FusedPatches, x: Any, outside: list[Any]) -> Any:
    """The patches of x (B, ...), each axis of a row one of the array."""
    batch, *sizes = dims(x)
    channels = sizes.pop(-1 if fused.channels_last else 0)
    counts = [_count(fused, i, size) for i, size in enumerate(sizes)]
    row = _row(fused, channels)
    if any((*fused.before, *fused.behind)) and not (fused.channels_last and _is_wide(row[-1])):
        x, sizes = _widened(bb, fused, x, outside)
        fused, outside = replace(fused, before=(0,) * len(sizes), behind=(0,) * len(sizes)), []
    function = _gather(fused, str(x.ty.dtype), channels, [batch, *sizes], counts, zeroed=bool(outside))
    kind = relax.TensorType([batch, *counts, *row], x.ty.dtype)
    return bb.emit(relax.call_tir(bb.add_func(function, "patches"), [x, *outside], kind))


def grouped_convolution(bb: Any, fused: FusedGroupedConvolution, x: Any, matrices: Any) -> Any:
    """x (B, ..., C), matrices (groups, K, N) -> (B, ..., groups x N): a product for each group, side by side as those
    of heads are, or sums of channels where groups are narrow. Raises ModelError where fixed sizes hold no patch at
    all."""
    if _is_narrow(fused, *map(int, dims(matrices))):
        return _narrow_groups(bb, fused, x, matrices)
    rows = x if fused.is_each_element else _patches(bb, fused, x, [])
    batch, *others = dims(rows)
    counts, (groups, width, columns) = others[: len(fused.kernel)], map(int, dims(matrices))
    apart = [batch, math.prod(counts[1:], start=counts[0]), groups, width]
    heads = bb.emit(relax.op.permute_dims(bb.emit(relax.op.reshape(rows, relax.ShapeExpr(apart))), [0, 2, 1, 3]))
    joined = bb.emit(relax.op.permute_dims(bb.emit(relax.op.matmul(heads, matrices)), [0, 2, 1, 3]))
    return bb.emit(relax.op.reshape(joined, relax.ShapeExpr([batch, *counts, groups * columns])))


_NARROW = 32
"""Channels that a group takes times those that it gives, up to which its product would be of too few numbers: as many
are copied side by side in a patch, and are columns of an output. From 64 on both ways are as fast."""


def _is_narrow(fused: FusedPatches, groups: int, width: int, columns: int) -> bool:
    return width // math.prod(fused.kernel) * columns <= _NARROW and groups * columns >= _LEAST_COPY


def _narrow_groups(bb: Any, fused: FusedPatches, x: Any, matrices: Any) -> Any:
    """Each output channel as a sum over taps and its group's channels, the first of all groups, then the second, and so
    on: x as often as a group has channels, each time spread over what it is for, is as an image of one more axis, whose
    channels are summed by themselves."""
    groups, width, columns = map(int, dims(matrices))
    inner = width // math.prod(fused.kernel)
    if any((*fused.before, *fused.behind)):
        x, _ = _widened(bb, fused, x, [])
    batch, *sizes, channels = dims(x)
    kind = relax.TensorType([batch, inner, *sizes, groups * columns], x.ty.dtype)
    function = _spread(str(x.ty.dtype), [batch, *sizes, channels], inner, columns, groups)
    spread = bb.emit(relax.call_tir(bb.add_func(function, "spread"), [x], kind))
    apart = bb.emit(relax.op.reshape(matrices, relax.ShapeExpr([groups, *fused.kernel, inner, columns])))
    rank = len(fused.kernel)
    turned = bb.emit(relax.op.permute_dims(apart, [rank + 1, *range(1, rank + 1), 0, rank + 2]))
    weight = bb.emit(relax.op.reshape(turned, relax.ShapeExpr([inner, *fused.kernel, groups * columns])))
    zeros = (0,) * (rank + 1)
    sums = FusedDepthwise(
        kernel=(inner, *fused.kernel),
        strides=(1, *fused.strides),
        dilations=(1, *fused.dilations),
        before=zeros,
        behind=zeros,
        channels_last=True,
    )
    y = depthwise(bb, sums, spread, weight)
    batch, _, *counts, outputs = dims(y)
    return bb.emit(relax.op.reshape(y, relax.ShapeExpr([batch, *counts, outputs])))


def _spread(dtype: str, source: list[Any], inner: int, columns: int, groups: int) -> Any:
    """The function of x (B, ..., C) that gives (B, inner, ..., groups x columns): of each group one of its channels for
    each of its outputs."""
    batch, *sizes, channels = map(_size, source)
    x = te.placeholder((batch, *sizes, channels), dtype, "x")

    def element(b: Any, i: Any, *at: Any) -> Any:
        return x[(b, *at[:-1], at[-1] // columns * inner + i)]

    y = te.compute(
        (batch, tirx.IntImm("int64", inner), *sizes, tirx.IntImm("int64", groups * columns)), element, "spread"
    )
    return te.create_prim_func([x, y]).without_attr("global_symbol").with_attr("op_pattern", OPAQUE)


def depthwise(bb: Any, fused: FusedDepthwise, x: Any, weight: Any) -> Any:
    """x (B, ..., C), weight (taps, C) -> (B, ..., C): of each channel the sum over the taps. Raises ModelError where
    fixed sizes hold no patch at all."""
    batch, *sizes, channels = dims(x)
    counts = [_count(fused, i, size) for i, size in enumerate(sizes)]
    if any((*fused.before, *fused.behind)):
        x, sizes = _widened(bb, fused, x, [])
        fused = replace(fused, before=(0,) * len(sizes), behind=(0,) * len(sizes))
    function = _channel_sums(fused, str(x.ty.dtype), channels, [batch, *sizes], counts)
    kind = relax.TensorType([batch, *counts, channels], x.ty.dtype)
    return bb.emit(relax.call_tir(bb.add_func(function, "depthwise"), [x, weight], kind))


def _channel_sums(fused: FusedPatches, dtype: str, channels: Any, source: list[Any], counts: list[Any]) -> Any:
    """The function of x, which has its edges, and of the weights; sums are float32, which is rounded once."""
    (batch, *sizes), counts = map(_size, source), [_size(count) for count in counts]
    x = te.placeholder((batch, *sizes, channels), dtype, "x")
    weight = te.placeholder((*(tirx.IntImm("int64", size) for size in fused.kernel), channels), dtype, "weight")
    taps = [te.reduce_axis((tirx.IntImm("int64", 0), tirx.IntImm("int64", size))) for size in fused.kernel]

    def term(b: Any, *at: Any) -> Any:
        along = [_source(fused, i, place, tap) for i, (place, tap) in enumerate(zip(at[:-1], taps, strict=True))]
        product = x[(b, *along, at[-1])].astype("float32") * weight[(*taps, at[-1])].astype("float32")
        return te.sum(product, axis=taps)

    y = te.compute((batch, *counts, channels), term, "depthwise")
    if dtype != "float32":
        sums = y
        y = te.compute(sums.shape, lambda *at: sums[at].astype(dtype), "rounded")
    return te.create_prim_func([x, weight, y]).without_attr("global_symbol").with_attr("op_pattern", OPAQUE)


def _row(fused: FusedPatches, channels: Any) -> tuple[Any, ...]:
    """What a row is, an axis each."""
    if not fused.channels_last:
        return (channels, *fused.kernel)
    alone = fused.groups == 1
    return (*fused.kernel, channels) if alone else (fused.groups, *fused.kernel, int(channels) // fused.groups)


_LEAST_COPY = 16
"""Elements side by side from which on each of them may be asked whether it lies outside: LLVM asks once for all."""


def _is_wide(channels: Any) -> bool:
    return isinstance(channels, int | tirx.IntImm) and int(channels) >= _LEAST_COPY


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
        if fused.groups > 1:
            channel, taps = within[0] * row[-1] + channel, taps[1:]
        return element(b, places, channel, taps)

    def in_place(b: Any, *at: Any) -> Any:
        channel, places = (at[-1], at[:-1]) if fused.channels_last else (at[0], at[1:])
        return element(b, places, channel, [0] * len(sizes))

    x = te.placeholder((batch, *sizes, channels) if fused.channels_last else (batch, channels, *sizes), dtype, "x")
    zero = [te.placeholder((), dtype, "zero")] * zeroed
    outside = zero[0]() if zero else tirx.const(0, dtype)
    row = _row(fused, channels)
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

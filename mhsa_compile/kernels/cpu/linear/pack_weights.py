"""The weights of a linear as its inner loop reads them: packed once, when they are bound.

Projections of one input lie side by side: output feature f of the operation is one column of one panel. Columns beyond
the last feature are zeros, and so are the terms of the last step beyond K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import prim_func
from mhsa_compile.kernels.common.op_args import packed_arguments, weight_arguments
from mhsa_compile.kernels.cpu.formats.choice import load_wide
from mhsa_compile.kernels.cpu.formats.format import Format
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd.vectors import load, materialize, store


@dataclass(frozen=True)
class OutputFeature:
    """One output feature: row `index` of a weight, or its column where that is transposed. No weight: all zeros."""

    weight: Expr | None
    index: Expr
    transposed: bool
    bias: Expr | None

    def at(self, k: Expr) -> list[Expr]:
        return [k, self.index] if self.transposed else [self.index, k]

    def wide(self, k: Expr) -> Expr:
        return T.float32(0) if self.weight is None else load_wide(self.weight, self.at(k), 1)

    def element(self, k: Expr, format: Format, factor: Expr | None) -> Expr:
        """Term k in a format: as it comes where it comes so."""
        return self._stored(k) if self._comes_as(format) else format.narrowed(self.wide(k), 1, factor)

    def bits(self, k: Expr, format: Format, factor: Expr | None) -> Expr:
        return format.bits_of(self._stored(k), 1) if self._comes_as(format) else format.bits(self.wide(k), 1, factor)

    def whole(self, k: Expr, format: Format, factor: Expr | None) -> Expr:
        return T.cast(self._stored(k), "int32") if self._comes_as(format) else format.whole(self.wide(k), 1, factor)

    def _comes_as(self, format: Format) -> bool:
        return self.weight is not None and self.weight.dtype == format.dtype

    def _stored(self, k: Expr) -> Expr:
        return load(self.weight, self.at(k), 1)


@dataclass(frozen=True)
class PackedFeature:
    """One column of one panel in the packed arrays."""

    layout: PackedLayout
    packed: list[Expr]
    panel: Expr
    column: Expr

    def store(self, array: int, value: Expr) -> None:
        store(self.packed[array], [self.panel, self.column], value, 1)

    def store_step(self, step: Expr, value: Expr) -> None:
        store(self.packed[0], [self.panel, step, self.column], value, 1)


def pack(layout: PackedLayout, write_more: Callable[[PackedFeature, OutputFeature], None] | None = None) -> Expr:
    """The PrimFunc (weights..., biases...) -> `layout.packed`. `write_more` writes what a layout adds to a feature."""
    op = layout.op
    with prim_func("pack_linear") as builder:
        weights, biases = weight_arguments(op)
        packed = packed_arguments(layout.packed)

        def write(number: int | None, index: Expr, panel: Expr, column: Expr) -> None:
            feature = OutputFeature(None, index, False, None)
            if number is not None:
                feature = OutputFeature(weights[number], index, op.transposed[number], biases[number])
            place = PackedFeature(layout, packed, panel, column)
            _write(place, feature)
            if write_more is not None:
                write_more(place, feature)

        each_column(layout, write)
    return builder.get()


def each_column(layout: PackedLayout, write: Callable[[int | None, Expr, Expr, Expr], None]) -> None:
    """write(number of the projection, feature in it, panel, column) for every column; no number beyond the last one."""
    with T.parallel(T.int64(layout.panels)) as panel, T.serial(T.int64(layout.panel)) as column:
        feature = materialize(panel * layout.panel + column)
        begin = 0
        for number, width in enumerate(layout.op.widths):
            with T.If(T.And(feature >= begin, feature < begin + width)), T.Then():
                write(number, materialize(feature - begin), panel, column)
            begin += width
        with T.If(feature >= begin), T.Then():
            write(None, feature, panel, column)


def write_zeros(packed: list[Expr], panel: Expr, column: Expr) -> None:
    """Fills a column of a panel with zeros, in each of the packed arrays."""
    for array in packed:
        zero = T.cast(T.int32(0), array.dtype)
        if len(array.shape) == 2:
            store(array, [panel, column], zero, 1)
            continue
        with T.serial(array.shape[1]) as row:
            store(array, [panel, row, column], zero, 1)


def _write(place: PackedFeature, feature: OutputFeature) -> None:
    layout, format = place.layout, place.layout.format
    place.store(1, T.float32(0) if feature.bias is None else load_wide(feature.bias, [feature.index], 1))
    factor = None
    if format.is_scaled:
        steps: list[Expr] = []
        factor = format.scale(lambda k, _: feature.wide(k), layout.op.in_features, 1, steps.append)
        place.store(2, *steps)
    if layout.weight == format.dtype:
        with T.serial(T.int64(layout.steps)) as k:
            place.store_step(k, feature.element(k, format, factor))
        return
    _write_words(place, lambda k: feature.bits(k, format, factor))
    if not layout.offset:
        return
    # x goes in as x + 128; what that adds to the feature's sums is taken off again.
    total = T.alloc_buffer((1,), "int32")
    store(total, [T.int64(0)], T.int32(0), 1)
    with T.serial(T.int64(layout.op.in_features)) as k:
        store(total, [T.int64(0)], total[0] + feature.whole(k, format, factor), 1)
    place.store(3, total[0] * T.int32(128))


def _write_words(place: PackedFeature, bits: Callable[[Expr], Expr]) -> None:
    """Writes each step as one word: `bits(k)` of its terms, the first lowest, zeros beyond K."""
    layout = place.layout
    size = 8 * layout.format.bytes
    with T.serial(T.int64(layout.steps)) as step:
        word = T.cast(T.int32(0), layout.weight)
        for j in range(layout.unit.group):
            k = materialize(step * layout.unit.group + j)
            # Not a select: of what lies beyond K nothing may be read.
            term = T.if_then_else(k < layout.op.in_features, bits(k), T.int32(0))
            word = word | (T.cast(term, layout.weight) << T.cast(T.int32(size * j), layout.weight))
        place.store_step(step, word)

"""Linears of x and weights in eight bits, as a file stores them: exact sums of int32, then its scales.

    sum (x - x_zero) (w - zero)  =  sum x w  -  zero sum x  -  x_zero sum (w - zero)

The unit sums x w. The last sum is of weights alone, one number a feature, and packed beside them; the one of x is a
number a row, and is needed only where a zero of the weights is not 0. The unit's bytes of w are signed: those that are
stored unsigned lose 128, and so do their zeros, which changes nothing; x is brought to what the unit takes likewise.

A CPU of x86-64 without VNNI gets both factors in 16 bits. Its instruction for unsigned bytes with signed ones,
vpmaddubsw, adds two products in 16 bits, where they do not fit: 2 * 255 * 127 is cut to 32767.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import DTYPE_BYTES, argument, prim_func
from mhsa_compile.kernels.common.op_args import packed_arguments
from mhsa_compile.kernels.cpu.formats.choice import FORMATS, load_wide
from mhsa_compile.kernels.cpu.linear.activations import PackedRows, allocated, whole
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel, product_function
from mhsa_compile.kernels.cpu.linear.microkernel import Product, tasks
from mhsa_compile.kernels.cpu.linear.pack_weights import each_column, write_zeros
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd.vectors import each_vector, load, materialize, splat, store, vector_type
from mhsa_compile.kernels.cpu.units.choice import NARROW, units
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import LinearOp, QuantisedLinearOp

MOST_TERMS = (2**31 - 1) // 255**2
"""So many products of differences of bytes fit int32, whatever they are; ONNX's sums wrap around beyond."""


class CpuQuantisedLinearKernel(CpuLinearKernel):
    """The product of packed bytes, for any vector CPU that has an instruction for them."""

    name = "cpu.linear_of_bytes"
    op_type = QuantisedLinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        if op.in_features > MOST_TERMS:
            return f"sums of products of bytes up to {MOST_TERMS} terms, not {op.in_features}"
        if self.layout(op, profile, 1).unit.dtype == "float32":
            return f"a CPU with an instruction for products of bytes ({', '.join(_FEATURES)})"
        return None

    def layout(self, op: LinearOp, profile: CpuProfile, columns: int) -> PackedLayout:
        unit = next((u for u in NARROW if u.dtype in _KINDS and u.is_on(profile)), units(profile, "int8")[-1])
        return LayoutOfBytes(op, FORMATS["int8"], unit, columns)

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        layout = self.layout(op, profile, config["columns"])
        assert isinstance(layout, LayoutOfBytes)
        return linear_of_bytes(layout, profile, config, ProductOfBytes, tasks)


_KINDS = ("int8", "int16")
_FEATURES = tuple(dict.fromkeys(unit.feature for unit in NARROW if unit.dtype in _KINDS))


def linear_of_bytes(
    layout: LayoutOfBytes, profile: CpuProfile, config: Config, product: type[ProductOfBytes], deal: Callable[..., None]
) -> Emitted:
    """The product with weights in this layout, and what packs them."""
    numbers = partial(_numbers, layout.stored)
    run = product_function(
        "linear_of_bytes", layout, profile, config, numbers=numbers, rows=_prepared, product=product, deal=deal
    )
    return Emitted(run, _pack(layout), layout.packed)


@dataclass(frozen=True)
class LayoutOfBytes(PackedLayout):
    """The unit multiplies bytes, or what they are in 16 bits."""

    @property
    def stored(self) -> QuantisedLinearOp:
        assert isinstance(self.op, QuantisedLinearOp)
        return self.op

    @property
    def flips(self) -> bool:
        """Whether the unit takes x as bytes of the other sign: with 128 more, or less, which is their highest bit."""
        return self.unit.dtype == "int8" and self.unit.unsigned != (self.stored.x_dtype == "uint8")

    @property
    def x_dtype(self) -> str:
        return self.stored.x_dtype

    @property
    def widens(self) -> bool:
        return False

    @property
    def factor(self) -> str:
        """dtype of x as it is multiplied."""
        return "uint8" if self.unit.unsigned else self.unit.dtype

    @property
    def packed(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Weight, bias, scale, the sum of w - zero, and zero where a sum of x is needed."""
        each = (self.panels, self.panel)
        zeros = () if self.stored.centred else ((each, "int32"),)
        words = ((self.panels, self.steps, self.panel), self.weight)
        return (words, (each, "float32"), (each, "float32"), (each, "int32"), *zeros)


# ---- The call


@dataclass(frozen=True)
class _RowsOfBytes(PackedRows):
    """zero, step  of x, as its bytes are multiplied
    sums           of each row's bytes (count,), or None"""

    zero: Expr = None
    step: Expr = None
    sums: Expr = None


@dataclass(frozen=True)
class ProductOfBytes(Product):
    def scaled(self, value: Expr, row: Expr, features: list[Expr], lanes: int) -> Expr:
        bias, scale, total, *zeros = features
        rows = self.rows
        assert isinstance(rows, _RowsOfBytes)
        value = value - splat(rows.zero, lanes) * total
        if zeros:
            value = value - splat(rows.sums[row], lanes) * zeros[0]
        return T.cast(value, vector_type("float32", lanes)) * (splat(rows.step, lanes) * scale) + bias


def _numbers(op: QuantisedLinearOp) -> tuple[Expr, Expr]:
    """(zero, scale) of x."""
    return argument("x_zero", [], op.x_dtype), argument("x_scale", [], "float32")


def _prepared(layout: LayoutOfBytes, x: Expr, x_zero: Expr, x_scale: Expr, count: Expr, size: Expr) -> _RowsOfBytes:
    """The rows of x (count, K) as the unit reads them: where they lie if it can, else copied."""
    op, unit = layout.stored, layout.unit
    zero = materialize(_byte(x_zero[()], layout.flips, op.x_dtype, 1), "int32")
    step = materialize(x_scale[()], "float32")
    sums = None if op.centred else T.alloc_buffer((size,), "int32")
    width = layout.steps * unit.group
    in_place = layout.factor == op.x_dtype and op.in_features == width and unit.rows == 1
    data = x if in_place else allocated(layout, size, layout.factor)
    rows = _RowsOfBytes(layout, data, None, zero, step, sums)
    if in_place and sums is None:
        return rows
    with T.parallel(whole(layout, count)) as row:
        source = materialize(T.min(row, count - 1)) if unit.rows > 1 else row
        total = _Total(layout.together)

        def take(k: Expr, n: int) -> None:
            value = _byte(load(x, [source, k], n), layout.flips, op.x_dtype, n)
            if sums is not None:
                value = materialize(value, "int32", n)
                total.add(value, n)
            if not in_place:
                store(data, rows.at(row, k), T.cast(value, vector_type(data.dtype, n)), n)

        each_vector(op.in_features, layout.together, take)
        if sums is not None:
            store(sums, [source], total.joined(), 1)
        if not in_place:
            for k in range(op.in_features, width):  # meets weights of zero: any byte would do
                store(data, rows.at(row, T.int64(k)), T.cast(T.int32(0), data.dtype), 1)
    return rows


def _byte(value: Expr, flips: bool, dtype: str, lanes: int) -> Expr:
    """Bytes as int32, 128 less of unsigned ones that become signed, 128 more of signed ones that become unsigned."""
    wide = T.cast(value, vector_type("int32", lanes))
    return wide + splat(T.int32(-128 if dtype == "uint8" else 128), lanes) if flips else wide


class _Total:
    """A sum of int32 in the lanes of a vector."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._cells = T.alloc_buffer((lanes,), "int32")
        store(self._cells, [T.int64(0)], splat(T.int32(0), lanes), lanes)

    def add(self, value: Expr, lanes: int) -> None:
        at = [T.int64(0)]
        store(self._cells, at, load(self._cells, at, lanes) + value, lanes)

    def joined(self) -> Expr:
        return sum((self._cells[i] for i in range(1, self._lanes)), start=self._cells[0])


# ---- The weights


@dataclass(frozen=True)
class _FeatureOfBytes:
    """What one output feature is made of: row `index` of a weight, or its column where that is transposed."""

    weight: Expr
    zeros: Expr
    scales: Expr
    bias: Expr | None
    index: Expr
    transposed: bool

    def byte(self, k: Expr) -> Expr:
        at = [k, self.index] if self.transposed else [self.index, k]
        return _byte(load(self.weight, at, 1), self.weight.dtype == "uint8", "uint8", 1)

    @property
    def zero(self) -> Expr:
        return _byte(self.zeros[self.index], self.zeros.dtype == "uint8", "uint8", 1)


def _pack(layout: LayoutOfBytes) -> Expr:
    """The PrimFunc (weights..., zeros..., scales..., biases...) -> `layout.packed`."""
    op = layout.stored
    with prim_func("pack_linear_of_bytes") as builder:
        shapes = [
            (op.in_features, n) if t else (n, op.in_features) for n, t in zip(op.widths, op.transposed, strict=True)
        ]
        features = [(T.int64(n),) for n in op.widths]
        kinds = zip(shapes, op.stored, strict=True)
        weights = [argument(f"weight{i}", [T.int64(n) for n in s], d) for i, (s, d) in enumerate(kinds)]
        zeros = [argument(f"zeros{i}", n, d) for i, (n, d) in enumerate(zip(features, op.stored, strict=True))]
        scales = [argument(f"scales{i}", n, "float32") for i, n in enumerate(features)]
        biases = [argument(f"bias{i}", n, "float32") if op.biased[i] else None for i, n in enumerate(features)]
        packed = packed_arguments(layout.packed)

        def write(i: int | None, index: Expr, panel: Expr, column: Expr) -> None:
            if i is None:
                write_zeros(packed, panel, column)
                return
            feature = _FeatureOfBytes(weights[i], zeros[i], scales[i], biases[i], index, op.transposed[i])
            _write(layout, packed, [panel, column], feature)

        each_column(layout, write)
    return builder.get()


def _write(layout: LayoutOfBytes, packed: list[Expr], at: list[Expr], feature: _FeatureOfBytes) -> None:
    op, unit = layout.stored, layout.unit
    size = 8 * DTYPE_BYTES[unit.dtype]
    zero = materialize(feature.zero, "int32")
    total = T.alloc_buffer((1,), "int32")
    store(total, [T.int64(0)], T.int32(0), 1)
    with T.serial(T.int64(layout.steps)) as step:
        word = T.cast(T.int32(0), layout.weight)
        for j in range(unit.group):
            k = materialize(step * unit.group + j)
            # Not a select: of what lies beyond K nothing may be read.
            byte = materialize(T.if_then_else(k < op.in_features, feature.byte(k), T.int32(0)), "int32")
            centred = T.if_then_else(k < op.in_features, byte - zero, T.int32(0))
            store(total, [T.int64(0)], total[0] + centred, 1)
            bits = byte & T.int32((1 << size) - 1)
            word = word | (T.cast(bits, layout.weight) << T.cast(T.int32(size * j), layout.weight))
        store(packed[0], [at[0], step, at[1]], word, 1)
    store(packed[1], at, T.float32(0) if feature.bias is None else load_wide(feature.bias, [feature.index], 1), 1)
    store(packed[2], at, feature.scales[feature.index], 1)
    store(packed[3], at, total[0], 1)
    if not op.centred:
        store(packed[4], at, zero, 1)

"""Linears of weights in few bits, by blocks along K of a scale and a zero each: W = (q - zero) scale.

A word of 32 bits has numbers of neighbouring terms, a plane of four bytes for each `bits` bits of it: number i lies in
byte i % 4, from bit `bits` * (i // 4) on.

x as it is: numbers become float32 on their way into a register or, where there are rows enough, once for a group of
tiles. x rounded to bytes by the same blocks, where a CPU has dot products of these: planes are factors as they are, and

    sum (q - zero) x  =  step scale (sum q x  -  zero sum x)

is exact up to the scales. Where the instruction takes bytes that are signed, those of eight bits lose 128 first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import argument, prim_func
from mhsa_compile.kernels.common.op_args import packed_arguments
from mhsa_compile.kernels.cpu.formats.choice import FORMATS, load_wide
from mhsa_compile.kernels.cpu.linear.activations import PackedRows, prepared
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel, product_function
from mhsa_compile.kernels.cpu.linear.microkernel import DepthPart, Product
from mhsa_compile.kernels.cpu.linear.pack_weights import each_column, write_zeros
from mhsa_compile.kernels.cpu.linear.packed_layout import PackedLayout
from mhsa_compile.kernels.cpu.simd.vectors import (
    RegisterTile,
    constant,
    each_task,
    each_vector,
    let,
    load,
    materialize,
    splat,
    store,
    vector_type,
)
from mhsa_compile.kernels.cpu.units.choice import NARROW
from mhsa_compile.kernels.cpu.units.dot_products import DotProducts
from mhsa_compile.kernels.cpu.units.float32_lanes import Float32Lanes
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import BlockLinearOp, LinearOp

WORD = 32  # bits
PLANE = 4  # bytes of a word, and so many numbers of one plane


class CpuBlockLinearKernel(CpuLinearKernel):
    """The product with packed weights of few bits, for any vector CPU."""

    name = "cpu.linear_of_blocks"
    op_type = BlockLinearOp

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        assert isinstance(op, BlockLinearOp)
        numbers = WORD // op.bits
        return f"blocks of a multiple of {numbers} terms, not {op.block}" if op.block % numbers else None

    def layout(self, op: LinearOp, profile: CpuProfile, columns: int) -> BlockLayout:
        assert isinstance(op, BlockLinearOp)
        lanes = Float32Lanes.of(profile)
        dots = (u for u in NARROW if isinstance(u, DotProducts) and u.dtype == "int8" and u.is_on(profile))
        dot = next((u for u in dots if u.lanes == lanes.lanes), None) if op.rounds_x else None
        return BlockLayout(op, FORMATS["float32"], lanes, columns, dot)

    def search_space(self, op: LinearOp, profile: CpuProfile) -> dict[str, tuple[int, ...]]:
        space = super().search_space(op, profile)
        return space if self.layout(op, profile, 1).dot is None else space | {"depth": (256, 1024, 4096)}

    def why_not_config(self, op: LinearOp, profile: CpuProfile, config: Config) -> str | None:
        reason = super().why_not_config(op, profile, config)
        if reason or self.layout(op, profile, 1).dot is None:
            return reason
        # Sums of a block beside those of all.
        return Float32Lanes.of(profile).why_not_tile(
            2 * config["rows"], config["columns"], profile.hardware.vector_registers
        )

    def default_config(self, op: LinearOp, profile: CpuProfile) -> dict[str, int]:
        layout = self.layout(op, profile, 2)
        if layout.dot is None:
            return super().default_config(op, profile)
        # Weights are few: an eighth of the second-level cache has those of a panel, a quarter the rows that meet them.
        rows, cache = 4 if profile.hardware.vector_registers >= 32 else 2, profile.hardware.l2_kib * 1024
        step = layout.panel * (layout.op_of_blocks.bits / 8 + 4 / layout.op_of_blocks.block)
        depth, block = max(512, int(cache / 8 / step)), max(1, cache // 4 // (layout.steps * rows))
        return {"rows": rows, "columns": 2, "block": min(512, block), "depth": depth, "group": 8}

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        layout = self.layout(op, profile, config["columns"])
        run = product_function("linear_of_blocks", layout, profile, config, rows=_rows, product=_BlockProduct)
        return Emitted(run, _pack(layout), layout.packed)


@dataclass(frozen=True)
class BlockLayout(PackedLayout):
    """A step is a term of K, of which a word has several. `dot` multiplies planes of words, if x is in bytes."""

    dot: DotProducts | None = None

    @property
    def op_of_blocks(self) -> BlockLinearOp:
        assert isinstance(self.op, BlockLinearOp)
        return self.op

    @property
    def numbers(self) -> int:
        """How many numbers a word packs."""
        return WORD // self.op_of_blocks.bits

    @property
    def half(self) -> int:
        """The middle of the numbers."""
        return 1 << (self.op_of_blocks.bits - 1)

    @property
    def lost(self) -> int:
        """What numbers lose before `dot` takes them."""
        return 128 if self.dot is not None and not self.dot.unsigned and self.op_of_blocks.bits == 8 else 0

    @property
    def zeros(self) -> str:
        """dtype of the packed zeros; "" where no weight has any."""
        kinds = set(self.op_of_blocks.zeros)
        return "float32" if "floats" in kinds else "uint8" if "bytes" in kinds else ""

    @property
    def steps(self) -> int:
        return self.op_of_blocks.blocks * self.op_of_blocks.block

    @property
    def words(self) -> int:
        return self.steps // self.numbers

    @property
    def weight(self) -> str:
        return "int32"

    def imported(self) -> AbstractContextManager[Any]:
        return (self.dot or self.unit).imported()

    @property
    def widens(self) -> bool:
        return True

    @property
    def is_worth_widening(self) -> bool:
        return self.dot is None

    @property
    def has_tiles_of_one(self) -> bool:
        return True

    def turn(self, lines: int) -> int:
        return self.op_of_blocks.block

    @property
    def packed(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Words, bias, scales, and zeros, where any weight has some."""
        each = (self.panels, self.op_of_blocks.blocks, self.panel)
        words = ((self.panels, self.words, self.panel), self.weight)
        zeros = ((each, self.zeros),) if self.zeros else ()
        return (words, ((self.panels, self.panel), "float32"), (each, "float32"), *zeros)

    def place(self, number: int) -> int:
        """The lowest bit of a number of a word."""
        return 8 * (number % PLANE) + self.op_of_blocks.bits * (number // PLANE)


# ---- The rows of x


@dataclass(frozen=True)
class _RowsByBlocks(PackedRows):
    """steps   of each block of a row (count, n), float32
    starts     what a block's sum begins with, a multiple of the sum of its bytes (count, n), int32
    totals     the sum of its bytes (count, n), float32, where weights have zeros"""

    steps: Expr = None
    starts: Expr = None
    totals: Expr | None = None


def _rows(layout: BlockLayout, x: Expr, count: Expr, size: Expr) -> PackedRows:
    """The rows of x (count, K) as they are multiplied."""
    op = layout.op_of_blocks
    if not op.rounds_x:
        return prepared(layout, x, count, size)
    of_bytes = layout.dot is not None
    data = T.alloc_buffer((size, T.int64(layout.steps)), "int8" if of_bytes else "float32")
    if not of_bytes:
        rows = PackedRows(layout, data)
    else:
        blocks = size, T.int64(op.blocks)
        steps, starts = T.alloc_buffer(blocks, "float32"), T.alloc_buffer(blocks, "int32")
        totals = T.alloc_buffer(blocks, "float32") if layout.zeros else None
        rows = _RowsByBlocks(layout, data, steps=steps, starts=starts, totals=totals)
    whole, rest = divmod(op.in_features, op.block)

    def round_row(row: Expr) -> None:
        if whole:
            with T.serial(T.int64(whole)) as block:
                _round(layout, x, rows, row, block, op.block)
        if rest:
            _round(layout, x, rows, row, T.int64(whole), rest)
            for k in range(op.in_features, layout.steps):
                store(data, [row, T.int64(k)], T.cast(T.int32(0), data.dtype), 1)

    each_task(count, op.in_features, round_row)
    return rows


def _round(layout: BlockLayout, x: Expr, rows: PackedRows, row: Expr, block: Expr, width: int) -> None:
    """A block of a row in bytes or, for products of float32, what these stand for."""
    stored, first = FORMATS["int8"], materialize(block * layout.op_of_blocks.block)
    cell = T.alloc_buffer((1,), "float32")

    def read(k: Expr, n: int) -> Expr:
        return load_wide(x, [row, first + k], n)

    factor = stored.scale(read, width, layout.lanes, lambda step: store(cell, [T.int64(0)], step, 1))
    sums = T.alloc_buffer((layout.lanes,), "int32")
    store(sums, [T.int64(0)], splat(T.int32(0), layout.lanes), layout.lanes)

    def write(k: Expr, n: int) -> None:
        whole = materialize(stored.whole(read(k, n), n, factor), "int32", n)
        if isinstance(rows, _RowsByBlocks):
            store(sums, [T.int64(0)], load(sums, [T.int64(0)], n) + whole, n)
            store(rows.data, [row, first + k], T.cast(whole, vector_type("int8", n)), n)
        else:
            value = T.cast(whole, vector_type("float32", n)) * splat(cell[0], n)
            store(rows.data, [row, first + k], value, n)

    each_vector(width, layout.lanes, write)
    if isinstance(rows, _RowsByBlocks):
        total = materialize(sum((sums[i] for i in range(1, layout.lanes)), start=sums[0]), "int32")
        store(rows.steps, [row, block], cell[0], 1)
        taken_off = (0 if layout.zeros else layout.half) - layout.lost  # of each number
        store(rows.starts, [row, block], total * T.int32(-taken_off), 1)
        if rows.totals is not None:
            store(rows.totals, [row, block], T.cast(total, "float32"), 1)


# ---- The product


@dataclass(frozen=True)
class _BlockProduct(Product):
    sums_few_apart: ClassVar[bool] = False

    @property
    def _layout(self) -> BlockLayout:
        assert isinstance(self.layout, BlockLayout)
        return self.layout

    def result(self, value: Expr, row: Expr, p: Expr, column: int) -> Expr:
        offset, lanes = self.columns[column]
        return value + load(self.packed[1], [p, T.int64(offset)], lanes)

    def add_products(self, tile: RegisterTile, lines: list[Expr], p: Expr, part: DepthPart, *, ahead: bool) -> None:
        if part.wide is not None:
            super().add_products(tile, lines, p, part, ahead=ahead)
        elif isinstance(self.rows, _RowsByBlocks):
            self._add_bytes(tile, self.rows, lines, p, part, ahead=ahead)
        else:
            self._add_floats(tile, lines, p, part, ahead=ahead)

    def widen(self, p: Expr, part: DepthPart, wide: Expr) -> None:
        block, numbers = self._layout.op_of_blocks.block, self._layout.numbers
        with T.serial(T.truncdiv(part.first, block), T.truncdiv(part.end, block)) as b:
            scales = self._offsets(p, b)
            with T.serial(T.int64(block // numbers)) as w:
                word = materialize(b * (block // numbers) + w)
                for c, (offset, lanes) in enumerate(self.columns):
                    packed = let(load(self.packed[0], [p, word, T.int64(offset)], lanes))
                    for number in range(numbers):
                        value = self._wide(packed, number, *scales[c], lanes)
                        store(wide, [word * numbers + number - part.first, T.int64(offset)], value, lanes)

    def _add_floats(self, tile: RegisterTile, lines: list[Expr], p: Expr, part: DepthPart, *, ahead: bool) -> None:
        layout = self._layout
        block, numbers = layout.op_of_blocks.block, layout.numbers
        rows, run = self.rows.of(lines), min(layout.run, numbers)
        with T.serial(T.truncdiv(part.first, block), T.truncdiv(part.end, block)) as b:
            scales = self._offsets(p, b)
            with T.serial(T.int64(block // numbers)) as w:
                word = materialize(b * (block // numbers) + w)
                packed = self._words(p, word, ahead=ahead)
                for first in range(0, numbers, run):
                    steps = rows.factors(layout.unit, word * numbers + first, run)
                    for number, factors in enumerate(steps, start=first):
                        weights = [
                            self._wide(packed[c], number, *scales[c], lanes)
                            for c, (_, lanes) in enumerate(self.columns)
                        ]
                        layout.unit.multiply(tile, factors, weights, True)

    def _add_bytes(
        self, tile: RegisterTile, rows: _RowsByBlocks, lines: list[Expr], p: Expr, part: DepthPart, *, ahead: bool
    ) -> None:
        layout, dot = self._layout, self._layout.dot
        assert dot is not None
        block, numbers = layout.op_of_blocks.block, layout.numbers
        with T.serial(T.truncdiv(part.first, block), T.truncdiv(part.end, block)) as b:
            sums = RegisterTile(len(lines), self.columns, "int32")
            starts = [let(rows.starts[line, b]) for line in lines]
            sums.each(lambda line, c: splat(starts[line], self.columns[c][1]))
            with T.serial(T.int64(block // numbers)) as w:
                word = materialize(b * (block // numbers) + w)
                packed = self._words(p, word, ahead=ahead)
                for plane in range(numbers // PLANE):
                    factors = [self._plane(packed[c], plane, lanes) for c, (_, lanes) in enumerate(self.columns)]
                    k = word * numbers + PLANE * plane
                    x = [dot.words(rows.data, [line, k], 1) for line in lines]
                    sums.outer_product(x.__getitem__, factors.__getitem__, dot.accumulate_turned)
            scales = self._scales(p, b)
            steps = [let(rows.steps[line, b]) for line in lines]
            totals = [] if rows.totals is None else [let(rows.totals[line, b]) for line in lines]

            def scaled(line: int, c: int) -> Expr:
                lanes, (scale, zero) = self.columns[c][1], scales[c]
                value = T.cast(sums.get(line, c), vector_type("float32", lanes))
                if zero is not None:
                    value = value - zero * splat(totals[line], lanes)
                return tile.get(line, c) + value * (scale * splat(steps[line], lanes))

            tile.each(scaled)

    def _words(self, p: Expr, word: Expr, *, ahead: bool) -> list[Expr]:
        """A vector of words for each column."""
        if ahead:
            self.lookahead.ask_beyond(p, word, 1)
        return [let(load(self.packed[0], [p, word, T.int64(offset)], lanes)) for offset, lanes in self.columns]

    def _scales(self, p: Expr, block: Expr) -> list[tuple[Expr, Expr | None]]:
        """(scale, zero) of each column; no zero where none are stored."""

        def read(array: Expr, offset: int, lanes: int) -> Expr:
            value = load(array, [p, block, T.int64(offset)], lanes)
            return materialize(T.cast(value, vector_type("float32", lanes)), "float32", lanes)

        scales, *zeros = self.packed[2:]
        return [(read(scales, *column), read(zeros[0], *column) if zeros else None) for column in self.columns]

    def _offsets(self, p: Expr, block: Expr) -> list[tuple[Expr, Expr]]:
        """(scale, -zero scale) of each column."""
        pairs = zip(self._scales(p, block), self.columns, strict=True)
        middle = float(self._layout.half)
        return [
            (scale, materialize(scale * (constant(-middle, n) if zero is None else -zero), "float32", n))
            for (scale, zero), (_, n) in pairs
        ]

    def _wide(self, words: Expr, number: int, scale: Expr, offset: Expr, lanes: int) -> Expr:
        """A number of each word as the weight that it is."""
        bits, place = self._layout.op_of_blocks.bits, self._layout.place(number)
        low_bits = words >> splat(T.int32(place), lanes) if place else words
        plain = low_bits & splat(T.int32((1 << bits) - 1), lanes)
        return T.cast(plain, vector_type("float32", lanes)) * scale + offset

    def _plane(self, words: Expr, plane: int, lanes: int) -> Expr:
        """Four numbers of each word, in bytes, as the dot product takes them."""
        bits = self._layout.op_of_blocks.bits
        if bits < 8:
            low_bits = words >> splat(T.int32(bits * plane), lanes) if plane else words
            words = low_bits & splat(T.int32(0x01010101 * ((1 << bits) - 1)), lanes)
        if self._layout.lost:
            words = words ^ splat(T.int32(0x80808080 - (1 << WORD)), lanes)
        return let(words)


# ---- The weights


def _pack(layout: BlockLayout) -> Expr:
    """The PrimFunc (numbers..., scales..., zeros..., biases...) -> `layout.packed`."""
    op = layout.op_of_blocks
    with prim_func("pack_linear_of_blocks") as builder:
        shapes = [tuple(map(T.int64, (n, op.blocks, op.block * op.bits // 8))) for n in op.widths]
        sizes = [(T.int64(n * op.blocks),) for n in op.widths]
        widths = [(T.int64(n),) for n in op.widths]
        numbers = [argument(f"weight{i}", shape, "uint8") for i, shape in enumerate(shapes)]
        scales = [argument(f"scales{i}", size, op.dtype) for i, size in enumerate(sizes)]
        zeros = [_zeros(op, i, size) for i, size in enumerate(sizes)]
        biases = [argument(f"bias{i}", n, op.dtype) if op.biased[i] else None for i, n in enumerate(widths)]
        packed = packed_arguments(layout.packed)

        def write(i: int | None, index: Expr, panel: Expr, column: Expr) -> None:
            if i is None:
                write_zeros(packed, panel, column)
                return
            _write(layout, packed, [panel, column], _BlockFeature(numbers[i], scales[i], zeros[i], biases[i], index))

        each_column(layout, write)
    return builder.get()


def _zeros(op: BlockLinearOp, i: int, floats: tuple[Expr, ...]) -> Expr | None:
    bytes = (T.int64(op.widths[i] * op.zero_bytes),)
    shapes = {"bytes": (bytes, "uint8"), "floats": (floats, op.dtype)}
    return argument(f"zeros{i}", *shapes[op.zeros[i]]) if op.zeros[i] else None


@dataclass(frozen=True)
class _BlockFeature:
    """What one output feature is made of: row `index` of a weight."""

    numbers: Expr
    scales: Expr
    zeros: Expr | None
    bias: Expr | None
    index: Expr


def _write(layout: BlockLayout, packed: list[Expr], at: list[Expr], feature: _BlockFeature) -> None:
    op, p, column = layout.op_of_blocks, *at
    together = 8 // op.bits  # numbers of a byte
    store(packed[1], at, T.float32(0) if feature.bias is None else load_wide(feature.bias, [feature.index], 1), 1)
    with T.serial(T.int64(op.blocks)) as block:
        own = materialize(feature.index * op.blocks + block)
        store(packed[2], [p, block, column], load_wide(feature.scales, [own], 1), 1)
        if layout.zeros:
            zero = _zero(layout, feature, block)
            store(packed[3], [p, block, column], T.cast(zero, layout.zeros), 1)
        with T.serial(T.int64(op.block // layout.numbers)) as w:
            word = T.int32(0)
            for i in range(layout.numbers):
                byte = feature.numbers[feature.index, block, (w * layout.numbers + i) // together]
                word = materialize(word | (_number(byte, i, op.bits) << T.int32(layout.place(i))), "int32")
            store(packed[0], [p, block * (op.block // layout.numbers) + w, column], word, 1)


def _number(byte: Expr, place: Expr | int, bits: int) -> Expr:
    """A number of a byte, as int32."""
    together = 8 // bits
    first = T.int32(bits * (place % together)) if isinstance(place, int) else T.cast(place % together * bits, "int32")
    return (T.cast(byte, "int32") >> first) & T.int32((1 << bits) - 1)


def _zero(layout: BlockLayout, feature: _BlockFeature, block: Expr) -> Expr:
    op = layout.op_of_blocks
    if feature.zeros is None:
        return T.float32(layout.half)
    if feature.zeros.dtype != "uint8":
        return load_wide(feature.zeros, [feature.index * op.blocks + block], 1)
    return _number(feature.zeros[feature.index * op.zero_bytes + block // (8 // op.bits)], block, op.bits)

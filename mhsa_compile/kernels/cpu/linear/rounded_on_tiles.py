"""Linears of float32 on matrix tiles whose factors are rounded to bfloat16: one product for one of float32.

Weights are packed as bfloat16, half the bytes, in the form in which tiles take them, so that a task reads and
multiplies as one of bfloat16 does (linear/tiles.py). Rows of x are rounded once a call, each tile of them 1 KiB of its
own. Sums, bias and y are float32.

What rounding would make something else of (units/float32_terms.py) is multiplied in float32 instead, by the same
weights: tiles of 16 rows of which one is extraordinary, and panels that have such a feature.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.formats.choice import load_wide
from mhsa_compile.kernels.cpu.formats.floats import Bfloat16
from mhsa_compile.kernels.cpu.linear.kernel import product_function
from mhsa_compile.kernels.cpu.linear.pack_weights import OutputFeature, PackedFeature, pack
from mhsa_compile.kernels.cpu.linear.term_factors import PLAIN_ROWS, TermRows, TileRange
from mhsa_compile.kernels.cpu.linear.tiles import COLUMNS, CpuTileLinearKernel, Sums, TileLayout, TileProduct, deal
from mhsa_compile.kernels.cpu.simd.vectors import (
    RegisterTile,
    any_lane,
    let,
    load,
    materialize,
    splat,
    store,
    vector_type,
)
from mhsa_compile.kernels.cpu.units import float32_terms, tiles
from mhsa_compile.kernels.cpu.units.float32_terms import LANES
from mhsa_compile.kernels.interface.kernel import Config, Emitted
from mhsa_compile.kernels.interface.ops import LinearOp
from mhsa_compile.spec.float32_products import Float32Products

WORD: Float32Products = "bf16"
SMALLEST, LARGEST, INFINITY = 0x10000, 0x7F7F0000, 0x7F800000
"""Magnitudes of bfloat16, as bits of a float32."""


class CpuRoundedTileLinearKernel(CpuTileLinearKernel):
    """Packed-weight matrix product of float32 on tiles of bfloat16, its factors rounded."""

    name = "cpu.rounded_linear_on_tiles"

    def why_not(self, op: LinearOp, profile: CpuProfile) -> str | None:
        if op.int8_weights or op.dtype != "float32":
            return f"float32, not {'weights in eight bits' if op.int8_weights else op.dtype}"
        if op.float32_products != WORD:
            return f"factors rounded to bfloat16, not {op.float32_products}"
        return None if tiles.BFLOAT16.is_on(profile) else "a CPU with amx_bf16"

    def float32_products(self, op: LinearOp, profile: CpuProfile) -> tuple[Float32Products, ...]:
        plain = op.dtype == "float32" and not op.int8_weights
        return (WORD,) if plain and tiles.BFLOAT16.is_on(profile) else ()

    def exact_products(self, op: LinearOp, profile: CpuProfile) -> tuple[Float32Products, ...]:
        return ()

    def layout(self, op: LinearOp) -> RoundedLayout:
        return RoundedLayout(op, ClampedBfloat16("bfloat16", "bfloat16"), tiles.BFLOAT16, COLUMNS)

    def emit(self, op: LinearOp, profile: CpuProfile, config: Config) -> Emitted:
        layout = self.layout(op)
        run = product_function("linear", layout, profile, config, rows=rounded_rows, product=RoundedProduct, deal=deal)
        return Emitted(run, pack(layout, _flag), layout.packed)


class ClampedBfloat16(Bfloat16):
    """Rounded to nearest, but what is finite stays finite, and what is not zero stays so: beside an infinity of x it
    matters."""

    def narrowed(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        def number(bits: int) -> Expr:
            return splat(T.uint32(bits), lanes)

        bits = T.reinterpret(vector_type("uint32", lanes), value)
        magnitude = let(float32_terms.magnitude(value, lanes))
        clamped = T.min(T.max(magnitude, number(SMALLEST)), number(LARGEST))
        stays = T.Or(magnitude == number(0), magnitude >= number(INFINITY))
        magnitude = T.Select(stays, magnitude, clamped)
        sign = bits & number(0x80000000)
        return super().narrowed(T.reinterpret(vector_type("float32", lanes), magnitude | sign), lanes)


class RoundedLayout(TileLayout):
    """With whether a feature is extraordinary, behind its bias."""

    @property
    def packed(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        return (*super().packed, ((self.panels, self.panel), "int32"))


def _flag(place: PackedFeature, feature: OutputFeature) -> None:
    """Writes whether a feature's largest weight asks for float32."""
    largest = T.alloc_buffer((1,), "uint32")
    store(largest, [T.int64(0)], T.uint32(0), 1)
    with T.serial(T.int64(place.layout.op.in_features)) as k:
        store(largest, [T.int64(0)], T.max(largest[0], float32_terms.magnitude(feature.wide(k), 1)), 1)
    place.store(2, T.cast(float32_terms.is_extraordinary(largest[0]), "int32"))


def rounded_rows(layout: RoundedLayout, x: Expr, count: Expr, size: Expr) -> TermRows:
    """The first term of the rows of x (count, K), after the loop that writes them."""
    rows = TermRows.allocated(layout, x, count, size, shape=(None, layout.tiles, 1))
    rows.split(T.int64(0), ceil_div(count, tiles.ROWS), TileRange(T.int64(0), T.int64(layout.tiles)))
    return rows


@dataclass(frozen=True)
class RoundedProduct(TileProduct):
    """What is multiplied by tiles, and by vectors where something is extraordinary."""

    layout: RoundedLayout
    rows: TermRows

    def load_rows(self, start: Expr, k: Expr) -> None:
        at = [materialize(T.truncdiv(start, T.int64(tiles.ROWS))), k, T.int64(0), T.int64(0)]
        tiles.stream_tile(tiles.LEFT, self.rows.data, at, self.layout.unit.depth)

    def start(self, own: Expr) -> Expr:
        """Tiles of x are whole."""
        return own

    def result(self, value: Expr, row: Expr, p: Expr, column: int) -> Expr:
        return value + self.features(p, column)[0]

    def settle(self, is_whole: Expr, p: Expr, own: Expr, sums: Sums, place: Expr) -> None:
        """Sums of something extraordinary are those of products of float32."""
        with T.If(is_whole), T.Then():
            features = [load(self.packed[2], [p, T.int64(offset)], lanes) for offset, lanes in self.columns]
            flags = [any_lane(flag > splat(T.int32(0), LANES), LANES) for flag in features]
            has_flag = T.Or(T.Or(*flags), self.rows.extraordinary[T.truncdiv(own, T.int64(tiles.ROWS))] > 0)
            with T.If(materialize(T.cast(has_flag, "int32"), "int32") > 0), T.Then():
                self._multiply_plainly(p, own, sums, place)

    def _multiply_plainly(self, p: Expr, own: Expr, sums: Sums, place: Expr) -> None:
        """The sums of a tile of rows by float32 products, in place of those that tiles made."""
        K = self.layout.op.in_features
        with T.serial(T.int64(tiles.ROWS // PLAIN_ROWS)) as i:
            rows = [materialize(T.min(own + i * PLAIN_ROWS + r, self.count - 1)) for r in range(PLAIN_ROWS)]
            tile = RegisterTile(PLAIN_ROWS, self.columns)
            tile.fill(0.0)
            with T.serial(T.int64(K // 2)) as word:
                for half in range(2):
                    self._add_plain(tile, rows, p, word, half)
            if K % 2:
                self._add_plain(tile, rows, p, T.int64(K // 2), 0)
            for r in range(PLAIN_ROWS):
                for c in range(COLUMNS):
                    store(sums.data, sums.at(place, c, i * PLAIN_ROWS + r), tile.get(r, c), LANES)

    def _add_plain(self, tile: RegisterTile, rows: list[Expr], p: Expr, word: Expr, half: int) -> None:
        """The tile += the products of one half of a word of the weights."""

        def weights(c: int) -> Expr:
            bits = load(self.packed[0], [p, word, T.int64(c * LANES)], LANES)
            upper = bits & splat(T.int32(-65536), LANES) if half else bits << splat(T.int32(16), LANES)
            return T.reinterpret(vector_type("float32", LANES), upper)

        tile.outer_product(lambda r: load_wide(self.rows.x, [rows[r], word * 2 + half], 1), weights)

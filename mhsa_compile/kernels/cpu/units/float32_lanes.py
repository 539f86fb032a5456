"""Float32 in the lanes of a vector: a multiply-add of one element of A and a vector of B. Every machine has it.

Elements of fewer bits are widened first, on their way into a register or, where they are read often, into scratch.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.formats.choice import load_row, load_wide
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, constant, load, store
from mhsa_compile.kernels.cpu.units.unit import Strips, Unit


class Float32Lanes(Unit):
    @property
    def word(self) -> str:
        return "float32"

    @staticmethod
    def of(profile: CpuProfile) -> Float32Lanes:
        lanes, run = profile.vector_lanes("float32"), profile.elements_at_once("float32")
        return Float32Lanes("float32", "float32", lanes, run=run)

    def multiply(self, sums: RegisterTile, a: Sequence[Expr], b: Sequence[Expr], columns_first: bool) -> None:
        sums.outer_product(a.__getitem__, b.__getitem__)

    def words(self, buffer: Expr, index: Sequence[Expr], count: int) -> Expr:
        return load(buffer, index, count)

    def pack_columns(self, packed: Expr, strips: Strips, scale: float) -> None:
        def scaled(row: Expr, k: Expr, count: int) -> Expr:
            return load_wide(strips.buffer, strips.at(row, k), count) * constant(scale, count)

        vectors.pack_transposed(packed, strips.count, strips.width, self.lanes, strips.numbers, scaled)

    def pack_rows(self, packed: Expr, columns: Sequence[Chunk], view: HeadView, first: Expr, count: Expr) -> None:
        with T.serial(count) as j:
            for column, lanes in columns:
                value = load_row(view, first + j, T.int64(column), lanes)
                store(packed, [j, T.int64(column)], value, lanes)

    @property
    def keeps_sums(self) -> bool:
        return True

    def as_factors(self, sums: Sequence[Expr], lanes: int) -> Expr:
        return sums[0]

    def element(self, word: Expr, place: Expr) -> Expr:
        return word

    def rescaled(self, words: Expr, factor: Expr, lanes: int) -> Expr:
        return words * factor

"""Four bits, two numbers to a byte, as ONNX Runtime's caches have them: the first in the lower half, 8 above what it
is. Steps are applied by others: to queries, and to what comes out."""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.formats.format import Format
from mhsa_compile.kernels.cpu.simd.vectors import load, splat, vector_type
from mhsa_compile.kernels.interface.ops import INT4_ZERO


class Int4Pairs(Format):
    def place(self, index: Sequence[Expr]) -> list[Expr]:
        return [*index[:-1], T.truncdiv(index[-1], T.int64(2))]

    def widened(self, elements: Expr, lanes: int) -> Expr:
        """`lanes` numbers of half as many bytes."""
        twice = T.Shuffle([elements] * 2, [T.int32(lane // 2) for lane in range(lanes)])
        bits = T.cast(twice, vector_type("int32", lanes))
        halves = (T.Ramp(T.int32(0), T.int32(1), lanes) & splat(T.int32(1), lanes)) << splat(T.int32(2), lanes)
        whole = ((bits >> halves) & splat(T.int32(15), lanes)) - splat(T.int32(INT4_ZERO), lanes)
        return T.cast(whole, vector_type("float32", lanes))

    def load(self, buffer: Expr, index: Sequence[Expr], lanes: int) -> Expr:
        """An even number of numbers, from an even column on."""
        assert lanes % 2 == 0, "a byte has two"
        return self.widened(load(buffer, self.place(index), lanes // 2), lanes)

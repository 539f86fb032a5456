"""Eight bits and a step for each row, symmetric: as activations have it in Dettmers et al., LLM.int8(), 2022."""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.formats.format import Format
from mhsa_compile.kernels.cpu.simd.vectors import constant, each_vector, load, materialize, splat, store, vector_type

LARGEST = 127
ROUNDING = 12582912.0  # 1.5 * 2**23: added to a small number, it leaves the nearest integer in the sum's low bits
ROUNDING_BITS = 0x4B400000  # of that number itself
LEAST = 2.0**-119
"""Rows that are smaller everywhere count as zero: their step would be less than a normal float32."""


class Int8Rows(Format):
    def widened(self, elements: Expr, lanes: int) -> Expr:
        return T.cast(elements, vector_type("float32", lanes))

    def narrowed(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        return T.cast(self.whole(value, lanes, factor), vector_type("int8", lanes))

    def bits(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        return self.whole(value, lanes, factor) & splat(T.int32(255), lanes)

    def rounded(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        return T.cast(self.whole(value, lanes, factor), vector_type("float32", lanes))

    def whole(self, value: Expr, lanes: int, factor: Expr | None = None) -> Expr:
        """Some number or other for NaN and infinity."""
        assert factor is not None
        shifted = value * splat(factor, lanes) + constant(ROUNDING, lanes)
        return T.reinterpret(vector_type("int32", lanes), shifted) - splat(T.int32(ROUNDING_BITS), lanes)

    def scale(self, read: Callable[[Expr, int], Expr], count: int, lanes: int, keep: Callable[[Expr], None]) -> Expr:
        """LARGEST steps are the largest magnitude."""
        largest = materialize(largest_magnitude(read, count, lanes), "float32")
        keep(largest / T.float32(LARGEST))
        factor = T.Select(largest < T.float32(LEAST), T.float32(0), T.float32(LARGEST) / largest)
        return materialize(factor, "float32")


def largest_magnitude(read: Callable[[Expr, int], Expr], count: int, lanes: int) -> Expr:
    """max |read(k, n)|, by its bits: in the order of the numbers, NaN above all, so that no maximum loses one."""
    top = T.alloc_buffer((lanes,), "int32")
    store(top, [T.int64(0)], splat(T.int32(0), lanes), lanes)

    def update(k: Expr, n: int) -> None:
        magnitude = T.reinterpret(vector_type("int32", n), read(k, n)) & splat(T.int32(0x7FFFFFFF), n)
        store(top, [T.int64(0)], T.max(load(top, [T.int64(0)], n), magnitude), n)

    each_vector(count, lanes, update)
    largest = top[0]
    for lane in range(1, lanes):
        largest = T.max(largest, top[lane])
    return T.reinterpret("float32", largest)

"""The scores of four query rows against keys of int8, on matrix tiles: exact in whole numbers.

A query row is a whole number of 28 bits times a step, 2^27 steps its largest magnitude, cut into four digits of seven
bits, the first of which has the sign:

    q = step (d0 2^21 + d1 2^14 + d2 2^7 + d3)

So four digits of four rows are the sixteen columns of a tile, and sixteen keys, as they lie in memory, its rows. The
sums of digits are exact; each is multiplied by its weight in float32, and the four of a row are added. What is left of
q is finer than the rounding of a float32 at its largest.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CpuProfile
from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.decode.query_key import ScoreLayout, add_halves
from mhsa_compile.kernels.cpu.formats.choice import load_wide
from mhsa_compile.kernels.cpu.formats.int8_rows import largest_magnitude
from mhsa_compile.kernels.cpu.simd.vectors import each_vector, let, load, materialize, store, zero_if_finite
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.interface.ops import AttentionOp

ROWS, DIGITS, BITS = 4, 4, 7
GROUP = 2 * tiles.ROWS
"""Keys whose sums are in tiles at once: while the vectors read those of one tile, the unit multiplies for the other."""
_FIXED = float(1 << (BITS * DIGITS - 1))
_LEAST = 2.0**-100
"""Rows of Q that are smaller everywhere count as zero: steps to its largest have no float32."""
_LONGEST = 1 << 9
"""Elements of a head of whose digits a sum is exact in float32."""


def takes(op: AttentionOp, layout: ScoreLayout, profile: CpuProfile) -> bool:
    """Whether scores are computed so."""
    whole = op.head_dim % tiles.ROW_BYTES == 0 and op.head_dim <= _LONGEST
    fits = layout.padded_rows == ROWS and layout.lanes == tiles.WORDS and op.key.layout == "heads"
    return op.stored_dtype == "int8" and whole and fits and tiles.SIGNED_BYTES.is_on(profile)


class TileQueries:
    """Digits of Q: words (E / 64, 16, 16 columns) of four neighbours, and the weight of each column."""

    def __init__(self, layout: ScoreLayout, head_dim: int, scale: float) -> None:
        self.layout, self.size, self.scale = layout, head_dim, scale
        self.steps = head_dim // tiles.ROW_BYTES
        self.digits = T.alloc_buffer((self.steps, tiles.WORDS, ROWS * DIGITS, 4), "int8")
        self.weights = T.alloc_buffer((ROWS * DIGITS,), "float32")
        self.sums = T.alloc_buffer((GROUP, ROWS * DIGITS), "int32")
        self.keys = T.alloc_buffer((GROUP, head_dim), "int8")
        if layout.rows < ROWS:
            self._clear()

    def _clear(self) -> None:
        with T.serial(T.int64(self.steps * tiles.WORDS)) as word, T.serial(T.int64(ROWS * DIGITS)) as column:
            place = [T.truncdiv(word, T.int64(tiles.WORDS)), T.truncmod(word, T.int64(tiles.WORDS)), column]
            for i in range(4):
                T.buffer_store(self.digits, T.int8(0), [*place, T.int64(i)])
        for column in range(ROWS * DIGITS):
            T.buffer_store(self.weights, T.float32(0), [T.int64(column)])

    def pack(self, row: Expr, query: HeadView, at: Expr) -> None:
        """Row `row` is the query at `at`. One with NaN or infinity has weights of NaN, and so scores."""

        def read(k: Expr, n: int) -> Expr:
            return load_wide(query.buffer, query.at(at, k), n)

        largest = materialize(largest_magnitude(read, self.size, self.layout.lanes), "float32")
        factor = materialize(
            T.Select(largest < T.float32(_LEAST), T.float32(0), T.float32(_FIXED) / largest), "float32"
        )
        step = materialize(largest * T.float32(self.scale / _FIXED) + zero_if_finite(largest, 1), "float32")
        for digit in range(DIGITS):
            weight = step * T.float32(1 << BITS * (DIGITS - 1 - digit))
            T.buffer_store(self.weights, weight, [row + ROWS * digit])
        with T.serial(T.int64(self.size)) as k:
            nearest = T.call_llvm_pure_intrin("float32", "llvm.rint", read(k, 1) * factor)
            number = materialize(T.cast(nearest, "int32"), "int32")
            word = T.truncmod(T.truncdiv(k, T.int64(4)), T.int64(tiles.WORDS))
            place = [T.truncdiv(k, T.int64(tiles.ROW_BYTES)), word]
            for digit in range(DIGITS):
                part = number >> T.int32(BITS * (DIGITS - 1 - digit))
                part = part if digit == 0 else part & T.int32((1 << BITS) - 1)
                store_at = [*place, row + ROWS * digit, T.truncmod(k, T.int64(4))]
                T.buffer_store(self.digits, T.cast(part, "int8"), store_at)

    def scores(self, keys: Sequence[Expr], key: HeadView, row_vector: int, *, apart: bool) -> list[Expr]:
        """Vectors of q . k for a group of keys (rows of `key`), which may not lie behind each other where `apart`."""
        if apart:
            for i, row in enumerate(keys):
                each_vector(
                    self.size,
                    tiles.ROW_BYTES,
                    lambda at, n, i=i, row=row: store(  # type: ignore[misc]
                        self.keys, [T.int64(i), at], load(key.buffer, key.at(row, at), n), n
                    ),
                )
        for tile in range(GROUP // tiles.ROWS):
            tiles.zero(tile)
        for step in range(self.steps):
            first = T.int64(step * tiles.ROW_BYTES)
            tiles.load_tile(tiles.RIGHTS[step % 2], self.digits, [T.int64(step), *[T.int64(0)] * 3], ROWS * DIGITS * 4)
            for tile in range(GROUP // tiles.ROWS):
                at = [T.int64(tile * tiles.ROWS), first] if apart else key.at(keys[tile * tiles.ROWS], first)
                left = tiles.LEFTS[tile % 2]
                tiles.load_tile(left, self.keys if apart else key.buffer, at, self.size)
                tiles.SIGNED_BYTES.product(tile, left, tiles.RIGHTS[step % 2])
        for tile in range(GROUP // tiles.ROWS):
            tiles.store_tile(tile, self.sums, [T.int64(tile * tiles.ROWS), T.int64(0)], ROWS * DIGITS)
        weights, lanes = let(load(self.weights, [T.int64(0)], self.layout.lanes)), self.layout.lanes
        vectors = []
        for first_key in range(0, GROUP, ROWS):
            rows = [
                let(T.cast(load(self.sums, [T.int64(first_key + i), T.int64(0)], lanes), f"float32x{lanes}") * weights)
                for i in range(ROWS)
            ]
            while len(rows) > 1:
                rows = add_halves(rows, lanes, ROWS, lanes)
            vectors.append(rows[0])
        return vectors

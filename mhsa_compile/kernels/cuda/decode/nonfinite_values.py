"""Values that are not finite, in a warp's tiles of which some rows do not see all keys: a prob of 0 would make them
NaN.

They are looked for as they arrive. Where there are any, which is never in a model that is well, every row adds those
that it sees, and they become zeros; so the weighted sum of the others follows as ever. An infinite or NaN value times a
prob is itself.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention import nonfinite_values
from mhsa_compile.kernels.cuda.attention.nonfinite_values import EXPONENT
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import SharedTiles, padded
from mhsa_compile.kernels.cuda.primitives.warp import (
    ROWS,
    WARP,
    ThreadIndex,
    from_lane,
    load,
    materialize,
    over_warp,
    registers,
    warp_barrier,
)


class WarpNonFiniteRepair:
    """Looks after the values of one warp."""

    def __init__(self, values: SharedTiles, place: ThreadIndex, dtype: str) -> None:
        self.values, self.place, self.dtype = values, place, dtype
        self.pieces = nonfinite_values.BlockNonFiniteRepair(values, None, place, WARP, dtype)
        self._word = registers(1, "uint32")

    def look(self, slot: Expr) -> None:
        """Looks for values that are not finite in this lane's pieces of the tile, and tells all lanes whether any of
        them found one. To be called when the pieces have arrived."""
        self.pieces.find(slot, self.place.lane, WARP)
        over_warp(self.pieces.nonfinite, 0, lambda a, b: a | b)

    def resolve(
        self,
        slot: Expr,
        rows: int,
        tiles: int,
        sees: Callable[[int, int], Expr],
        add: Callable[[int, int, int, Expr], None],
    ) -> None:
        """Adds the values of the tile, of `tiles` times 8 keys, that are not finite to the sums of the rows that see
        them, and makes them zeros, if `look` found any. `add(row, tile of columns, half of it, value)` adds one to the
        sums of a lane's `rows`; `sees(row, n)` is whether one sees key 8 n + g."""
        with T.If(self.pieces.nonfinite[0] != T.uint32(0)), T.Then():
            for n in range(tiles):
                with T.serial(T.int32(8)) as turn:
                    holder = materialize(turn * 4 + self.place.q)
                    visible = [self._of_lane(sees(row, n), holder) for row in range(rows)]
                    for tile in range(padded(self.values.width) // ROWS):
                        for half in range(2):
                            value = self._value(slot, turn + 8 * n, self.place.g + (tile * ROWS + 8 * half))
                            for row in range(rows):
                                add(row, tile, half, T.Select(visible[row], value, T.float32(0)))
            warp_barrier()
            self.pieces.clear(slot, self.place.lane, WARP)
            warp_barrier()

    def _of_lane(self, flag: Expr, lane: Expr) -> Expr:
        number = materialize(T.Select(flag, T.int32(1), T.int32(0)))
        return materialize(from_lane(number, lane) != 0, "bool")

    def _value(self, slot: Expr, key: Expr, column: Expr) -> Expr:
        """A value as float32 if it is not finite, else zero."""
        load(self._word, 0, 1, self.values.address(slot, key, T.truncdiv(column, T.int32(2)) * 2))
        shift = T.cast(T.truncmod(column, T.int32(2)) * 16, "uint32")
        half = materialize((self._word[0] >> shift) & T.uint32(0xFFFF), "uint32")
        exponent = T.uint32(EXPONENT[self.dtype])
        infinite = ((half & T.uint32(0x8000)) << T.uint32(16)) | T.uint32(0x7F800000)
        bits = T.Select((half & T.uint32(0x7FFF)) == exponent, infinite, T.uint32(0x7FC00000))
        bits = T.Select((half & exponent) == exponent, bits, T.uint32(0))
        return materialize(T.reinterpret("float32", materialize(bits, "uint32")), "float32")

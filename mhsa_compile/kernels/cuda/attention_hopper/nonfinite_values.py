"""Values that are not finite, where several warpgroups share the tiles: as in `attention/nonfinite_values`, but for who
looks, and when. Tiles of which some rows do not see all keys are looked through every time: who copies has gone on.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.nonfinite_values import WORD, BlockNonFiniteRepair
from mhsa_compile.kernels.cuda.primitives.fragments import cell
from mhsa_compile.kernels.cuda.primitives.hopper_ptx import fence_for_engines, fresh, meet, meet_any
from mhsa_compile.kernels.cuda.primitives.hopper_tma import SwizzledTiles
from mhsa_compile.kernels.cuda.primitives.warp import COLUMNS, ThreadIndex, materialize, registers, set_register


class SharedNonFiniteRepair(BlockNonFiniteRepair):
    """Looks after the values of tiles that `threads` threads share, which meet at a named barrier; one of them is
    number `thread`. Made where it is needed, so that no address of it is kept in the meantime."""

    def __init__(self, values: SwizzledTiles, thread: Expr, threads: int, barrier: int, dtype: str) -> None:
        super().__init__(values, None, ThreadIndex(fresh(thread)), threads, dtype)
        self._tiles, self._any, self._barrier = values, registers(1, "uint32"), T.uint32(barrier)

    def look_together(self, slot: Expr) -> Expr:
        """Whether any of all the threads has found a value that is not finite, each in pieces of its own."""
        self.find(slot, self.place.thread, self.threads)
        meet_any(self._any, self._barrier, self.threads, self.nonfinite[0])
        return self._any[0] != T.uint32(0)

    def resolve_together(self, slot: Expr, sums: Expr, keys: int, hide: Callable[[Expr, int, Expr], None]) -> None:
        """Adds the values that are not finite to the sums of the rows that see them, and makes them zeros.
        `hide(scores, tiles, part)` makes -inf of the scores of the keys from 32 `part` on that are hidden."""
        tiles = WORD // COLUMNS
        with T.serial(T.int32(-(-keys // WORD))) as part:
            scores, visible = registers(4 * tiles), registers(2, "uint32")
            for at in range(4 * tiles):
                set_register(scores, at, T.float32(0))
            hide(scores, tiles, part)
            for row in range(2):
                self._set_visible(visible, row, [(n * COLUMNS, cell(row, tiles, n, 0)) for n in range(tiles)], scores)
            first = materialize(part * WORD)
            self._add_keys(slot, visible, 2, first, materialize(T.min(T.int32(WORD), T.int32(keys) - first)), sums)
        # All have added before anyone clears; named, since the warpgroup that copies does not come.
        meet(self._barrier, self.threads)
        self.clear(slot, self.place.thread, self.threads)
        fence_for_engines()
        meet(self._barrier, self.threads)

    def _words_of(self, slot: Expr, row: Expr) -> Callable[[int], Expr]:
        """The address of this lane's word of a row's chunk, by the chunk's number. It is computed for each row anew: 32
        addresses kept over all rows would take the registers that sums need."""
        row = fresh(row)
        start = materialize(self._tiles.row_start(slot, row) + T.cast(4 * self.place.q, "uint32"), "uint32")
        return lambda chunk: start + self._tiles.chunk_in_row(chunk, row)

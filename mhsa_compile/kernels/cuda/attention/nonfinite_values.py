"""Values that are not finite, in tiles of which some rows do not see all keys: a prob of 0 would make them NaN.

Whoever copied a piece of such a tile looks through it as it arrives, and says so to all. Where there is any, which is
never in a model that is well, every row adds those that it sees as they are, one key after the other, and the values
become zeros; so the weighted sum of the others follows as ever. An infinite or NaN value times a prob is itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives import simt
from mhsa_compile.kernels.cuda.primitives.hopper_ptx import fence_for_engines, fresh, meet, meet_any
from mhsa_compile.kernels.cuda.primitives.hopper_tma import SwizzledTiles
from mhsa_compile.kernels.cuda.primitives.simt import COLUMNS, barrier, cell, load, materialize, registers, set_register
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import CHUNK, SharedTiles, padded

WORD = 32  # bits
EXPONENT = {"bfloat16": 0x7F80, "float16": 0x7C00}


class BlockNonFiniteRepair:
    """Looks after the values of one block. `flag` is the address of a word of shared memory, the number of the last
    tile that had any: a number, so that nobody has to take it back. What it holds at first does no harm."""

    def __init__(
        self, values: SharedTiles | SwizzledTiles, flag: Expr, place: simt.ThreadIndex, threads: int, dtype: str
    ) -> None:
        self.values, self.flag, self.place, self.threads, self.dtype = values, flag, place, threads, dtype
        exponent = EXPONENT[dtype]
        # The exponent's lowest bit: added to an exponent of all ones, it carries into the sign's place.
        step = exponent & -exponent
        self._exponents, self._steps = T.uint32(exponent * 0x10001), T.uint32(step * 0x10001)
        self._words, self.nonfinite = registers(4, "uint32"), registers(1, "uint32")

    def look(self, slot: Expr, turn: Expr) -> None:
        """Looks through this thread's pieces of the tile of this turn, and notes the turn in the flag if any value is
        not finite. To be called when the pieces have arrived, and before the barrier after that."""
        self.find(slot, self.place.thread, self.threads)
        with T.If(self.nonfinite[0] != T.uint32(0)), T.Then():
            simt.store(self.flag, [T.cast(turn, "uint32")])

    def find(self, slot: Expr, thread: Expr, threads: int) -> None:
        """Looks through this thread's pieces, of so many threads'; `nonfinite` is 0 if all their values are finite."""
        set_register(self.nonfinite, 0, T.uint32(0))

        def piece(row: Expr, column: Expr) -> None:
            load(self._words, 0, 4, self.values.address(slot, row, column))
            for i in range(4):
                set_register(self.nonfinite, 0, self.nonfinite[0] | self._infinite(self._words[i]))

        self.values.each_chunk(thread, threads, piece)

    def _infinite(self, word: Expr) -> Expr:
        """The highest bit of each half that is NaN or infinite: its exponent, one more, overflows into it."""
        return ((word & self._exponents) + self._steps) & T.uint32(0x80008000)

    def resolve(self, slot: Expr, turn: Expr, scores: Expr, sums: Expr, row_tiles: int, keys: int) -> None:
        """Adds the values of the tile that are not finite to the sums of the rows that see them, and makes them zeros,
        if `look` found any. To be called after the barrier that follows `look`, when what is hidden is -inf in
        `scores`."""
        load(self._words, 0, 1, self.flag)
        with T.If(self._words[0] == T.cast(turn, "uint32")), T.Then():
            # All have added before anyone clears, and all have cleared before anyone multiplies.
            self._add(slot, scores, sums, row_tiles, keys)
            barrier()
            self.clear(slot, self.place.thread, self.threads)
            barrier()

    def clear(self, slot: Expr, thread: Expr, threads: int) -> None:
        """Makes the values of this thread's pieces that are not finite zeros."""
        self.values.each_chunk(thread, threads, lambda row, column: self._clear(slot, row, column))

    def _clear(self, slot: Expr, row: Expr, column: Expr) -> None:
        address = self.values.address(slot, row, column)
        load(self._words, 0, 4, address)
        for i in range(4):
            word = self._words[i]
            # A bit for each half becomes all bits of it.
            halves = (self._infinite(word) >> T.uint32(15)) * T.uint32(0xFFFF)
            set_register(self._words, i, word & (halves ^ T.uint32(0xFFFFFFFF)))
        simt.store(address, [self._words[i] for i in range(4)])

    def _add(self, slot: Expr, scores: Expr, sums: Expr, row_tiles: int, keys: int) -> None:
        """O = O + v for every value v that is not finite and that a row sees. A loop over the keys, since what it is
        unrolled by takes registers from the loop that matters."""
        rows, key_tiles = 2 * row_tiles, keys // COLUMNS
        visible = registers(rows, "uint32")
        for first in range(0, keys, WORD):
            tiles = range(first // COLUMNS, min(first + WORD, keys) // COLUMNS)
            for row in range(rows):
                self._set_visible(
                    visible, row, [(n * COLUMNS - first, cell(row, key_tiles, n, 0)) for n in tiles], scores
                )
            self._add_keys(slot, visible, rows, T.int32(first), T.int32(len(tiles) * COLUMNS), sums)

    def _add_keys(self, slot: Expr, visible: Expr, rows: int, first: Expr, count: Expr, sums: Expr) -> None:
        """Adds `count` keys from `first` on, of which row r sees those whose bits are set in visible[r]."""
        value_tiles = padded(self.values.width) // COLUMNS
        with T.serial(count) as key:
            address = self._words_of(slot, key + first)
            for n in range(value_tiles):
                load(self._words, 0, 1, address(n))
                # A branch, so that not all words are loaded at once, into registers that sums need.
                with T.If(self._infinite(self._words[0]) != T.uint32(0)), T.Then():
                    for e, value in enumerate(simt.unpack(self._words[0], self.dtype)):
                        for row in range(rows):
                            at = cell(row, value_tiles, n, e)
                            sees = ((visible[row] >> T.cast(key, "uint32")) & T.uint32(1)) != T.uint32(0)
                            adds = T.And(sees, self._infinite_half(self._words[0], e))
                            set_register(sums, at, T.Select(adds, sums[at] + value, sums[at]))

    def _words_of(self, slot: Expr, row: Expr) -> Callable[[int], Expr]:
        """The address of this lane's word of a row's chunk, by the chunk's number."""
        return lambda chunk: self.values.address(slot, row, 2 * self.place.q + chunk * CHUNK)

    def _set_visible(self, visible: Expr, row: int, cells: list[tuple[int, int]], scores: Expr) -> None:
        """visible[row]: bit i, whether the row sees key i of 32. `cells`: the first key of a tile, and where its score
        is."""
        set_register(visible, row, T.uint32(0))
        for first, at in cells:
            for e in range(2):
                bit = T.Select(scores[at + e] == T.float32(-math.inf), T.uint32(0), T.uint32(1 << first + e))
                set_register(visible, row, visible[row] | bit)
        # A lane has two keys of every eight; together the quad's words have all 32.
        set_register(visible, row, visible[row] << T.cast(2 * self.place.q, "uint32"))
        simt.over_quad(visible, row, lambda a, b: a | b)

    def _infinite_half(self, word: Expr, half: int) -> Expr:
        exponent = T.uint32(EXPONENT[self.dtype] << 16 * half)
        return (word & exponent) == exponent


class SharedNonFiniteRepair(BlockNonFiniteRepair):
    """Looks after the values of tiles that the `threads` threads of some warpgroups share, which meet at a named
    barrier; one of them is number `thread`. Tiles are looked through every time: who copies has gone on. Made where it
    is needed, so that no address of it is kept in the meantime."""

    def __init__(self, values: SwizzledTiles, thread: Expr, threads: int, barrier: int, dtype: str) -> None:
        super().__init__(values, None, simt.ThreadIndex(fresh(thread)), threads, dtype)
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
            simt.clear(scores, 4 * tiles)
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


class WarpNonFiniteRepair:
    """Looks after the values of one warp."""

    def __init__(self, values: SharedTiles, place: simt.ThreadIndex, dtype: str) -> None:
        self.values, self.place, self.dtype = values, place, dtype
        self.pieces = BlockNonFiniteRepair(values, None, place, simt.WARP, dtype)
        self._word = registers(1, "uint32")

    def look(self, slot: Expr) -> None:
        """Looks for values that are not finite in this lane's pieces of the tile, and tells all lanes whether any of
        them found one. To be called when the pieces have arrived."""
        self.pieces.find(slot, self.place.lane, simt.WARP)
        simt.over_warp(self.pieces.nonfinite, 0, lambda a, b: a | b)

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
                    for tile in range(padded(self.values.width) // simt.ROWS):
                        for half in range(2):
                            value = self._value(slot, turn + 8 * n, self.place.g + (tile * simt.ROWS + 8 * half))
                            for row in range(rows):
                                add(row, tile, half, T.Select(visible[row], value, T.float32(0)))
            simt.warp_barrier()
            self.pieces.clear(slot, self.place.lane, simt.WARP)
            simt.warp_barrier()

    def _of_lane(self, flag: Expr, lane: Expr) -> Expr:
        number = materialize(T.Select(flag, T.int32(1), T.int32(0)))
        return materialize(simt.from_lane(number, lane) != 0, "bool")

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

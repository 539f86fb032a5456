"""O^T of a tile of queries, and the block of keys whose values are still to be added to it.

A block's values are multiplied among the scores of the next block, the last one's of a tile among those of the first
block of the thread's next tile, whatever head that is of. So a tile that has ended leaves its sums here, open, and Y is
written when its last block is in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.head_layout import HeadView, head_view
from mhsa_compile.kernels.cpu.formats.choice import prefetch_rows
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import constant, let, load, materialize, scratch, store
from mhsa_compile.kernels.cpu.tile_attention import powers
from mhsa_compile.kernels.cpu.tile_attention.powers import LANES
from mhsa_compile.kernels.cpu.tile_attention.products import HeldTiles, ProductsOfTerms
from mhsa_compile.kernels.cpu.tile_attention.state import StripState
from mhsa_compile.kernels.cpu.tile_attention.terms import term_pairs
from mhsa_compile.kernels.cpu.tile_attention.values import KEYS, KeyValueTiles
from mhsa_compile.kernels.cpu.units import tiles
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.spec.float32_products import is_coarse

_COUNT, _FIRST, _SIDE, _OPEN, _ENTRY, _HEAD, _QUERY = range(7)


class TileOutput:
    """Scratch is allocated where it is constructed.

    probs (2, chunks, terms, columns, 256)   words of probs, of the block that waits and of the one that comes
    o (F / 16, columns, 256)                 O^T in float32
    part (F / 16, columns, 256)              what a block adds to it, if that is a sum of its own
    inverse (queries,)                       1 / l of the tile that is open
    """

    def __init__(
        self, op: AttentionOp, values: KeyValueTiles, queries: int, keys: int, y: Expr, q_length: Expr
    ) -> None:
        self.op, self.values, self.queries, self.y, self.q_length = op, values, queries, y, q_length
        self.chunks, self.features = keys // KEYS, op.v_head_dim // tiles.ROWS
        self.share = -(-self.features // self.chunks)
        """Tiles of features that each chunk of keys adds of the block before."""
        self.columns = queries // LANES
        self.products = ProductsOfTerms(values.unit, term_pairs(op), self.columns)
        self.probs = scratch((2, self.chunks, values.terms, self.columns, 256), "int32")
        self.o = scratch((self.features, self.columns, 256))
        is_exact = values.terms > 1 and not is_coarse(op.float32_products)
        self.part = scratch((self.features, self.columns, 256)) if is_exact else None
        self.inverse, self.state = scratch((queries,)), StripState(7)

    @property
    def sums(self) -> list[Expr]:
        """What values are added up in."""
        return [self.o] if self.part is None else [self.o, self.part]

    @property
    def is_open(self) -> Expr:
        """Whether the sums are those of a tile that has ended."""
        return self.state.holds(_OPEN)

    def own(self) -> Expr:
        """1 where sums and the block that waits are of the tile that is visited, 0 where they are of the one before."""
        return materialize(T.Select(self.is_open, T.int64(0), T.int64(1)))

    @property
    def count(self) -> Expr:
        """Chunks of the block that waits."""
        return self.state.get(_COUNT)

    @property
    def side(self) -> Expr:
        """Where in `probs` the block that waits is."""
        return self.state.get(_SIDE)

    def start(self) -> None:
        """Nothing waits, and nothing was added up."""
        for cell in (_COUNT, _FIRST, _SIDE, _OPEN):
            self.state.set(cell, 0)
        with T.serial(T.int64(self.features)) as feature:
            for c in range(self.columns):
                with T.serial(T.int64(tiles.ROWS)) as row:
                    self._clear(feature, c, row)

    def _clear(self, feature: Expr, c: int, row: Expr | int) -> None:
        for sums in self.sums:
            store(sums, [feature, T.int64(c), T.int64(0) + row * LANES], constant(0.0, LANES), LANES)

    # ---- Blocks

    def wait(self, row: Expr, count: Expr) -> None:
        """The block whose probs are complete, of so many chunks from `row` of the values on, waits."""
        self.state.set(_COUNT, count)
        self.state.set(_FIRST, row)
        self.state.set(_SIDE, T.int64(1) - self.side)

    def forget(self) -> None:
        """What waited was added in another way."""
        self.state.set(_COUNT, 0)

    def fits(self, first: Expr) -> Expr:
        """Whether a full block waits, with a whole share of features from `first` on."""
        return T.And(self.count == T.int64(self.chunks), first + self.share <= T.int64(self.features))

    def steps(self, first: Expr) -> list[Callable[[], None]]:
        """O^T += V^T P^T of a full block that waits, for a share of the features; a pair of terms of a chunk each."""
        row, side, held = materialize(self.state.get(_FIRST)), materialize(self.side), HeldTiles()
        pairs = len(self.products.pairs)

        def multiply(number: int, step: int, pair: int) -> None:
            if step == pair == 0:
                self._begin_sums(first + number)
            self._multiply(held, pair, first + number, row, side, T.int64(step), (number, step))
            if step == self.chunks - 1 and pair == pairs - 1:
                self._end_sums(first + number)

        places = itertools.product(range(self.share), range(self.chunks), range(pairs))
        return [partial(multiply, *place) for place in places]

    def add_waiting(self, first: Expr, end: Expr) -> None:
        """O^T += V^T P^T of the block that waits, for features first .. end, in tiles of them."""
        count, row, side = (materialize(self.state.get(cell)) for cell in (_COUNT, _FIRST, _SIDE))
        with T.If(count > 0), T.Then(), T.serial(first, end) as feature:
            self._begin_sums(feature)
            with T.serial(count) as step:
                held = HeldTiles()
                for pair in range(len(self.products.pairs)):
                    self._multiply(held, pair, feature, row, side, step, ())
            self._end_sums(feature)

    def _begin_sums(self, feature: Expr) -> None:
        """Tiles of sums of a tile of features, one for each column of queries."""
        if self.part is not None:
            self._add_part(feature)
        for c in range(self.columns):
            if self.part is None:
                tiles.load_tile(c, self.o, [feature, T.int64(c), T.int64(0)], LANES)
            else:
                tiles.zero(c)

    def _end_sums(self, feature: Expr) -> None:
        for c in range(self.columns):
            tiles.store_tile(c, self.sums[-1], [feature, T.int64(c), T.int64(0)], LANES)

    def _add_part(self, feature: Expr) -> None:
        """O^T += what the block before the one that waits has given."""
        for c in range(self.columns):
            with T.serial(T.int64(tiles.ROWS)) as row:
                at = [feature, T.int64(c), row * LANES]
                store(self.o, at, load(self.o, at, LANES) + load(self.part, at, LANES), LANES)

    def _multiply(
        self, held: HeldTiles, pair: int, feature: Expr, row: Expr, side: Expr, step: Expr, place: tuple[int, ...]
    ) -> None:
        """The tiles of O^T += those of V^T and P^T, of a pair of terms and of chunk `step` of a block."""

        def left(term: int) -> None:
            load_tile = tiles.stream_tile if self.values.terms == 1 else tiles.load_tile
            load_tile(tiles.LEFT, self.values.tiles, self.values.value_place(row + step, feature, term), KEYS)

        def right(term: int, c: int) -> None:
            tiles.load_tile(tiles.RIGHT, self.probs, [side, step, T.int64(term), T.int64(c), T.int64(0)], LANES)

        self.products.add(held, pair, left, right, place)

    # ---- Tiles of queries

    def leave(self, place: tuple[Expr, Expr, Expr], inverse: Callable[[int], Expr]) -> None:
        """The tile of (entry, head, first query) has ended: its sums are open, to be multiplied by `inverse`, that of
        each column of queries. Asks for the lines that Y goes to."""
        for c in range(self.columns):
            store(self.inverse, [T.int64(c * LANES)], inverse(c), LANES)
        for cell, value in zip((_ENTRY, _HEAD, _QUERY), place, strict=True):
            self.state.set(cell, value)
        self.state.set(_OPEN, 1)
        prefetch_rows(self._view(*place[:2]), place[2], self.queries, self.op.v_head_dim, write=True)

    def write(self, *, waits: bool = False) -> None:
        """Writes Y of the tile that is open, if one is; `waits`: a block of its values, perhaps, is not in the sums."""
        with T.If(self.is_open), T.Then():
            if waits:
                self.add_waiting(T.int64(0), T.int64(self.features))
                self.forget()
            self._write()

    def _view(self, b: Expr, h: Expr) -> HeadView:
        return head_view(self.y, self.op.output, self.op.v_head_dim, b, h)

    def _write(self) -> None:
        """Y = O / l, and O = 0."""
        b, h, first_query = (materialize(self.state.get(cell)) for cell in (_ENTRY, _HEAD, _QUERY))
        output, dtype = self._view(b, h), self.op.dtype
        if self.part is not None:
            with T.serial(T.int64(self.features)) as feature:
                self._add_part(feature)
        count = materialize(T.min(T.int64(self.queries), self.q_length - first_query))
        # So many features are a vector of the output, which becomes a square.
        together = 1 if dtype == "float32" else 2
        for c in range(self.columns):
            inverse = let(load(self.inverse, [T.int64(c * LANES)], LANES))
            with T.serial(T.int64(self.features // together)) as part:
                rows = []
                for number in range(LANES * together):
                    feature, row = part * together + number // LANES, number % LANES
                    rows.append(let(load(self.o, [feature, T.int64(c), T.int64(row * LANES)], LANES) * inverse))
                    self._clear(feature, c, row)
                words = rows
                if together > 1:
                    words = [powers.pairs(*rows[i : i + 2], dtype=dtype) for i in range(0, 2 * LANES, 2)]
                for lane, line in enumerate(vectors.transpose([let(word) for word in words])):
                    with T.If(c * LANES + lane < count), T.Then():
                        at = output.at(first_query + (c * LANES + lane), part * (LANES * together))
                        line = line if together == 1 else T.reinterpret(f"{dtype}x32", line)
                        store(output.buffer, at, line, LANES * together)
        self.state.set(_OPEN, 0)

"""The scores of a few query rows against keys: dot products along vectors, `lanes` of them turned into one vector.

A vector of scores holds `keys_per_vector` keys x `padded_rows` rows, rows fastest; where the rows fill more than one
vector, it holds one key, and there are `row_vectors` of them a key. Each key is read once for all its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.head_layout import HeadView
from mhsa_compile.kernels.cpu.formats.choice import load_wide
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import RegisterTile, constant, let, load, splat, store


@dataclass(frozen=True)
class ScoreLayout:
    """How `rows` query rows share vectors of `lanes` with keys."""

    rows: int
    lanes: int
    registers: int
    tiles: int = 0
    """Keys whose scores are in matrix tiles at once, where they are computed there."""
    runs: int = 1
    """Runs of a block's rows that are asked for in turn."""

    def whole_groups(self, keys: int) -> int:
        """So many keys, rounded up to whole groups."""
        return -(-keys // self.group) * self.group

    def asked_for(self, number: Expr, count: int) -> Expr:
        """The row that is fetched ahead as number `number`, of `count`: runs of them take turns."""
        if self.runs == 1 or count % self.runs:
            return number
        return vectors.in_turn(number, self.runs, count // self.runs)

    @property
    def padded_rows(self) -> int:
        """The rows with their padding: a power of two below one vector, whole vectors from there on."""
        if self.rows < self.lanes:
            return 1 << (self.rows - 1).bit_length()
        return -(-self.rows // self.lanes) * self.lanes

    @property
    def row_vectors(self) -> int:
        return max(1, self.padded_rows // self.lanes)

    @property
    def keys_per_vector(self) -> int:
        return max(1, self.lanes // self.padded_rows)

    @property
    def group(self) -> int:
        """Keys whose dot products are in registers at once: as many vectors of sums as leave a quarter of them free; or
        in tiles."""
        if self.tiles:
            return self.tiles
        vectors_at_once = max(1, vectors.tile_registers(self.registers) // self.lanes)
        return self.keys_per_vector * (1 << (vectors_at_once.bit_length() - 1))

    def rows_of(self, row_vector: int) -> range:
        """The rows in one vector of sums, without the padding."""
        first = row_vector * self.lanes
        return range(first, min(self.rows, first + self.lanes))

    def place(self, key: Expr, row_vector: int) -> Expr:
        """The index at which the scores of the keys from `key` on (the first of a vector) begin in a flat buffer of
        scores."""
        return key * self.padded_rows + row_vector * self.lanes

    def key_of_lane(self) -> Expr:
        """int32: which of its vector's keys each lane belongs to."""
        if self.keys_per_vector == 1:
            return splat(T.int32(0), self.lanes)
        shift = self.padded_rows.bit_length() - 1
        return T.Ramp(T.int32(0), T.int32(1), self.lanes) >> splat(T.int32(shift), self.lanes)

    def over_keys(self, vector: Expr, combine: object) -> Expr:
        """Combines (T.max, sum) the lanes of each row over the keys of the vector; every lane gets its row's result."""
        # Rotations by half the vector, a quarter, ...: in the end all lanes of a row agree.
        step = self.lanes // 2
        while step >= self.padded_rows:
            rotation = T.Shuffle([vector], [T.int32((lane + step) % self.lanes) for lane in range(self.lanes)])
            vector = let(combine(vector, rotation))  # type: ignore[operator]
            step //= 2
        return vector


class PackedQueries:
    """Q * scale of all rows, each chunk of the head padded with zeros to a whole vector."""

    def __init__(self, layout: ScoreLayout, head_dim: int, scale: float) -> None:
        self.layout, self.scale = layout, scale
        self.chunks = vectors.chunks(head_dim, layout.lanes)
        self.whole = sum(lanes == layout.lanes for _, lanes in self.chunks)
        self.buffer = T.alloc_buffer((layout.rows, len(self.chunks) * layout.lanes), "float32")

    def pack(self, row: Expr, query: HeadView, at: Expr) -> None:
        """Row `row` is the query at `at`."""
        for i, (offset, lanes) in enumerate(self.chunks):
            value = load_wide(query.buffer, query.at(at, T.int64(offset)), lanes) * constant(self.scale, lanes)
            place = [row, T.int64(i * self.layout.lanes)]
            store(self.buffer, place, _padded(let(value), lanes, self.layout.lanes), self.layout.lanes)

    def scores(self, keys: Sequence[Expr], key: HeadView, row_vector: int, *, apart: bool) -> list[Expr]:
        """Vectors of q . k for the rows of `row_vector` and `keys` (rows of `key`, one group), wherever these lie."""
        layout, lanes, rows = self.layout, self.layout.lanes, self.layout.rows_of(row_vector)
        tile = RegisterTile(len(keys) * len(rows), [(0, lanes)])
        tile.fill(0.0)

        def add_products(offset: Expr, width: int, packed: Expr) -> None:
            # Bound before the keys: each is loaded once for all keys of the group.
            queries = [let(load(self.buffer, [T.int64(row), packed], lanes)) for row in rows]
            for i, row in enumerate(keys):
                values = let(_padded(load_wide(key.buffer, key.at(row, offset), width), width, lanes))
                for r, query in enumerate(queries):
                    at = i * len(rows) + r
                    tile.set(at, 0, tile.get(at, 0) + values * query)

        with T.serial(T.int64(self.whole)) as chunk:
            add_products(chunk * lanes, lanes, chunk * lanes)
        for i, (offset, width) in enumerate(self.chunks[self.whole :]):
            add_products(T.int64(offset), width, T.int64((self.whole + i) * lanes))

        zero = constant(0.0, lanes)
        width = min(lanes, layout.padded_rows)
        # Rows of padding are vectors of zeros: every vector of scores is whole.
        padded = [
            tile.get(i * len(rows) + r, 0) if r < len(rows) else zero for i in range(len(keys)) for r in range(width)
        ]
        return [lane_sums(padded[first : first + lanes]) for first in range(0, len(padded), lanes)]


def _padded(value: Expr, width: int, lanes: int) -> Expr:
    """A vector of `width` elements, with zeros behind them up to `lanes`."""
    if width == lanes:
        return value
    if width == 1:
        first = T.Ramp(T.int32(0), T.int32(1), lanes) < splat(T.int32(1), lanes)
        return T.Select(first, splat(value, lanes), constant(0.0, lanes))
    return T.Shuffle([value, *[constant(0.0, width)] * (lanes // width - 1)], [T.int32(lane) for lane in range(lanes)])


def lane_sums(rows: Sequence[Expr]) -> Expr:
    """The sum over the lanes of each of n vectors of n lanes, as one vector.

    A tree: each step adds the even parts of two vectors to their odd parts. The parts are elements at first, within
    blocks of four lanes, as x86 and ARM have it in one instruction; then they are the blocks themselves.
    """
    lanes, rows = len(rows), list(rows)
    block = min(4, lanes)
    for _ in range(block.bit_length() - 1):
        rows = add_halves(rows, lanes, 1, block)
    while len(rows) > 1:
        rows = add_halves(rows, lanes, block, lanes)
    return rows[0]


def add_halves(rows: list[Expr], lanes: int, part: int, span: int) -> list[Expr]:
    """Adds the even to the odd parts (of `part` lanes) of each span of lanes; two vectors share a span."""

    def picked(odd: int) -> list[Expr]:
        indices = []
        for start in range(0, lanes, span):
            for source in (0, lanes):
                for first in range(start + odd * part, start + span, 2 * part):
                    indices += [T.int32(source + first + i) for i in range(part)]
        return indices

    return [
        let(T.Shuffle([a, b], picked(0)) + T.Shuffle([a, b], picked(1)))
        for a, b in zip(rows[::2], rows[1::2], strict=True)
    ]

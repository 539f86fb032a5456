"""What the scores of one task are besides products: capped, and less for keys further away; and the sinks, scores of no
key.

The softmax does not mind what is added to all scores of a row, so a distance may be counted from any key: from the
origin of its row. Numbers are small, so exact, where the probs are not, if the origin lies where the scores are
largest. That depends on all that hides keys, and on the products; so a row's origin begins at its place, and whenever
its reference is raised it moves to the keys that raised it.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.attention.inputs import capped
from mhsa_compile.kernels.cpu.attention.masking import TileMask
from mhsa_compile.kernels.cpu.attention.matmuls import TaskOperands
from mhsa_compile.kernels.cpu.score_functions import number
from mhsa_compile.kernels.cpu.simd.dtypes import vector_type
from mhsa_compile.kernels.cpu.simd.vectors import (
    Chunk,
    Expr,
    RegisterTile,
    let,
    load,
    materialize,
    scratch,
    splat,
    store,
)


class ScoreMods:
    """Softcap, score_mod, ALiBi and sinks of one head."""

    def __init__(self, operands: TaskOperands, visibility: TileMask, queries: int, key_tile: int) -> None:
        self.op, self.operands = operands.op, operands
        self.visibility, self.place = visibility, visibility.place
        self.origins = scratch((queries,)) if self.op.slopes else None  # of the distances, a key for each query
        self.unbiased = scratch((key_tile, queries)) if self.op.slopes else None  # the tile before its bias

    def prepare(self, columns: list[Chunk]) -> None:
        if self.origins is not None:
            for column in columns:
                store(self.origins, [T.int64(column[0])], self._places(column), column[1])

    def cap(self, tile: RegisterTile, keys: list[Expr], base: Expr) -> None:
        """Products of queries and keys, times score_factor, become scores in units of log2; plain ones are already. Row
        r is of keys[r], number base + r of its block."""
        if self.op.softcap:
            tile.each(lambda r, c: capped(self.op, tile.get(r, c), tile.columns[c][1]))
        score_mod, keep = self.visibility.score_mod, self.visibility.keep_modified
        if score_mod is None:
            return
        numbers = [number(materialize(key)) for key in keys]

        def modified(r: int, c: int) -> Expr:
            score = score_mod.score(*tile.columns[c], numbers[r], tile.get(r, c))
            return keep(score, base + r, tile.columns[c])

        tile.each(modified)

    def add_bias(self, tile: RegisterTile, first_key: Expr) -> None:
        """Adds slope * (key - origin) to scores, masked or not; row r is of key first_key + r."""
        if self.unbiased is None:
            return
        for r in range(tile.rows):
            for c, (first, lanes) in enumerate(tile.columns):
                # Kept, since the bias depends on origins that these very scores may move.
                store(self.unbiased, [T.int64(r), T.int64(first)], tile.get(r, c), lanes)
        self.renew_bias(tile, first_key)

    def renew_bias(self, tile: RegisterTile, first_key: Expr) -> None:
        """Makes the same tile again after its origins have moved."""
        if self.unbiased is None:
            return
        unbiased = self.unbiased
        # A key's number is exact in float32 up to 2^24.
        numbers = [materialize(T.cast(first_key + r, "float32"), "float32") for r in range(tile.rows)]

        def biased(r: int, c: int) -> Expr:
            first, lanes = tile.columns[c]
            distance = splat(numbers[r], lanes) - load(self.origins, [T.int64(first)], lanes)
            return load(unbiased, [T.int64(r), T.int64(first)], lanes) + self._slope(tile.columns[c]) * distance

        tile.each(biased)

    def move(self, column: Chunk, whether: Expr, key: Expr) -> Expr | None:
        """Moves the origins of some lanes to `key`; what each lane's scores lose by it, None where nothing moves."""
        if self.origins is None:
            return None
        first, lanes = column
        old = materialize(load(self.origins, [T.int64(first)], lanes), "float32", lanes)
        new = splat(materialize(T.cast(key, "float32"), "float32"), lanes)
        new = materialize(T.Select(whether, new, old), "float32", lanes)
        store(self.origins, [T.int64(first)], new, lanes)
        return materialize(self._slope(column) * (new - old), "float32", lanes)

    def sink(self, column: Chunk) -> Expr | None:
        """The head's sink for a column of queries, while their origins are their places; None where there is none."""
        return None if self.operands.sink is None else splat(self.operands.sink, column[1])

    def lack(self, column: Chunk) -> Expr:
        """What the scores of each query lack, since its distances are counted from its origin."""
        first, lanes = column
        return self._slope(column) * (load(self.origins, [T.int64(first)], lanes) - self._places(column))

    def _slope(self, column: Chunk) -> Expr:
        return splat(self.operands.slope, column[1])

    def _places(self, column: Chunk) -> Expr:
        first, lanes = column
        lane = T.Ramp(T.int32(first), T.int32(1), lanes) if lanes > 1 else T.int32(first)
        places = splat(let(T.cast(self.place, "int32")), lanes) + lane
        return T.cast(places, vector_type("float32", lanes))

"""What the scores of one task are besides products, before any is hidden: capped, and less for keys further away; and
the sinks, scores of no key.

A distance is counted from the last key that a query may see, not from its place: the softmax does not mind what is
added to all scores of a row, and numbers are small, so exact, where the weights are not.
"""

from __future__ import annotations

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cpu.attention_products import Operands
from mhsa_compile.kernels.cpu.operands import capped, last_seen
from mhsa_compile.kernels.cpu.storage import vector_type
from mhsa_compile.kernels.cpu.vectors import Chunk, Expr, RegisterTile, bind, load, scratch, settle, splat, store


class Scores:
    """Softcap, ALiBi and sinks of one head. `place` is that of query lane 0 among the keys."""

    def __init__(self, operands: Operands, place: Expr, queries: int) -> None:
        self.op, self.operands, self.place = operands.op, operands, place
        self.origins = scratch((queries,)) if self.op.slopes else None  # of the distances, a key for each query

    def prepare(self, columns: list[Chunk]) -> None:
        if self.origins is not None:
            for column in columns:
                origin = T.cast(self._origin(column), vector_type("float32", column[1]))
                store(self.origins, [T.int64(column[0])], origin, column[1])

    def finish(self, tile: RegisterTile, keys: list[Expr]) -> None:
        """Products of queries and keys, times score_factor, become scores in units of log2; plain ones are already."""
        if self.op.softcap:
            tile.each(lambda r, c: capped(self.op, tile.get(r, c), tile.columns[c][1]))
        if self.origins is not None:
            numbers = [settle(T.cast(key, "float32"), "float32") for key in keys]
            tile.each(lambda r, c: tile.get(r, c) + self._slope(tile.columns[c]) * self._distance(numbers[r], tile, c))

    def sink(self, column: Chunk) -> Expr | None:
        """The sink, in the measure of each query's scores."""
        if self.operands.sink is None:
            return None
        sink = splat(self.operands.sink, column[1])
        return sink if self.origins is None else sink - self.shift(column)

    def shift(self, column: Chunk) -> Expr:
        """What the scores of each query lack, since its distances begin at another key than its place."""
        distance = T.cast(self._origin(column) - self._places(column), vector_type("float32", column[1]))
        return self._slope(column) * distance

    def _slope(self, column: Chunk) -> Expr:
        return splat(self.operands.slope, column[1])

    def _distance(self, number: Expr, tile: RegisterTile, c: int) -> Expr:
        first, lanes = tile.columns[c]
        return splat(number, lanes) - load(self.origins, [T.int64(first)], lanes)

    def _places(self, column: Chunk) -> Expr:
        first, lanes = column
        lane = T.Ramp(T.int32(first), T.int32(1), lanes) if lanes > 1 else T.int32(first)
        return splat(bind(T.cast(self.place, "int32")), lanes) + lane

    def _origin(self, column: Chunk) -> Expr:
        return last_seen(self.op, self._places(column), T.cast(self.operands.kv_length, "int32"), column[1])

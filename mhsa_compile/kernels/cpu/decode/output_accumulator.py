"""The sum of a decode task, o = o 2^(m - m') + p V, over one block of keys after another.

V is read in rows as they lie in memory, a register tile of query rows x columns at a time; what is masked never reaches
a sum, not even as 0 * NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cpu.decode.query_key import ScoreLayout
from mhsa_compile.kernels.cpu.decode.work import Heads
from mhsa_compile.kernels.cpu.formats.choice import load_wide, prefetch_row
from mhsa_compile.kernels.cpu.simd import vectors
from mhsa_compile.kernels.cpu.simd.vectors import (
    RegisterTile,
    constant,
    each_vector,
    let,
    load,
    materialize,
    splat,
    store,
    zero_if_finite,
)
from mhsa_compile.kernels.interface.kernel import Config
from mhsa_compile.kernels.interface.ops import AttentionOp

MASKED = -0.0
"""The prob of a masked key: zero as a number, yet told apart from a visible prob that underflowed to +0."""
LONGEST_SUM = 64
"""Terms that one float32 sum takes one after another. PyTorch's library sums in parts: 512 terms in a row had more than
twice its error in one run of ten, and 256 twice its root mean square where a head has one column. 64 cost no time."""


class ValueSums:
    """`accumulator` (rows, F), and the probs and factors that go into it: flat `probs` of a block, `rescale`.

    What is added to it are sums of at most LONGEST_SUM keys. `end` is where the task's keys end: while values are
    multiplied, the next block's keys are on their way.
    """

    def __init__(
        self, op: AttentionOp, config: Config, layout: ScoreLayout, heads: Heads, probs: Expr, rescale: Expr
    ) -> None:
        self.heads, self.end, self.keys = heads, T.int64(0), layout.whole_groups(config["keys"])
        self.layout, self.value, self.probs, self.rescale = layout, heads.value, probs, rescale
        self.size, self.columns, self.width = config["value_rows"], config["value_columns"], op.v_head_dim
        self.rows, self.lanes, self.registers = layout.rows, layout.lanes, layout.registers
        self.accumulator = T.alloc_buffer((self.rows, self.width), "float32")
        self.block_sums = T.alloc_buffer((self.rows, self.width), "float32")

    def add(self, begin: Expr, count: Expr, unmask_visible: Callable[[], None] | None) -> None:
        """Adds the next `count` keys, from `begin` on; without what takes MASKED from visible ones no key is masked."""
        if unmask_visible is not None:
            self._accumulate_masked(begin, count, unmask_visible)
            return
        with T.serial(T.int64(self.rows)) as row:
            # Brings the sums to the new maximum before the block's are added.
            self.each_vector(lambda at, n: self._add(row, at, n, constant(0.0, n)))
        self._accumulate(begin, count, self.accumulator)

    def clear(self) -> None:
        self._clear(self.accumulator)

    def _clear(self, sums: Expr) -> None:
        with T.serial(T.int64(self.rows)) as row:
            self.each_vector(lambda at, n: store(sums, [row, at], constant(0.0, n), n))

    def each_vector(self, body: Callable[[Expr, int], None]) -> None:
        """body(column, lanes) for the vectors of a row of V."""
        each_vector(self.width, self.lanes, body)

    def _accumulate(self, begin: Expr, count: Expr, sums: Expr) -> None:
        """sums += p V, a register tile of rows x columns at a time."""
        size, lanes = self.size, self.lanes
        width = self.columns * lanes
        whole, rest = divmod(self.width, width)

        def rows_of(base: Expr, group: Sequence[vectors.Chunk]) -> None:
            with T.serial(T.int64(self.rows // size)) as index:
                self._accumulate_tile(begin, count, (materialize(index * size), base), size, group, sums)
            if rest := self.rows % size:
                self._accumulate_tile(begin, count, (T.int64(self.rows - rest), base), rest, group, sums)

        if whole:
            with T.serial(T.int64(whole)) as index:
                rows_of(materialize(index * width), vectors.chunks(width, lanes))
        if rest:
            rows_of(T.int64(whole * width), vectors.chunks(rest, lanes))

    def _accumulate_tile(
        self, begin: Expr, count: Expr, at: tuple[Expr, Expr], rows: int, group: Sequence[vectors.Chunk], sums: Expr
    ) -> None:
        (first, base), value = at, self.value
        with T.serial(ceil_div(count, LONGEST_SUM)) as part:
            tile = RegisterTile(rows, group)
            tile.fill(0.0)
            start = materialize(part * LONGEST_SUM)
            with T.serial(start, materialize(T.min(count, start + LONGEST_SUM))) as j:
                prob, key = materialize(self.layout.place(j, 0) + first), materialize(begin + j)
                self._prefetch_next(begin + count + self.layout.asked_for(j, self.keys), base, group)
                probs = [let(load(self.probs, [prob + r], 1)) for r in range(rows)]
                # Column by column, unlike RegisterTile.outer_product: whole rows of V beside the sums would not fit.
                for c, (offset, lanes) in enumerate(group):
                    values = let(load_wide(value.buffer, value.at(key, base + offset), lanes))
                    for r in range(rows):
                        tile.set(r, c, tile.get(r, c) + splat(probs[r], lanes) * values)
            for r in range(rows):
                for c, (offset, lanes) in enumerate(group):
                    place = [first + r, base + offset]
                    store(sums, place, load(sums, place, lanes) + tile.get(r, c), lanes)

    def _prefetch_next(self, row: Expr, base: Expr, group: Sequence[vectors.Chunk]) -> None:
        """Asks for a row of the next block's keys: what lies where this tile's columns lie in a row of values."""
        key, width = self.heads.key, sum(lanes for _, lanes in group)
        row = materialize(T.min(row, self.end - 1))
        prefetch_row(key, row, base, width, soon=False)

    def _add(self, row: Expr, column: Expr, lanes: int, value: Expr) -> None:
        """accumulator = accumulator * rescale + value."""
        factor = splat(load(self.rescale, [row], 1), lanes)
        store(self.accumulator, [row, column], load(self.accumulator, [row, column], lanes) * factor + value, lanes)

    def _accumulate_masked(self, begin: Expr, count: Expr, unmask_visible: Callable[[], None]) -> None:
        """Adds p V as `_accumulate` does, but a NaN or an infinity of a masked key must not come in as 0 * v.

        Where one does, a sum of the block is not finite: then all are made again, leaving masked keys out.
        """
        # Apart from what was summed before: that is not to be spoilt by a NaN which is thrown away.
        sums = self.block_sums
        self._clear(sums)
        self._accumulate(begin, count, sums)
        with T.If(self._holds_non_finite_sums(sums)):
            with T.Then():
                unmask_visible()
                self._accumulate_visible(begin, count)
            with T.Else(), T.serial(T.int64(self.rows)) as row:
                self.each_vector(lambda at, n: self._add(row, at, n, load(sums, [row, at], n)))

    def _holds_non_finite_sums(self, sums: Expr) -> Expr:
        """0 * sum, added up, is NaN where a sum is NaN or infinite, otherwise 0."""
        total, start = T.alloc_buffer((self.lanes,), "float32"), [T.int64(0)]
        store(total, start, constant(0.0, self.lanes), self.lanes)

        def add(row: Expr, column: Expr, lanes: int) -> None:
            value = zero_if_finite(load(sums, [row, column], lanes), lanes)
            store(total, start, load(total, start, lanes) + value, lanes)

        with T.serial(T.int64(self.rows)) as row:
            self.each_vector(lambda column, lanes: add(row, column, lanes))
        whole = T.float32(0)
        for lane in range(self.lanes):
            whole = whole + total[T.int64(lane)]
        return T.isnan(whole)  # not whole != whole, which the simplifier takes to be false

    def _accumulate_visible(self, begin: Expr, count: Expr) -> None:
        """Adds p V, but leaves a masked key out, not multiplied by zero: rare, so plain rather than fast."""
        value = self.value

        def add(row: Expr, key: Expr, prob: Expr, column: Expr, lanes: int) -> None:
            term = splat(prob, lanes) * load_wide(value.buffer, value.at(key, column), lanes)
            store(self.accumulator, [row, column], load(self.accumulator, [row, column], lanes) + term, lanes)

        with T.serial(T.int64(self.rows)) as row:
            self.each_vector(lambda at, n: self._add(row, at, n, constant(0.0, n)))
            with T.serial(count) as j:
                prob = let(self.probs[self.layout.place(j, 0) + row])
                # By its bits: as numbers -0.0 and 0.0 are equal.
                with T.If(T.reinterpret("int32", prob) != T.reinterpret("int32", T.float32(MASKED))), T.Then():
                    self.each_vector(lambda at, n: add(row, begin + j, prob, at, n))

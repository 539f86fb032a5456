"""The two products of an attention task, S^T = K Q^T and P V, and the scratch in which their operands wait.

The scores are computed transposed. Q^T is packed once per task, so rows of K are read as scalars to broadcast; the
queries lie along the vector lanes, so that statistics are plain vertical operations; and P^T comes out just as P V
wants it: as scalars again, against rows of V.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.common.head_layout import HeadView, head_view
from mhsa_compile.kernels.common.score_scale import score_factor
from mhsa_compile.kernels.cpu.formats.choice import load_row, load_wide, prefetch_row, prefetch_rows
from mhsa_compile.kernels.cpu.score_parts import keys_of
from mhsa_compile.kernels.cpu.simd import vector_math, vectors
from mhsa_compile.kernels.cpu.simd.vectors import Chunk, RegisterTile, load, materialize, scratch, store
from mhsa_compile.kernels.cpu.units.unit import Columns, Rows, Strips, Turned, Unit
from mhsa_compile.kernels.interface.kernel import Config
from mhsa_compile.kernels.interface.ops import AttentionOp


@dataclass(frozen=True)
class TaskOperands:
    """Q, K and V of one task: rows of Q from `first_query` on, the last one repeated beyond the end, and `kv_length`
    keys; and the head and the first row of Q of the task after it."""

    op: AttentionOp
    query: HeadView
    key: HeadView
    value: HeadView
    first_query: Expr
    q_length: Expr
    kv_length: Expr
    next_query: tuple[HeadView, Expr]

    @staticmethod
    def of(
        arguments: AttentionArguments, b: Expr, h: Expr, first_query: Expr, following: Sequence[Expr] = ()
    ) -> TaskOperands:
        """Those of head `h` of entry `b`; `following` are the entry, the head and the first row of Q of the next task,
        which as a rule the same thread takes."""
        op, inputs = arguments.op, arguments.inputs
        g = materialize(T.truncdiv(h, T.int64(op.num_heads // op.num_kv_heads)))

        def query(b: Expr, h: Expr) -> HeadView:
            return head_view(inputs[op.query.buffer], op.query, op.head_dim, b, h)

        next_b, next_h, next_first = following or (b, h, first_query)
        return TaskOperands(
            op,
            query=query(b, h),
            key=arguments.key(b, g),
            value=arguments.value(b, g),
            first_query=first_query,
            q_length=arguments.q_length,
            kv_length=keys_of(arguments, b),
            next_query=(query(next_b, next_h), next_first),
        )

    def query_rows(self, first: Expr, count: int) -> list[Expr]:
        """Rows first .. first + count of the tile, each clamped to the last; those beyond are never written out."""
        last = self.q_length - 1
        return [materialize(T.min(self.first_query + (first + i), last)) for i in range(count)]

    def value_row(self, key: Expr, column: Chunk) -> Expr:
        """A vector of V's row `key`, as float32."""
        return load_row(self.value, key, T.int64(column[0]), column[1])

    def prefetch(self, keys: list[Expr]) -> None:
        """Asks for the rows of K that come after `keys`, and for the rows of V that P V will want of them.

        Where heads lie side by side, every row is in a page of its own, which no hardware prefetcher foresees.
        """
        for row in keys:
            prefetch_row(self.key, row + len(keys), T.int64(0), self.op.head_dim)
            prefetch_row(self.value, row, T.int64(0), self.op.v_head_dim)

    def prefetch_next(self, queries: int) -> None:
        """Asks for the rows of Q that the next task will begin with, which it would wait for otherwise."""
        view, first = self.next_query
        prefetch_rows(view, first, queries, self.op.head_dim)


def parts(steps: int, count: int, run: int = 1) -> list[tuple[int, int]]:
    """`count` equal parts of a sum of `steps` terms, as (first, end), in whole runs; some are empty where there are
    fewer."""
    borders = [min(steps, -(-steps // run) * i // count * run) for i in range(count + 1)]
    return list(itertools.pairwise(borders))


@dataclass(frozen=True)
class KeyBlock:
    """Keys first_key + first .. first_key + end."""

    first_key: Expr
    first: Expr
    end: Expr


def unit_for(op: AttentionOp, units: Iterable[Unit], key_tile: int, lanes: int) -> Unit:
    """The first of these units that can do both products: whole words along E and the keys, whole vectors along F, and
    probs that become factors again."""

    def fits(unit: Unit) -> bool:
        whole = op.head_dim % unit.group == key_tile % unit.group == op.v_head_dim % unit.lanes == 0
        return unit.dtype == op.stored_dtype == op.dtype and unit.keeps_sums and unit.lanes == lanes and whole

    *narrow, last = units
    return next(filter(fits, narrow), last)


class Products:
    """S^T = K Q^T for a few keys at a time, the probs that come of it, and P V, for one task.

    A step of a unit is a word of `group` neighbours: q_t (E / group, queries) is Q^T; probs ((key_tile + keys) / group,
    queries) is P^T from key_tile on, where the rows in front take the probs of the group before a block's first, which
    nobody reads; values (keys / group, F) is V, unless it is read where it lies. Factors of 16 bits stay as they are:
    the scores are scaled. Where they are float32 instead, Q is, and K and V are widened on their way, a few rows at a
    time.
    """

    def __init__(self, operands: TaskOperands, unit: Unit, config: Config, lanes: int) -> None:
        op, group = operands.op, unit.group
        queries, keys, key_tile = config["queries"], config["keys"], config["key_tile"]
        self.operands, self.unit, self.lanes, self.key_tile = operands, unit, lanes, key_tile
        self.queries, self.lead = queries, key_tile // group
        self.exp2_coefficients = vector_math.exp2_coefficients(unit.dtype)
        self.values: Expr | None = None
        self.wide_keys: Expr | None = None
        packed, probs = (op.head_dim // group, queries), ((key_tile + keys) // group, queries)
        values = (keys // group, op.v_head_dim)
        self.is_narrow = unit.dtype != unit.sums
        if self.is_narrow:
            self.q_t, self.probs, self.values = (scratch(shape, unit.word) for shape in (packed, probs, values))
            return
        self.probs = scratch(probs)
        if op.stored_dtype == unit.dtype:
            self.q_t = scratch(packed)
        else:
            shapes = [packed, (key_tile, op.head_dim), values]
            self.q_t, self.wide_keys, self.values = vectors.side_by_side(shapes)

    def pack_queries(self) -> None:
        """Brings the tile's Q^T into scratch."""
        op, query = self.operands.op, self.operands.query
        strips = Strips(query.buffer, query.at, self.queries, op.head_dim, self.operands.query_rows)
        self.unit.pack_columns(self.q_t, strips, score_factor(op))

    def score(self, tile: RegisterTile, keys: list[Expr], between: Callable[[int], None] | None = None) -> None:
        """tile[r, c] = K[keys[r]] Q^T * score_factor, over the tile's own columns of queries.

        With `between` the sum over E comes in parts, one for each step of keys, and after part i comes `between(i)`.
        """
        op, unit = self.operands.op, self.unit
        self.operands.prefetch(keys)
        key = self.operands.key
        rows = Rows(key.buffer, key.at, keys)
        if self.wide_keys is not None:
            # Once for the whole head: in the loop below each element would be widened by itself.
            for r, row in enumerate(keys):
                for first, lanes in vectors.chunks(op.head_dim, self.lanes):
                    wide = load_row(key, row, T.int64(first), lanes)
                    store(self.wide_keys, [T.int64(r), T.int64(first)], wide, lanes)
            rows = Rows(self.wide_keys, _index, [T.int64(r) for r in range(len(keys))])
        sums, columns = self._sums(tile), Columns(self.q_t, _index, tile.columns)
        if sums is tile:
            tile.fill(0.0)
        # Two rows of K are joined word by word: as many words of each as a load brings.
        run = unit.run if unit.group == 1 or unit.rows > 1 else 1
        steps, count = op.head_dim // unit.group, len(keys) // unit.group if between else 1
        for i, (first, end) in enumerate(parts(steps, count, run if unit.group == 1 else 1)):
            self._add(sums, rows, columns, (T.int64(first), T.int64(end)), run)
            if between:
                between(i)
        if self.is_narrow:
            factor = score_factor(op)
            unit.each_row(sums, lambda r, c, part: tile.set(r, c, part * vectors.constant(factor, tile.columns[c][1])))

    def keep_probs(self, base: Expr, column: Chunk, probs: list[Expr]) -> None:
        """Keeps the probs of keys base, base + 1, ... of the block, as many as a step has, for the queries of one
        column.

        `base` may be as low as -key_tile: what is kept there, nobody reads.
        """
        first, lanes = column
        step = self._step(base + self.lead * self.unit.group)
        store(self.probs, [step, T.int64(first)], self.unit.as_factors(probs, lanes), lanes)

    def prob(self, key: Expr, query: Expr) -> Expr:
        """One prob that was kept, as float32."""
        word = self.probs[self._step(key) + self.lead, query]
        return self.unit.element(word, T.truncmod(key, T.int64(self.unit.group)))

    def rescale_probs(self, count: Expr, factors: Expr) -> None:
        """Multiplies the probs of the block's first `count` keys by the factor of each query."""
        with T.serial(self._step(count)) as step:
            for first, lanes in vectors.chunks(self.queries, self.lanes):
                at = [step + self.lead, T.int64(first)]
                factor = load(factors, [T.int64(first)], lanes)
                store(self.probs, at, self.unit.rescaled(load(self.probs, at, lanes), factor, lanes), lanes)

    def take_values(self, first_key: Expr, count: Expr) -> None:
        """Makes the block's rows of V ready for `add_values`."""
        if self.values is not None:
            columns = vectors.chunks(self.operands.op.v_head_dim, self.lanes)
            self.unit.pack_rows(self.values, columns, self.operands.value, first_key, count)

    def add_values(self, tile: RegisterTile, base: Expr, group: list[Chunk], block: KeyBlock) -> None:
        """tile[r, c] += P[base + r] V[:, group[c]], over the keys of the block that these rows see. A step of which
        they see one key is taken whole: the probs of the others are zero."""
        sums, run, value = self._sums(tile), self.unit.run if self.unit.group == 1 else 1, self.operands.value
        probs = Turned(self.probs, lambda step, row: [step + self.lead, row], base, sums.rows, vector=run > 1)
        if self.values is not None:
            columns = Columns(self.values, _index, group)
        else:
            columns = Columns(value.buffer, lambda j, column: value.at(block.first_key + j, column), group, load_wide)
        self._add(sums, probs, columns, (self._step(block.first), self._step(block.end, up=True)), run)
        if sums is not tile:
            self.unit.each_row(sums, lambda r, c, part: tile.set(r, c, tile.get(r, c) + part))

    def _sums(self, tile: RegisterTile) -> RegisterTile:
        """Where the products of a tile are summed up: in itself, or two rows at a time."""
        return tile if self.unit.rows == 1 else self.unit.zeros(tile.rows // self.unit.rows, tile.columns)

    def _add(self, sums: RegisterTile, a: Rows | Turned, b: Columns, steps: tuple[Expr, Expr], run: int) -> None:
        # Sums of groups have few steps: with several in a turn, heads of 32 elements took 3 % longer on Zen 4. The sums
        # of two rows fill the registers: a step's vectors would not fit beside them.
        at_once = self.unit.runs_at_once(sums.rows, len(sums.columns)) if self.unit.group == 1 else 1
        self.unit.add_products(sums, a, b, steps, turn=(run, at_once), columns_first=self.unit.rows == 1)

    def _step(self, key: Expr, *, up: bool = False) -> Expr:
        """The step in which a key of the block is, or the one behind it."""
        if self.unit.group == 1:
            return key
        return ceil_div(key, self.unit.group) if up else T.truncdiv(key, T.int64(self.unit.group))


def _index(step: Expr, column: Expr) -> list[Expr]:
    return [step, column]

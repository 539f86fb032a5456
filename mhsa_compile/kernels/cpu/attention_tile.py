"""The arithmetic of one attention task: a tile of query rows of one head against all the keys they see.

The scores are computed transposed, S^T = K Q^T. Q^T is packed once per task (and scaled by scale * log2 e), so rows of
K are read in place, as scalars to broadcast; the queries lie along the vector lanes, so that row maximum and row sum
are plain vertical operations; and P^T comes out just as P V wants it: as scalars again, against rows of V in place.

    for each block of keys:   S^T = K Q^T;  m' = max(m, S^T);  P^T = 2^(S^T - m');  l = l 2^(m - m') + sum P^T
                              O = O 2^(m - m') + P V
    Y = O / l, and zeros where nothing was visible (l = 0)

Blocks beyond the causal diagonal are never visited; blocks that every row sees wholly take a path without masks.
Sources: online softmax, Milakov and Gimelshein 2018 (arXiv:1805.02867); tiling, Dao 2023 (arXiv:2307.08691).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.base import AttentionOp, Config
from mhsa_compile.kernels.cpu import vectors
from mhsa_compile.kernels.cpu.vectors import Expr, RegisterTile, bind, ceil_div, constant, load, settle, splat, store

LOG2_E = math.log2(math.e)
# The weight of a masked key: zero as a number, yet told apart from a visible weight that underflowed to +0.
MASKED = -0.0
MaskReader = Callable[[Expr, Expr], Expr]  # (query row, key) -> the mask's element


@dataclass(frozen=True)
class HeadView:
    """One head of one operand, read in place: `buffer[at(row, column)]` is an element."""

    buffer: Expr
    at: Callable[[Expr, Expr], list[Expr]]


class AttentionTile:
    """One task. Scratch is allocated where the tile is constructed: inside the loop over tasks, so per thread."""

    def __init__(
        self,
        op: AttentionOp,
        config: Config,
        *,
        lanes: int,
        registers: int,
        first_query: Expr,
        q_length: Expr,
        kv_length: Expr,
        query: HeadView,
        key: HeadView,
        value: HeadView,
        output: HeadView,
        mask: MaskReader | None,
    ) -> None:
        self.op, self.lanes, self.registers = op, lanes, registers
        self.queries, self.keys, self.key_tile = config["queries"], config["keys"], config["key_tile"]
        self.first_query, self.q_length, self.kv_length = first_query, q_length, kv_length
        self.query, self.key, self.value, self.output, self.mask = query, key, value, output, mask
        self.query_columns = vectors.chunks(self.queries, lanes)
        self.value_columns = vectors.chunks(op.v_head_dim, lanes)
        # Query i sees keys 0 .. i + diagonal.
        self.diagonal = None
        if op.band is not None:
            self.diagonal = T.int64(0) if op.band.alignment == "top_left" else kv_length - q_length

        self.q_t = T.alloc_buffer((op.head_dim, self.queries), "float32")
        self.scores = T.alloc_buffer((self.keys, self.queries), "float32")  # S^T, then P^T in the same place
        self.bias = T.alloc_buffer((self.keys, self.queries), "float32") if self._dense_mask else None
        self.accumulator = T.alloc_buffer((self.queries, op.v_head_dim), "float32")
        self.row_max = T.alloc_buffer((self.queries,), "float32")
        self.row_sum = T.alloc_buffer((self.queries,), "float32")
        self.rescale = T.alloc_buffer((self.queries,), "float32")

    @property
    def _dense_mask(self) -> bool:
        """Whether the mask may differ from query to query (a key padding mask is the same for all)."""
        return self.op.mask is not None and self.op.mask.dims[2] != 1

    def emit(self) -> None:
        self._pack_queries()
        self._clear()
        end, seen_by_all = self._visible_keys()
        # Blocks of equal size, whole register tiles, as few as the scratch allows.
        fewest = settle(T.max(T.int64(1), ceil_div(end, self.keys)))
        size = settle(ceil_div(T.truncdiv(end + (fewest - 1), fewest), self.key_tile) * self.key_tile)
        blocks = settle(T.truncdiv(end + (size - 1), T.max(T.int64(1), size)))
        plain = blocks
        if self.mask is not None:
            plain = T.int64(0)
        elif self.diagonal is not None:
            plain = settle(T.truncdiv(seen_by_all, T.max(T.int64(1), size)))
        if self.mask is None:
            with T.serial(plain) as block:
                self._visit(settle(block * size), size, end, None)
        if self.mask is not None or self.diagonal is not None:
            with T.serial(plain, blocks) as block:
                self._visit(settle(block * size), size, end, seen_by_all)
        self._write_output()

    def _visible_keys(self) -> tuple[Expr, Expr]:
        """(one past the last key that any row sees, one past the last of the leading keys that every row sees)."""
        end, seen_by_all = self.kv_length, self.kv_length
        if self.diagonal is not None:
            first_sees = self.first_query + self.diagonal + 1
            end = T.max(T.int64(0), T.min(end, first_sees + (self.queries - 1)))
            seen_by_all = T.max(T.int64(0), T.min(seen_by_all, first_sees))
        return settle(end), T.int64(0) if self.mask is not None else settle(seen_by_all)

    def _pack_queries(self) -> None:
        """q_t[e, i] = Q[i, e] * scale * log2 e. Rows beyond the last repeat it; they are never written out."""
        scale = self.op.scale * LOG2_E
        last = self.q_length - 1
        for first_lane, lanes in self.query_columns:
            rows = [settle(T.min(self.first_query + (first_lane + i), last)) for i in range(lanes)]
            whole = self.op.head_dim // lanes * lanes
            with T.serial(T.int64(whole // lanes)) as square:
                columns = [load(self.query.buffer, self.query.at(row, square * lanes), lanes) for row in rows]
                for e, column in enumerate(vectors.transpose([bind(c * constant(scale, lanes)) for c in columns])):
                    store(self.q_t, [square * lanes + e, T.int64(first_lane)], column, lanes)
            for e in range(whole, self.op.head_dim):
                for i, row in enumerate(rows):
                    element = load(self.query.buffer, self.query.at(row, T.int64(e)), 1) * T.float32(scale)
                    store(self.q_t, [T.int64(e), T.int64(first_lane + i)], element, 1)

    def _clear(self) -> None:
        for first, lanes in self.query_columns:
            store(self.row_max, [T.int64(first)], constant(-math.inf, lanes), lanes)
            store(self.row_sum, [T.int64(first)], constant(0.0, lanes), lanes)
        with T.serial(T.int64(self.queries)) as i:
            for first, lanes in self.value_columns:
                store(self.accumulator, [i, T.int64(first)], constant(0.0, lanes), lanes)

    def _visit(self, first_key: Expr, size: Expr, end: Expr, seen_by_all: Expr | None) -> None:
        """One block. Every row sees all of it, or, where `seen_by_all` is given, only its keys before that."""
        count = settle(T.min(size, end - first_key))
        masked = seen_by_all is not None
        if masked and self.bias is not None:
            self._read_mask(first_key, count)
        whole = count if seen_by_all is None else T.max(T.int64(0), T.min(count, seen_by_all - first_key))
        self._score(first_key, count, settle(T.truncdiv(whole, T.int64(self.key_tile))), masked)
        self._weigh(count, masked)
        if masked:
            with T.If(self._holds_non_finite_values(first_key, count)):
                with T.Then():
                    self._accumulate_selected(first_key, count)
                with T.Else():
                    self._accumulate(first_key, count)
        else:
            self._accumulate(first_key, count)

    def _read_mask(self, first_key: Expr, count: Expr) -> None:
        """bias[j, i] = the mask at (query i, key j) as a number to add, in units of log2; -inf where masked."""
        assert self.mask is not None and self.bias is not None
        with T.serial(T.int64(self.queries)) as i:
            query = settle(T.min(self.first_query + i, self.q_length - 1))
            with T.serial(count) as j:
                store(self.bias, [j, i], self._bias_of(self.mask(query, first_key + j)), 1)

    def _bias_of(self, element: Expr) -> Expr:
        assert self.op.mask is not None
        if self.op.mask.dtype == "bool":
            return T.Select(element, T.float32(0), T.float32(-math.inf))
        return element * T.float32(LOG2_E)

    def _score(self, first_key: Expr, count: Expr, whole_groups: Expr, masked: bool) -> None:
        """scores = K Q^T for the block, `key_tile` keys at a time in registers, and row_max its column maximum.

        The first `whole_groups` groups of keys are seen by every row; what follows is masked.
        """
        for first, lanes in self.query_columns:
            store(self.rescale, [T.int64(first)], load(self.row_max, [T.int64(first)], lanes), lanes)
        with T.serial(whole_groups) as group:
            base = settle(group * self.key_tile)
            keys = [first_key + base + r for r in range(self.key_tile)]
            self._score_group(base, keys, lambda score, r, column: score)
        with T.serial(whole_groups, ceil_div(count, self.key_tile)) as group:
            base = settle(group * self.key_tile)
            first = settle(first_key + base)
            # Beyond the last key the last one is read again; what it gives is masked.
            keys = [settle(T.min(first + r, self.kv_length - 1)) for r in range(self.key_tile)]
            self._score_group(base, keys, lambda s, r, column: self._mask_score(s, base + r, first + r, column, masked))

    def _score_group(self, base: Expr, keys: list[Expr], mask: Callable[[Expr, int, vectors.Chunk], Expr]) -> None:
        tile = RegisterTile(self.key_tile, self.query_columns)
        tile.fill(0.0)
        with T.serial(T.int64(self.op.head_dim)) as e:
            tile.outer_product(
                lambda r: load(self.key.buffer, self.key.at(keys[r], e), 1),
                lambda c: load(self.q_t, [e, T.int64(self.query_columns[c][0])], self.query_columns[c][1]),
            )
        for c, (first, lanes) in enumerate(self.query_columns):
            largest = load(self.row_max, [T.int64(first)], lanes)
            for r in range(self.key_tile):
                score = bind(mask(tile.get(r, c), r, (first, lanes)))
                store(self.scores, [base + r, T.int64(first)], score, lanes)
                largest = bind(T.max(largest, score))
            store(self.row_max, [T.int64(first)], largest, lanes)

    def _mask_score(self, score: Expr, row: Expr, key: Expr, column: vectors.Chunk, masked: bool) -> Expr:
        """-inf where `key` is beyond the end, beyond the diagonal or masked: a select, so that NaN cannot pass."""
        first, lanes = column
        hidden = constant(-math.inf, lanes)
        if not masked:
            return T.Select(splat(key < self.kv_length, lanes), score, hidden)
        if self.bias is not None:
            bias = bind(load(self.bias, [row, T.int64(first)], lanes))
            score = T.Select(bias == hidden, hidden, score + bias)
        elif self.mask is not None:
            bias = splat(bind(self._bias_of(self.mask(T.int64(0), key))), lanes)
            score = T.Select(bias == hidden, hidden, score + bias)
        if self.diagonal is not None:
            # The first lane that sees the key, in the lanes' own numbering.
            frontier = T.cast(settle(key - self.diagonal - self.first_query - first), "int32")
            lane = T.Ramp(T.int32(0), T.int32(1), lanes) if lanes > 1 else T.int32(0)
            score = T.Select(splat(frontier, lanes) <= lane, score, hidden)
        return T.Select(splat(key < self.kv_length, lanes), score, hidden)

    def _weigh(self, count: Expr, masked: bool) -> None:
        """scores become P^T = 2^(S^T - m); row_sum and rescale = 2^(old m - m) follow the new maximum."""
        for first, lanes in self.query_columns:
            at = [T.int64(first)]
            largest = load(self.row_max, at, lanes)
            if masked:  # while a row has seen nothing its maximum is -inf, and -inf - -inf is not a number
                largest = T.Select(largest == constant(-math.inf, lanes), constant(0.0, lanes), largest)
            largest = bind(largest)
            factor = bind(vectors.exp2(load(self.rescale, at, lanes) - largest, lanes))
            store(self.rescale, at, factor, lanes)
            total = RegisterTile(1, [(0, lanes)])
            total.fill(0.0)
            with T.serial(count) as j:
                score = bind(load(self.scores, [j, *at], lanes))
                weight = vectors.exp2(score - largest, lanes)
                if masked:
                    weight = T.Select(score == constant(-math.inf, lanes), constant(MASKED, lanes), weight)
                weight = bind(weight)
                store(self.scores, [j, *at], weight, lanes)
                total.set(0, 0, total.get(0, 0) + weight)
            store(self.row_sum, at, load(self.row_sum, at, lanes) * factor + total.get(0, 0), lanes)

    def _accumulate(self, first_key: Expr, count: Expr) -> None:
        """accumulator = accumulator * rescale + P V, a register tile of rows x columns at a time."""
        rows, columns = self._value_tile()
        for begin in range(0, len(self.value_columns), columns):
            group = self.value_columns[begin : begin + columns]
            with T.serial(T.int64(self.queries // rows)) as row_group:
                base = settle(row_group * rows)
                tile = RegisterTile(rows, group)
                tile.fill(0.0)
                with T.serial(count) as j:
                    tile.outer_product(
                        lambda r: load(self.scores, [j, base + r], 1),
                        lambda c: load(
                            self.value.buffer, self.value.at(first_key + j, T.int64(group[c][0])), group[c][1]
                        ),
                    )
                for r in range(rows):
                    factor = bind(load(self.rescale, [base + r], 1))
                    for c, (first, lanes) in enumerate(group):
                        at = [base + r, T.int64(first)]
                        old = load(self.accumulator, at, lanes)
                        store(self.accumulator, at, old * splat(factor, lanes) + tile.get(r, c), lanes)

    def _value_tile(self) -> tuple[int, int]:
        """(rows, columns in vectors) of P V's register tile: columns that leave the fewest over, and what fits."""
        wanted = len(self.value_columns)
        fewest = min(-wanted % columns for columns in (2, 3, 4))
        columns = [c for c in (1, 2, 3, 4) if -wanted % c <= fewest and c <= wanted]
        rows = [r for r in (1, 2, 4, 8) if self.queries % r == 0]
        return vectors.register_tile(vectors.tile_registers(self.registers), rows, columns)

    def _holds_non_finite_values(self, first_key: Expr, count: Expr) -> Expr:
        """Whether V in this block has a NaN or an infinity: 0 * v summed over the block is then NaN, otherwise 0."""
        total = T.alloc_buffer((self.lanes,), "float32")
        store(total, [T.int64(0)], constant(0.0, self.lanes), self.lanes)
        with T.serial(count) as j:
            for first, lanes in self.value_columns:
                value = load(self.value.buffer, self.value.at(first_key + j, T.int64(first)), lanes)
                sums = load(total, [T.int64(0)], lanes)
                store(total, [T.int64(0)], sums + value * constant(0.0, lanes), lanes)
        whole = T.float32(0)
        for lane in range(self.lanes):
            whole = whole + total[T.int64(lane)]
        return T.isnan(whole)  # not whole != whole, which the simplifier takes to be false

    def _accumulate_selected(self, first_key: Expr, count: Expr) -> None:
        """As `_accumulate`, but a masked key is left out, not multiplied by zero: rare, so plain rather than fast."""
        with T.serial(T.int64(self.queries)) as i:
            factor = bind(self.rescale[i])
            for first, lanes in self.value_columns:
                at = [i, T.int64(first)]
                store(self.accumulator, at, load(self.accumulator, at, lanes) * splat(factor, lanes), lanes)
            with T.serial(count) as j:
                weight = bind(self.scores[j, i])
                with T.If(T.reinterpret("int32", weight) != T.reinterpret("int32", T.float32(MASKED))), T.Then():
                    for first, lanes in self.value_columns:
                        at = [i, T.int64(first)]
                        value = load(self.value.buffer, self.value.at(first_key + j, T.int64(first)), lanes)
                        old = load(self.accumulator, at, lanes)
                        store(self.accumulator, at, old + splat(weight, lanes) * value, lanes)

    def _write_output(self) -> None:
        with T.serial(bind(T.min(T.int64(self.queries), self.q_length - self.first_query))) as i:
            total = bind(self.row_sum[i])
            inverse = bind(T.Select(total == T.float32(0), T.float32(0), T.float32(1) / total))
            for first, lanes in self.value_columns:
                value = load(self.accumulator, [i, T.int64(first)], lanes) * splat(inverse, lanes)
                store(self.output.buffer, self.output.at(self.first_query + i, T.int64(first)), value, lanes)

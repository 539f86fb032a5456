"""Which keys the rows of a block see by their place and by how many there are: what chooses the tiles of keys, and all
that a thread needs to know which only copies them.

Key and row numbers are int32: lengths are below 2^30.
"""

from __future__ import annotations

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.block_sparsity import Visits
from mhsa_compile.kernels.cuda.primitives.simt import materialize
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.spec.window import WindowSpec

FAR = 1 << 30  # beyond every key, and added to a key's number still an int32


def span(
    window: WindowSpec | None, first_row: Expr, queries: int, q_length: Expr, kv_length: Expr
) -> tuple[Expr, Expr]:
    """(first, end): of `queries` rows from `first_row` on, as many as there are, none sees a key outside."""
    first, end = T.int32(0), kv_length
    if window is None:
        return first, end
    shift = kv_length - q_length if window.alignment == "bottom_right" else T.int32(0)
    if window.left is not None:
        first = materialize(T.max(first, T.min(first_row + shift - min(window.left, FAR), kv_length)))
    if window.right is not None:
        # Of the rows that there are: the last block may have fewer than `queries`.
        last = T.min(first_row + queries, q_length) - 1
        end = materialize(T.max(first, T.min(end, last + shift + (min(window.right, FAR) + 1))))
    return first, end


class BlockKeyRange:
    """The keys that the `queries` rows from `first_row` on see; `visits` are the tiles that a constant mask leaves
    them."""

    def __init__(
        self, op: AttentionOp, first_row: Expr, queries: int, q_length: Expr, kv_length: Expr, visits: Visits | None
    ) -> None:
        self.op, self.first_row, self.queries, self.visits = op, first_row, queries, visits
        self.q_length, self.kv_length = q_length, kv_length
        # From a query's number to its place.
        self.shift = materialize(kv_length - q_length) if op.from_end else T.int32(0)
        self.left = None if op.window is None or op.window.left is None else min(op.window.left, FAR)
        self.right = None if op.window is None or op.window.right is None else min(op.window.right, FAR)

    def visible_to_any(self) -> tuple[Expr, Expr]:
        """(first, end): no row of the block sees a key outside."""
        return span(self.op.window, self.first_row, self.queries, self.q_length, self.kv_length)

    def visible_to_all(self, first_key: Expr, count: int) -> Expr:
        """Whether every row sees these keys, by all but the bits."""
        return T.bool(False) if self.op.any_step("blind") else self.visible_by_place(first_key, count)

    def visible_by_place(self, first_key: Expr, count: int) -> Expr:
        """Whether every row sees these keys, by all but the bits and what only the call knows."""
        visible = first_key + count <= self.kv_length
        if self.left is not None:
            visible = T.And(visible, first_key >= self.first_row + self.shift + (self.queries - 1 - self.left))
        if self.right is not None:
            visible = T.And(visible, first_key + count <= self.first_row + self.shift + (self.right + 1))
        return visible

    def end_of(self, number: Expr) -> Expr:
        """The first key that a query does not see any more."""
        if self.right is None:
            return self.kv_length
        return T.min(self.kv_length, number + self.shift + (self.right + 1))


class KeyTiles:
    """The tiles of keys that a block visits: those of a plan, or all from the first to the last that some row sees.
    `count` is how many there are."""

    def __init__(self, key_range: BlockKeyRange, keys: int) -> None:
        self.op, self.key_range, self.keys, self.visits = key_range.op, key_range, keys, key_range.visits
        if self.visits is not None:
            self.count = self.visits.count
            return
        first, end = key_range.visible_to_any()
        # Tiles are counted from key 0, wherever a window begins.
        self._first = materialize(T.truncdiv(first, T.int32(keys)))
        self.count = materialize(T.max(T.int32(0), T.truncdiv(end + (keys - 1), T.int32(keys)) - self._first))

    def first_key(self, turn: Expr) -> Expr:
        tile = self._first + turn if self.visits is None else self.visits.tile(turn)
        return materialize(tile * self.keys)

    def hides(self, turn: Expr, first_key: Expr) -> tuple[Expr | None, Expr]:
        """(the tile's row of bits, whether anything of it is hidden from any row)."""
        visible = self.key_range.visible_to_all(first_key, self.keys)
        if self.visits is None:
            return None, materialize(T.Not(visible), "bool")
        bits_row = self.visits.bits_row(turn)
        # The plan knows neither lengths nor what is counted from them.
        late = self.op.any_step("counts_keys") or self.op.window is not None or self.op.any_step("blind")
        return bits_row, materialize(T.Or(bits_row >= 0, T.Not(visible)) if late else bits_row >= 0, "bool")


def hides_values(op: AttentionOp, *, copied_to_length: bool) -> bool:
    """Whether a value in shared memory may be hidden from a row, so that a prob of 0 meets what may not be finite.

    `copied_to_length` says who copies: threads stop at the length of the batch entry and write zeros beyond it. The
    copy engine knows only the tensor's own last key: from there on it makes zeros, but keys between an entry's length
    and that one are copied as they are, and hidden.
    """
    return op.any_step("hides") or (op.any_step("counts_keys") and not copied_to_length)

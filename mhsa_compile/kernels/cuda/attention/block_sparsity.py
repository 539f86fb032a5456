"""A static mask, analysed while compiling: for each block of queries the tiles of keys that it visits.

A tile is whole, where every row of the block sees all of it, or partial, with one bit for each pair. What no row of a
block sees is in no list, so neither time nor memory goes to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.pair_plan import split_window
from mhsa_compile.kernels.cuda.primitives.simt import materialize
from mhsa_compile.kernels.interface.ops import AttentionOp
from mhsa_compile.spec.window import WindowSpec

WORD = 32  # bits


@dataclass(frozen=True)
class CudaBlockSparsity:
    """What the kernel reads. Heads are 1 where the mask is the same for all.

    order   (heads, blocks)       the blocks of queries, those with the most tiles first: the last ones to run are short
    index   (heads * blocks + 1)  the visits of block t of head h are those from index[h * blocks + t] to the next entry
    visits  (visits, 2)           the number of a tile of keys, and the row of `bits` for its first query, -1: whole
    bits    (rows, words)         bit i of word w: the query sees key 32 w + i of the tile
    spans   (heads, L, 2)         the first key that a query sees, and the last; 0 where it sees none
    """

    order: NDArray[np.int32]
    index: NDArray[np.int32]
    visits: NDArray[np.int32]
    bits: NDArray[np.uint32]
    spans: NDArray[np.int32]


def block_plan(pairs: NDArray[np.bool_], window: WindowSpec | None, *, queries: int, keys: int) -> CudaBlockSparsity:
    """Blocks of `queries` rows, tiles of `keys`."""
    heads, L, S = pairs.shape
    blocks, tiles = -(-L // queries), -(-S // keys)
    order, spans = np.empty((heads, blocks), np.int32), np.zeros((heads, L, 2), np.int32)
    index, visits, bits = [0], list[tuple[int, int]](), list[NDArray[np.uint32]]()
    for head in range(heads):
        visible = pairs[head] if window is None else pairs[head] & window.visible(range(L), L, S)
        if S:
            spans[head, :, 0] = visible.argmax(axis=1)
            spans[head, :, 1] = np.where(visible.any(axis=1), S - 1 - visible[:, ::-1].argmax(axis=1), 0)
        for block in range(blocks):
            rows = np.zeros((queries, tiles * keys), np.bool_)
            part = visible[block * queries : (block + 1) * queries]
            rows[: len(part), :S] = part
            # Rows beyond L are of no account: a tile may be whole without them.
            cells = rows.reshape(queries, tiles, keys)
            visited = np.asarray(cells.any(axis=(0, 2)))
            whole = np.asarray(cells[: len(part)].all(axis=(0, 2)))
            for tile in np.flatnonzero(visited):
                visits.append((int(tile), -1 if whole[tile] else len(bits) * queries))
                bits += [] if whole[tile] else [_words(cells[:, tile])]
            index.append(len(visits))
        counts = np.diff(index[-blocks - 1 :])
        order[head] = np.argsort(-counts, kind="stable")
    nothing = np.zeros((1, -(-keys // WORD)), np.uint32)  # a buffer has at least one element
    return CudaBlockSparsity(
        order,
        np.array(index, np.int32),
        np.array(visits or [(0, -1)], np.int32),
        np.concatenate(bits) if bits else nothing,
        spans,
    )


def _words(cells: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """(rows, keys) -> (rows, words)."""
    rows, keys = cells.shape
    padded = np.zeros((rows, -(-keys // WORD), WORD), np.uint32)
    padded.reshape(rows, -1)[:, :keys] = cells
    return np.asarray((padded << np.arange(WORD, dtype=np.uint32)).sum(axis=2, dtype=np.uint32))


def separate_plan(op: AttentionOp, queries: int, keys: int) -> tuple[AttentionOp, CudaBlockSparsity | None]:
    """(what is left to the kernel, the plan of pairs that are known and of as much of the window as it holds)."""
    if op.pairs is None:
        return op, None
    window, rest = split_window(op)
    return rest, block_plan(op.pairs, window, queries=queries, keys=keys)


@dataclass(frozen=True)
class Visits:
    """The tiles of keys that one block visits, in order. `head` is that of its mask."""

    count: Expr
    first: Expr
    visits: Expr
    bits: Expr
    spans: Expr
    head: Expr

    def tile(self, turn: Expr) -> Expr:
        """The number of a tile."""
        return materialize(self.visits[self.first + turn, 0])

    def bits_row(self, turn: Expr) -> Expr:
        """The row of `bits` for the block's first query, -1 for a whole tile."""
        return materialize(self.visits[self.first + turn, 1])

    def span(self, query: Expr) -> tuple[Expr, Expr]:
        """(the first key, the last key) that a query sees."""
        row = T.cast(query, "int64")
        return materialize(self.spans[self.head, row, 0]), materialize(self.spans[self.head, row, 1])


def block_of_turn(views: list[Expr], turn: Expr, h: Expr) -> Expr:
    """The block of queries of head h whose turn it is, int64."""
    order = views[0]
    return materialize(T.cast(order[_head_of_mask(order, h), turn], "int64"), "int64")


def visits_of(views: list[Expr], block: Expr, h: Expr) -> Visits:
    """What a block of queries of head h visits."""
    order, index, visits, bits, spans = views
    head = _head_of_mask(order, h)
    entry = materialize(head * order.shape[1] + block, "int64")
    first = materialize(index[entry])
    return Visits(materialize(index[entry + 1] - first), first, visits, bits, spans, head)


def _head_of_mask(order: Expr, h: Expr) -> Expr:
    return T.int64(0) if int(order.shape[0]) == 1 else h

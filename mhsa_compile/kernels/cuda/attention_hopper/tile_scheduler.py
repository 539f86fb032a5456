"""Which block computes which rows of which head, in what order: one block for each multiprocessor, which goes from item
to item. An item is a tile of query rows of one head.

Heads are taken in sections, whose keys and values fit the GPU's second-level cache together; in a section, the tiles
with the most keys come first. Blocks take items in turn, there and back: 0 1 2 | 2 1 0 | 0 1 2, so that nobody always
has the longer ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives.smem_pipeline import ELEMENT
from mhsa_compile.kernels.cuda.primitives.warp import materialize
from mhsa_compile.kernels.interface.ops import AttentionOp

CACHED_BYTES = 20 << 20
"""Bytes of keys and values that are to stay cached: less than half of an H100's 50 MB, since what comes from the far
half of it is kept twice."""


@dataclass(frozen=True)
class Schedule:
    """Items of `heads` heads, all batch entries', `tiles` of each, over `blocks` blocks; all int32."""

    heads: Expr
    tiles: Expr
    blocks: Expr
    section: Expr  # heads

    def each(self, block: Expr, body: Callable[[Expr, Expr], None]) -> None:
        """body(head among all, turn of its tile) for the items of a block."""
        items = materialize(self.heads * self.tiles)
        with T.serial(T.truncdiv(items + (self.blocks - 1), self.blocks)) as turn:
            back = T.Select(T.truncmod(turn, T.int32(2)) == 0, block, self.blocks - 1 - block)
            item = materialize(turn * self.blocks + back)
            with T.If(item < items), T.Then():
                body(*self._item(item))

    def _item(self, item: Expr) -> tuple[Expr, Expr]:
        size = materialize(self.section * self.tiles)
        section = materialize(T.truncdiv(item, size))
        rest = materialize(item - section * size)
        first = materialize(section * self.section)
        heads = materialize(T.min(self.section, self.heads - first))
        # Heads change fastest: all heads of a section come to their longest tiles first.
        turn = materialize(T.truncdiv(rest, heads))
        return materialize(first + (rest - turn * heads)), turn


def make_schedule(op: AttentionOp, sizes: tuple[Expr, Expr, Expr], queries: int, multiprocessors: int) -> Schedule:
    """The schedule of a call. `sizes`: batch, query and key length, int64."""
    batch, q_length, kv_length = sizes
    tiles = T.truncdiv(q_length + (queries - 1), T.int64(queries))
    heads = batch * T.int64(op.num_heads)
    bytes_of_head = T.max(kv_length, T.int64(1)) * ((op.head_dim + op.v_head_dim) * ELEMENT)
    cached_heads = T.max(T.int64(1), T.truncdiv(T.int64(CACHED_BYTES), bytes_of_head))
    # Heads that share a key head share its cached bytes.
    section = T.min(cached_heads * (op.num_heads // op.num_kv_heads), heads)
    blocks = T.min(heads * tiles, T.int64(multiprocessors))
    return Schedule(*(materialize(T.cast(number, "int32")) for number in (heads, tiles, blocks, section)))

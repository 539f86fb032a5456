"""Which block computes which rows of which head, in what order: one block for each multiprocessor, which goes from item
to item. An item is a tile of query rows of one head.

Heads are taken in sections, whose keys and values fit the GPU's second-level cache together; what is left over goes
with the last one, so that long items never come at the end by themselves. In a section, the tiles with the most keys
come first. A block's first item has the block's number. Where all items are alike, the next one is as many further on
as there are blocks. Where they are not, whoever is free takes the next: a counter in the workspace says how many were
taken so. Dealt out in turn, causal items leave a tenth of an H200 idle (B x H x L = 2 x 16 x 8192), and two fifths
where a section is one head.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives.hopper_ptx import WARPGROUP, same_for_warp
from mhsa_compile.kernels.cuda.primitives.simt import fetch_add, launch, materialize, registers, set_register
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import ELEMENT
from mhsa_compile.kernels.interface.ops import AttentionOp

CACHED_BYTES = 16 << 20
"""Bytes of keys and values that are to stay cached: a third of an H100's 50 MB, since what comes from the far
half of it is kept twice."""
COUNTER = (1,)
"""The shape of the workspace that holds the counter."""


def needs_counter(op: AttentionOp, by_plan: bool, queries: int, multiprocessors: int) -> bool:
    """Whether items differ in how many keys they see, and there may be more of them than multiprocessors. `by_plan`: a
    constant mask chooses their tiles of keys."""
    if not (by_plan or op.window is not None or op.any_step("counts_keys")):
        return False
    if isinstance(op.batch, str) or isinstance(op.q_length, str):
        return True
    return op.batch * op.num_heads * -(-op.q_length // queries) > multiprocessors


@dataclass(frozen=True)
class Schedule:
    """Items of `heads` heads, all batch entries', `tiles` of each, over `blocks` blocks; in `sections` sections of
    `section` heads or, the last one, more. `counter` is there where items are uneven. All int32."""

    heads: Expr
    tiles: Expr
    blocks: Expr
    section: Expr
    sections: Expr
    counter: Expr | None

    @property
    def items(self) -> Expr:
        return self.heads * self.tiles

    def next_item(self, item: Expr) -> Expr:
        """The number of the item that the block of `item` computes next; `items` or more where there is none. To be
        asked by one thread of a block."""
        if self.counter is None:
            return item + self.blocks
        ticket = registers(1, "int32")
        set_register(ticket, 0, self.items)
        # Otherwise nobody has set the counter, and there is no next item.
        with T.If(self.items > self.blocks), T.Then():
            fetch_add(ticket, 0, T.address_of(self.counter[0]), T.int32(1))
        return self.blocks + same_for_warp(ticket[0], lanes=1)

    def place(self, item: Expr) -> tuple[Expr, Expr]:
        """(head among all, turn of its tile in the order of the section)."""
        number = materialize(T.min(T.truncdiv(item, self.section * self.tiles), self.sections - 1))
        first = materialize(number * self.section)
        heads = materialize(T.Select(number == self.sections - 1, self.heads - first, self.section))
        rest = materialize(item - first * self.tiles)
        # Heads change fastest: all heads of a section come to their longest tiles first.
        turn = materialize(T.truncdiv(rest, heads))
        return materialize(first + (rest - turn * heads)), turn


def make_schedule(
    op: AttentionOp, sizes: tuple[Expr, Expr, Expr], queries: int, multiprocessors: int, counter: Expr | None
) -> Schedule:
    """The schedule of a call. `sizes`: batch, query and key length, int64."""
    batch, q_length, kv_length = sizes
    tiles = T.truncdiv(q_length + (queries - 1), T.int64(queries))
    heads = batch * T.int64(op.num_heads)
    bytes_of_head = T.max(kv_length, T.int64(1)) * ((op.head_dim + op.v_head_dim) * ELEMENT)
    cached_heads = T.max(T.int64(1), T.truncdiv(T.int64(CACHED_BYTES), bytes_of_head))
    # Heads that share a key head share its cached bytes.
    section = T.min(cached_heads * (op.num_heads // op.num_kv_heads), heads)
    sections = T.truncdiv(heads, T.max(T.int64(1), section))
    blocks = T.min(heads * tiles, T.int64(multiprocessors))

    def known(number: Expr) -> Expr:
        return materialize(T.cast(number, "int32"))

    return Schedule(known(heads), known(tiles), known(blocks), known(section), known(sections), counter)


def reset(counter: Expr, items: Expr, multiprocessors: int) -> None:
    """A launch that sets the counter to 0, where blocks will ask for it."""
    blocks = T.Select(items > T.int64(multiprocessors), T.int64(1), T.int64(0))
    with launch(blocks, WARPGROUP) as (_, thread), T.If(thread == 0), T.Then():
        T.buffer_store(counter, T.int32(0), [0])

"""The kernel put together: what the copy engine is told on the host, the items of a block, and its two roles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.script.ir_builder import IRBuilder
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments, attention_arguments
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cuda.attention.block_sparsity import CudaBlockSparsity, Visits, plan_arguments, visits_of
from mhsa_compile.kernels.cuda.attention.key_range import BlockKeyRange
from mhsa_compile.kernels.cuda.attention.kv_tiles import KeyTiles
from mhsa_compile.kernels.cuda.attention.masking import ScoreMask, rows_of
from mhsa_compile.kernels.cuda.attention.score_mods import RowScoreMods
from mhsa_compile.kernels.cuda.attention.thread_parts import thread_parts
from mhsa_compile.kernels.cuda.attention_hopper.consumer import AttentionConsumer
from mhsa_compile.kernels.cuda.attention_hopper.shared_memory import AttentionSharedMemory, HopperBlockShape
from mhsa_compile.kernels.cuda.attention_hopper.tile_scheduler import Schedule, make_schedule
from mhsa_compile.kernels.cuda.primitives import hopper_ptx
from mhsa_compile.kernels.cuda.primitives.fragments import QuadFragment
from mhsa_compile.kernels.cuda.primitives.hopper_tma import Tensor
from mhsa_compile.kernels.cuda.primitives.inputs import keys_of
from mhsa_compile.kernels.cuda.primitives.mbarrier_pipeline import REGISTERS, Slots
from mhsa_compile.kernels.cuda.primitives.warp import (
    ROWS,
    WARP,
    ThreadIndex,
    barrier,
    materialize,
    registers,
    set_register,
)
from mhsa_compile.kernels.interface.ops import AttentionOp


@dataclass(frozen=True)
class ItemRows:
    """The rows of queries of an item: the first, and the tiles of keys that a constant mask leaves them."""

    first: Expr
    visits: Visits | None


@dataclass(frozen=True)
class Items:
    """What the items of a block are made of: the arguments of the kernel, and its schedule."""

    op: AttentionOp
    shape: HopperBlockShape
    arguments: AttentionArguments
    views: list[Expr] | None
    schedule: Schedule
    block: Expr

    def each(self, body: Callable[[ItemRows, Expr, Expr], None]) -> None:
        """body(its rows, batch entry, head) for each item."""

        def item(head: Expr, turn: Expr) -> None:
            b, h = (materialize(f(head, T.int32(self.op.num_heads))) for f in (T.truncdiv, T.truncmod))
            tile, visits = self._tile(turn, h)
            body(ItemRows(materialize(tile * self.shape.queries), visits), b, h)

        self.schedule.each(self.block, item)

    def _tile(self, turn: Expr, h: Expr) -> tuple[Expr, Visits | None]:
        """(the number of the tile of queries whose turn it is, the tiles of keys that a constant mask leaves it)."""
        if self.views is not None:
            turn, h, tiles = (T.cast(number, "int64") for number in (turn, h, self.schedule.tiles))
            tile, visits = visits_of(self.views, turn, tiles, h)
            return T.cast(tile, "int32"), visits
        return (self.schedule.tiles - 1 - turn if self.op.window is not None else turn), None  # long rows first

    def key_range(self, rows: ItemRows, b: Expr) -> BlockKeyRange:
        """Which keys an item's rows see."""
        arguments = self.arguments
        q_length = materialize(T.cast(arguments.q_length, "int32"))
        kv_length = keys_of(arguments, T.cast(b, "int64"))
        return BlockKeyRange(
            self.op, rows.first, self.shape.queries, q_length=q_length, kv_length=kv_length, visits=rows.visits
        )

    def score_mask(self, rows: ItemRows, place: ThreadIndex, b: Expr, h: Expr) -> ScoreMask:
        """What is hidden of the scores of the thread at `place`."""
        warps = self.shape.consumer_threads // WARP
        numbers = rows_of(place, rows.first, self.shape.queries, warps)
        cells = QuadFragment(place)
        parts = thread_parts(self.arguments, T.cast(b, "int64"), T.cast(h, "int64"))
        return ScoreMask(self.key_range(rows, b), cells, numbers, parts)


def attention(op: AttentionOp, shape: HopperBlockShape, plan: CudaBlockSparsity | None, multiprocessors: int) -> Expr:
    """The PrimFunc of an attention, whose blocks have the sizes `shape`."""
    with IRBuilder() as builder:
        with T.prim_func():
            T.func_name("attention")
            T.func_attr({"tirx.noalias": True})
            arguments = attention_arguments(op)
            views = None if plan is None else plan_arguments(plan)
            sizes = batch, q_length, _ = arguments.batch, arguments.q_length, arguments.kv_length
            # 1. The operands as the copy engine sees them.
            *loaded, output = _tensors(shape, arguments, arguments.output())
            tiles = ceil_div(q_length, shape.queries)
            # One a multiprocessor, which goes from item to item.
            blocks = T.min(batch * T.int64(op.num_heads) * tiles, T.int64(multiprocessors))
            with (
                T.launch_thread("blockIdx.x", blocks) as block,
                T.launch_thread("threadIdx.x", shape.threads) as thread,
                hopper_ptx.one_block(),
            ):
                # 2. Shared memory, and what this block is to compute.
                memory = AttentionSharedMemory(shape)
                with T.If(thread == 0), T.Then():
                    memory.begin()
                    hopper_ptx.fence_barriers()
                # No one is to arrive at an mbarrier that is not there yet.
                barrier()
                schedule = make_schedule(op, sizes, shape.queries, multiprocessors)
                items = Items(op, shape, arguments, views, schedule, materialize(T.cast(block, "int32")))
                # 3. The roles.
                # The thread that copies needs few registers; those that compute take the rest.
                few, many = REGISTERS[shape.consumers]
                with T.If(thread < hopper_ptx.WARPGROUP):
                    with T.Then():
                        hopper_ptx.give_registers(few)
                        # One thread asks for whole boxes; the other 127 of its warpgroup are done.
                        with T.If(thread == 0), T.Then():
                            _copy(items, memory, loaded)
                    with T.Else():
                        hopper_ptx.take_registers(many)
                        _compute(items, memory, ThreadIndex(materialize(thread - hopper_ptx.WARPGROUP)), output)
    return builder.get()


def _tensors(shape: HopperBlockShape, arguments: AttentionArguments, y: Expr) -> list[Tensor]:
    """Q, K and V in boxes of the tiles that are loaded, Y in those of one warp. Where there is no query, nothing is
    launched, so no map is filled in; where there is no key, those of K and V are of what is there."""
    op, batch, q_length, kv_length = arguments.op, arguments.batch, arguments.q_length, arguments.kv_length
    H, G, E, F = (T.int64(size) for size in (op.num_heads, op.num_kv_heads, op.head_dim, op.v_head_dim))
    Q, K, V = (arguments.inputs[place.buffer] for place in (op.query, op.key, op.value))
    query = Tensor("query", Q, op.query, (batch, q_length, H, E), shape.queries)
    key = Tensor("key", K, op.key, (batch, kv_length, G, E), shape.keys)
    value = Tensor("value", V, op.value, (batch, kv_length, G, F), shape.keys)
    output = Tensor("output", y, op.output, (batch, q_length, H, F), ROWS)
    with T.If(batch * q_length > 0), T.Then():
        query.encode()
        output.encode()
        with T.If(kv_length > 0):
            with T.Then():
                key.encode()
                value.encode()
            with T.Else():
                key.encode_stand_in(query)
                value.encode_stand_in(output)
    return [query, key, value, output]


def _copy(items: Items, memory: AttentionSharedMemory, tensors: list[Tensor]) -> None:
    """What one thread does: asks the copy engine for all tiles, as far ahead as the ring goes."""
    query, key, value = tensors
    for tensor in tensors:
        hopper_ptx.fetch_map(tensor.map)
    before, tiles_before = registers(1, "int32"), registers(1, "int32")
    set_register(before, 0, T.int32(0))
    set_register(tiles_before, 0, T.int32(0))

    def load(slots: Slots, use: Expr, tensor: Tensor, row: Expr, head: Expr, b: Expr) -> None:
        slots.wait_empty(use)
        slot = slots.slot(use)
        hopper_ptx.arrive_expecting(slots.full(slot), slots.tiles.bytes)
        slots.tiles.load(slot, tensor, row, head, b, slots.full(slot))

    def item(rows: ItemRows, b: Expr, h: Expr) -> None:
        key_range = items.key_range(rows, b)
        g = materialize(T.truncdiv(h, T.int32(items.op.num_heads // items.op.num_kv_heads)))
        tiles = KeyTiles(items.op, key_range, items.shape.keys)
        load(memory.queries, materialize(before[0]), query, rows.first, h, b)
        with T.serial(tiles.count) as turn:
            use, first_key = materialize(tiles_before[0] + turn), tiles.first_key(turn)
            # Each has a barrier of its own: products with K begin while V is on its way.
            load(memory.keys, use, key, first_key, g, b)
            load(memory.values, use, value, first_key, g, b)
        set_register(before, 0, before[0] + 1)
        set_register(tiles_before, 0, tiles_before[0] + tiles.count)

    items.each(item)


def _compute(items: Items, memory: AttentionSharedMemory, place: ThreadIndex, output: Tensor) -> None:
    """What the threads of a warpgroup with rows of queries do."""
    consumer = AttentionConsumer(items.op, items.shape, place, memory, output)
    consumer.begin()

    def item(rows: ItemRows, b: Expr, h: Expr) -> None:
        visibility = items.score_mask(rows, place, b, h)
        scores = RowScoreMods(items.op, visibility)
        consumer.item(visibility, scores, b, h)

    items.each(item)
    consumer.end()

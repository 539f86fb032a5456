"""The kernel put together: what the copy engine is told on the host, the items of a block, and its two roles."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.common.attention_args import AttentionArguments, attention_arguments
from mhsa_compile.kernels.common.buffers import argument, ceil_div, prim_func
from mhsa_compile.kernels.common.pair_plan import plan_arguments
from mhsa_compile.kernels.cuda.attention.block_sparsity import CudaBlockSparsity, Visits, block_of_turn, visits_of
from mhsa_compile.kernels.cuda.attention.key_range import BlockKeyRange, KeyTiles
from mhsa_compile.kernels.cuda.attention.thread_scores import ThreadScores, rows_of, thread_parts
from mhsa_compile.kernels.cuda.attention_hopper import tile_scheduler
from mhsa_compile.kernels.cuda.attention_hopper.consumer import AttentionConsumer
from mhsa_compile.kernels.cuda.attention_hopper.shared_memory import AttentionSharedMemory, HopperBlockShape
from mhsa_compile.kernels.cuda.attention_hopper.tile_scheduler import COUNTER, Schedule, needs_counter, reset
from mhsa_compile.kernels.cuda.primitives import hopper_ptx, simt
from mhsa_compile.kernels.cuda.primitives.hopper_tma import Slots, Tensor, launch_roles
from mhsa_compile.kernels.cuda.primitives.inputs import keys_of
from mhsa_compile.kernels.cuda.primitives.simt import ROWS, WARP, ThreadIndex, materialize, registers, set_register
from mhsa_compile.kernels.interface.ops import AttentionOp


@dataclass(frozen=True)
class ItemRows:
    """The rows of queries of an item: the first, and the tiles of keys that a constant mask leaves them."""

    first: Expr
    visits: Visits | None


@dataclass(frozen=True)
class Items:
    """What the items of a block are made of: the arguments of the kernel."""

    op: AttentionOp
    shape: HopperBlockShape
    arguments: AttentionArguments
    views: list[Expr] | None

    def rows(self, head: Expr, tile: Expr) -> tuple[ItemRows, Expr, Expr]:
        """(its rows, batch entry, head) of the item of a head among all and a tile of its queries."""
        b, h = (materialize(f(head, T.int32(self.op.num_heads))) for f in (T.truncdiv, T.truncmod))
        visits = None if self.views is None else visits_of(self.views, T.cast(tile, "int64"), T.cast(h, "int64"))
        return ItemRows(materialize(tile * self.shape.queries), visits), b, h

    def tile(self, schedule: Schedule, head: Expr, turn: Expr) -> Expr:
        """The number of the tile of a head's queries whose turn it is: those that see the most keys come first."""
        if self.views is not None:
            h = T.truncmod(head, T.int32(self.op.num_heads))
            return materialize(T.cast(block_of_turn(self.views, T.cast(turn, "int64"), T.cast(h, "int64")), "int32"))
        return materialize(schedule.tiles - 1 - turn if self.op.window is not None else turn)

    def key_range(self, rows: ItemRows, b: Expr) -> BlockKeyRange:
        """Which keys an item's rows see."""
        arguments = self.arguments
        q_length = materialize(T.cast(arguments.q_length, "int32"))
        kv_length = keys_of(arguments, T.cast(b, "int64"))
        return BlockKeyRange(self.op, rows.first, self.shape.queries, q_length, kv_length, rows.visits)

    def scores(self, rows: ItemRows, place: ThreadIndex, b: Expr, h: Expr) -> ThreadScores:
        """The scores of the thread at `place`."""
        warps = self.shape.consumer_threads // WARP
        numbers = rows_of(place, rows.first, self.shape.queries, warps)
        cells = simt.QuadFragment(place)
        parts = thread_parts(self.arguments, T.cast(b, "int64"), T.cast(h, "int64"))
        return ThreadScores(self.key_range(rows, b), cells, numbers, parts)


def attention(op: AttentionOp, shape: HopperBlockShape, plan: CudaBlockSparsity | None, multiprocessors: int) -> Expr:
    """The PrimFunc of an attention, whose blocks have the sizes `shape`."""
    with prim_func("attention") as builder:
        arguments = attention_arguments(op)
        views = plan_arguments(plan)
        sizes = batch, q_length, _ = arguments.batch, arguments.q_length, arguments.kv_length
        y, counter = arguments.output(), None
        count = batch * T.int64(op.num_heads) * ceil_div(q_length, shape.queries)
        if needs_counter(op, plan is not None, shape.queries, multiprocessors):
            workspace = argument("workspace", [T.int64(size) for size in COUNTER], "float32")
            counter = T.decl_buffer(COUNTER, "int32", data=workspace.data)
            reset(counter, count, multiprocessors)
        # 1. The operands as the copy engine sees them.
        *loaded, output = _tensors(shape, arguments, y)
        # One a multiprocessor, which goes from item to item.
        blocks = T.min(count, T.int64(multiprocessors))
        # One at a time, or registers could not be given to another role.
        with simt.launch(blocks, shape.threads, together=1) as (block, thread):
            # 2. Shared memory, and what this block is to compute.
            memory = AttentionSharedMemory(shape)
            with T.If(thread == 0), T.Then():
                memory.begin()
                hopper_ptx.fence_barriers()
            # No one is to arrive at an mbarrier that is not there yet.
            simt.barrier()
            items = Items(op, shape, arguments, views)

            # 3. The roles.
            def copy() -> None:
                schedule = tile_scheduler.make_schedule(op, sizes, shape.queries, multiprocessors, counter)
                _copy(items, schedule, materialize(T.cast(block, "int32")), memory, loaded)

            launch_roles(thread, shape.consumers, copy, lambda place: _compute(items, memory, place, output))
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


def _copy(items: Items, schedule: Schedule, block: Expr, memory: AttentionSharedMemory, tensors: list[Tensor]) -> None:
    """What one thread does: chooses the items, and asks the copy engine for their tiles, as far ahead as rings go."""
    query, key, value = tensors
    for tensor in tensors:
        hopper_ptx.fetch_map(tensor.map)
    before, tiles_before, item = (registers(1, "int32") for _ in range(3))
    set_register(before, 0, T.int32(0))
    set_register(tiles_before, 0, T.int32(0))
    set_register(item, 0, block)

    def request(slots: Slots, use: Expr, tensor: Tensor, row: Expr, head: Expr, b: Expr) -> None:
        """Asks for a tile, whose place is empty."""
        slot = slots.slot(use)
        hopper_ptx.arrive_expecting(slots.full(slot), slots.tiles.bytes)
        slots.tiles.load(slot, tensor, row, head, b, slots.full(slot))

    def copy_item(use: Expr) -> None:
        """The queries of an item, then its keys and values."""
        head, turn = schedule.place(materialize(item[0]))
        tile = items.tile(schedule, head, turn)
        rows, b, h = items.rows(head, tile)
        key_range = items.key_range(rows, b)
        g = materialize(T.truncdiv(h, T.int32(items.op.num_heads // items.op.num_kv_heads)))
        tiles = KeyTiles(key_range, items.shape.keys)
        memory.name_item(use, head, tile)
        request(memory.queries, use, query, rows.first, h, b)
        with T.serial(tiles.count) as number:
            use, first_key = materialize(tiles_before[0] + number), tiles.first_key(number)
            # Each has a barrier of its own: products with K begin while V is on its way.
            for slots, tensor in ((memory.keys, key), (memory.values, value)):
                slots.wait_empty(use)
                request(slots, use, tensor, first_key, g, b)
        set_register(before, 0, before[0] + 1)
        set_register(tiles_before, 0, tiles_before[0] + tiles.count)
        set_register(item, 0, schedule.next_item(item[0]))

    with T.While(item[0] >= 0):
        use = materialize(before[0])
        memory.queries.wait_empty(use)
        with T.If(item[0] >= schedule.items):
            with T.Then():
                # That there are no more.
                memory.name_item(use, T.int32(-1), T.int32(0))
                hopper_ptx.arrive(memory.queries.full(memory.queries.slot(use)))
                set_register(item, 0, T.int32(-1))
            with T.Else():
                copy_item(use)


def _compute(items: Items, memory: AttentionSharedMemory, place: ThreadIndex, output: Tensor) -> None:
    """What the threads of a warpgroup with rows of queries do."""
    consumer = AttentionConsumer(items.op, items.shape, place, memory, output)
    consumer.begin()
    item = registers(2, "int32")

    def place_again() -> tuple[Expr, Expr, Expr]:
        rows, b, h = items.rows(*consumer.this_item())
        return rows.first, b, h

    def take_next() -> None:
        for cell, word in enumerate(consumer.next_item()):
            set_register(item, cell, word)

    take_next()
    with T.While(item[0] >= 0):
        rows, b, h = items.rows(materialize(item[0]), materialize(item[1]))
        consumer.item(items.scores(rows, place, b, h), place_again)
        take_next()
    consumer.end()

"""The shared memory of a block for Hopper: the queries, a ring of tiles of keys and values, and the barriers of both.

Each tile has two barriers: `full`, which the copy engine's bytes complete, and `empty`, at which every warp that
consumes it arrives. The n-th use of a slot waits for the n-th phase of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.hopper_tiles import ALIGNMENT, SwizzledTiles, tile_bytes
from mhsa_compile.kernels.cuda.hopper_words import ROWS, WARPGROUP, arrive, begin_barrier, wait
from mhsa_compile.kernels.cuda.ring import ELEMENT, padded
from mhsa_compile.kernels.cuda.warp import WARP, Expr, settle

BARRIER_BYTES = 8
REGISTERS = {2: (24, 240), 3: (32, 160)}
"""Of a thread that copies, and of one that computes, by the number of warpgroups that compute: together they are no
more than what the block begins with, 65536 in equal shares."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a block: warpgroups that compute, 64 rows of queries each; keys of a tile; tiles of the ring."""

    consumers: int
    keys: int
    stages: int
    head_dim: int
    v_head_dim: int

    @property
    def queries(self) -> int:
        return ROWS * self.consumers

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def consumer_threads(self) -> int:
        return WARPGROUP * self.consumers

    @property
    def query_bytes(self) -> int:
        """Of the queries, whose place the output takes."""
        return max(tile_bytes(self.queries, self.head_dim), tile_bytes(self.queries, self.v_head_dim))

    @property
    def barriers_byte(self) -> int:
        """Where they begin, from the first multiple of ALIGNMENT on."""
        tiles = tile_bytes(self.keys, self.head_dim) + tile_bytes(self.keys, self.v_head_dim)
        return self.query_bytes + self.stages * tiles

    @property
    def shared_bytes(self) -> int:
        return ALIGNMENT + self.barriers_byte + BARRIER_BYTES * (2 + 4 * self.stages)

    @property
    def tile_registers(self) -> int:
        """What a thread that computes holds of S, P and O."""
        return self.keys // 2 + self.keys // 4 + padded(self.v_head_dim) // 2


class Slots:
    """Tiles that the copy engine fills, and those who compute empty."""

    def __init__(self, tiles: SwizzledTiles, barriers: Expr, count: int) -> None:
        self.tiles, self.count = tiles, count
        self._full, self._empty = barriers, barriers + T.uint32(BARRIER_BYTES * count)

    def begin(self, consumer_warps: int) -> None:
        for slot in range(self.count):
            begin_barrier(self._full + T.uint32(BARRIER_BYTES * slot), 1)
            begin_barrier(self._empty + T.uint32(BARRIER_BYTES * slot), consumer_warps)

    def slot(self, use: Expr) -> Expr:
        """Which slot it is whose turn comes as number `use`, of all uses of all slots."""
        return settle(T.truncmod(use, T.int32(self.count))) if self.count > 1 else T.int32(0)

    def full(self, slot: Expr) -> Expr:
        return self._full + T.cast(slot, "uint32") * T.uint32(BARRIER_BYTES)

    def wait_full(self, use: Expr) -> None:
        wait(self.full(self.slot(use)), self._phase(use))

    def wait_empty(self, use: Expr) -> None:
        wait(self._empty_of(use), T.bitwise_xor(self._phase(use), T.int32(1)))

    def release(self, use: Expr, lane: Expr) -> None:
        """This warp is done with it."""
        with T.If(lane == 0), T.Then():
            arrive(self._empty_of(use))

    def _empty_of(self, use: Expr) -> Expr:
        return self._empty + T.cast(self.slot(use), "uint32") * T.uint32(BARRIER_BYTES)

    def _phase(self, use: Expr) -> Expr:
        return T.bitwise_and(T.truncdiv(use, T.int32(self.count)), T.int32(1))


class BlockMemory:
    """`queries`, `keys` and `values` of a block; `output` lies where the queries do."""

    def __init__(self, shape: Shape) -> None:
        pool = T.alloc_buffer((shape.shared_bytes // ELEMENT,), "uint16", scope="shared.dyn")
        whole = T.decl_buffer((shape.shared_bytes // ELEMENT,), "uint16", data=pool.data, scope="shared.dyn")
        begin = settle(T.cuda.cvta_generic_to_shared(T.address_of(whole[0])), "uint32")
        first = settle(T.bitwise_and(begin + T.uint32(ALIGNMENT - 1), T.uint32(2**32 - ALIGNMENT)), "uint32")
        barriers = first + T.uint32(shape.barriers_byte)
        self.consumer_warps = shape.consumer_threads // WARP
        queries = SwizzledTiles(first, 1, shape.queries, shape.head_dim)
        keys = SwizzledTiles(first + T.uint32(shape.query_bytes), shape.stages, shape.keys, shape.head_dim)
        behind = T.uint32(shape.query_bytes + shape.stages * keys.bytes)
        values = SwizzledTiles(first + behind, shape.stages, shape.keys, shape.v_head_dim)
        ring = BARRIER_BYTES * 2 * shape.stages
        self.queries = Slots(queries, barriers, 1)
        self.keys = Slots(keys, barriers + T.uint32(BARRIER_BYTES * 2), shape.stages)
        self.values = Slots(values, barriers + T.uint32(BARRIER_BYTES * 2 + ring), shape.stages)
        self.output = SwizzledTiles(first, 1, shape.queries, shape.v_head_dim)

    def begin(self) -> None:
        """All barriers; to be called by one thread."""
        for slots in (self.queries, self.keys, self.values):
            slots.begin(self.consumer_warps)

"""The shared memory of a block for Hopper: the queries, rings of tiles of keys and of values, and all barriers."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.attention.launch import TileShape
from mhsa_compile.kernels.cuda.primitives import hopper_ptx, hopper_tma
from mhsa_compile.kernels.cuda.primitives.hopper_ptx import ROWS, WARPGROUP
from mhsa_compile.kernels.cuda.primitives.hopper_tma import ALIGNMENT, BARRIER_BYTES, Slots, SwizzledTiles, tile_bytes
from mhsa_compile.kernels.cuda.primitives.simt import WARP, load, registers, store, warp_barrier
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import padded

ITEM_BYTES = 16  # of which two words are used


@dataclass(frozen=True)
class HopperBlockShape(TileShape):
    """The sizes of a block; `query_stages` are the items whose queries are there at once."""

    query_stages: int

    @property
    def consumers(self) -> int:
        """Warpgroups that compute, 64 rows of queries each."""
        return self.queries // ROWS

    @property
    def threads(self) -> int:
        return WARPGROUP * (1 + self.consumers)

    @property
    def consumer_threads(self) -> int:
        return WARPGROUP * self.consumers

    @property
    def query_bytes(self) -> int:
        """Bytes of the queries of an item, whose place the output takes."""
        return max(tile_bytes(self.queries, self.head_dim), tile_bytes(self.queries, self.v_head_dim))

    @property
    def barriers_byte(self) -> int:
        """The byte at which the barriers begin, counted from the first multiple of ALIGNMENT on."""
        tiles = tile_bytes(self.keys, self.head_dim) + tile_bytes(self.keys, self.v_head_dim)
        return self.query_stages * self.query_bytes + self.stages * tiles

    @property
    def shared_bytes(self) -> int:
        return ALIGNMENT + self.items_byte + ITEM_BYTES * self.query_stages

    @property
    def items_byte(self) -> int:
        """The byte at which the items' words lie, behind the barriers."""
        return self.barriers_byte + BARRIER_BYTES * (2 * self.query_stages + 4 * self.stages)

    @property
    def tile_registers(self) -> int:
        """The registers in which a thread that computes holds its part of S, P and O."""
        # P is beside S, in 16 bits: the product that reads it still runs while the next S is summed.
        return self.keys // 2 + self.keys // 4 + padded(self.v_head_dim) // 2


class AttentionSharedMemory:
    """`queries`, `keys` and `values` of a block; `output` lies where the queries do."""

    def __init__(self, shape: HopperBlockShape) -> None:
        first = hopper_tma.shared_memory(shape.shared_bytes)
        barriers = first + T.uint32(shape.barriers_byte)
        self.consumer_warps = shape.consumer_threads // WARP
        query_stages, apart = shape.query_stages, shape.query_bytes
        queries = SwizzledTiles(first, query_stages, shape.queries, shape.head_dim, apart)
        behind = query_stages * apart
        keys = SwizzledTiles(first + T.uint32(behind), shape.stages, shape.keys, shape.head_dim)
        behind += shape.stages * keys.bytes
        values = SwizzledTiles(first + T.uint32(behind), shape.stages, shape.keys, shape.v_head_dim)
        query_ring, ring = (BARRIER_BYTES * 2 * count for count in (query_stages, shape.stages))
        self.queries = Slots(queries, barriers, query_stages)
        self.keys = Slots(keys, barriers + T.uint32(query_ring), shape.stages)
        self.values = Slots(values, barriers + T.uint32(query_ring + ring), shape.stages)
        self.output = SwizzledTiles(first, query_stages, shape.queries, shape.v_head_dim, apart)
        self._items = first + T.uint32(shape.items_byte)

    def begin(self) -> None:
        """Begins all barriers; to be called by one thread."""
        for slots in (self.queries, self.keys, self.values):
            slots.begin(self.consumer_warps)

    def name_item(self, use: Expr, head: Expr, tile: Expr) -> None:
        """Writes which item the queries of this use are of: before who writes arrives at their barrier."""
        store(self._item_of(use), [head, tile])

    def item(self, use: Expr) -> tuple[Expr, Expr]:
        """(head, tile) of the item that the queries of this use are of, once they are there."""
        words = registers(2, "int32")
        load(words, 0, 2, self._item_of(use))
        warp_barrier()
        return hopper_ptx.same_for_warp(words[0]), hopper_ptx.same_for_warp(words[1])

    def _item_of(self, use: Expr) -> Expr:
        return self._items + T.cast(self.queries.slot(use), "uint32") * T.uint32(ITEM_BYTES)

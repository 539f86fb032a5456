"""The shared memory of a block for Hopper: the queries, rings of tiles of keys and of values, and all barriers."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives.hopper_ptx import ROWS, WARPGROUP
from mhsa_compile.kernels.cuda.primitives.hopper_tma import ALIGNMENT, SwizzledTiles, tile_bytes
from mhsa_compile.kernels.cuda.primitives.mbarrier_pipeline import BARRIER_BYTES, Slots
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import ELEMENT, padded
from mhsa_compile.kernels.cuda.primitives.warp import WARP, materialize


@dataclass(frozen=True)
class HopperBlockShape:
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
        """Bytes of the queries, whose place the output takes."""
        return max(tile_bytes(self.queries, self.head_dim), tile_bytes(self.queries, self.v_head_dim))

    @property
    def barriers_byte(self) -> int:
        """The byte at which the barriers begin, counted from the first multiple of ALIGNMENT on."""
        tiles = tile_bytes(self.keys, self.head_dim) + tile_bytes(self.keys, self.v_head_dim)
        return self.query_bytes + self.stages * tiles

    @property
    def shared_bytes(self) -> int:
        return ALIGNMENT + self.barriers_byte + BARRIER_BYTES * (2 + 4 * self.stages)

    @property
    def tile_registers(self) -> int:
        """The registers in which a thread that computes holds its part of S, P and O."""
        # P is beside S, in 16 bits: the product that reads it still runs while the next S is summed.
        return self.keys // 2 + self.keys // 4 + padded(self.v_head_dim) // 2


class AttentionSharedMemory:
    """`queries`, `keys` and `values` of a block; `output` lies where the queries do."""

    def __init__(self, shape: HopperBlockShape) -> None:
        pool = T.alloc_buffer((shape.shared_bytes // ELEMENT,), "uint16", scope="shared.dyn")
        # A view: TVM would make the buffer itself as small as what it sees accessed.
        whole = T.decl_buffer((shape.shared_bytes // ELEMENT,), "uint16", data=pool.data, scope="shared.dyn")
        begin = materialize(T.cuda.cvta_generic_to_shared(T.address_of(whole[0])), "uint32")
        # The pool begins anywhere; swizzled tiles begin at multiples of ALIGNMENT, for which it has room to spare.
        first = materialize(T.bitwise_and(begin + T.uint32(ALIGNMENT - 1), T.uint32(2**32 - ALIGNMENT)), "uint32")
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
        """Begins all barriers; to be called by one thread."""
        for slots in (self.queries, self.keys, self.values):
            slots.begin(self.consumer_warps)

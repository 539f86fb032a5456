"""A block of a linear on Hopper: its shared memory, the thread that asks for tiles, and the warpgroups that multiply.

    for each tile of 64 terms:   wait until it is there;  begin C = C + X W^T;  the tile before is done with: release it
    y = C + bias                 through shared memory, to where the copy engine takes it while the next part begins

What lies outside of x, W and y the copy engine reads as zeros, and does not write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.cuda.primitives import hopper_ptx
from mhsa_compile.kernels.cuda.primitives.hopper_tma import ALIGNMENT, PANEL, ROW_BYTES, SwizzledTiles, tile_bytes
from mhsa_compile.kernels.cuda.primitives.mbarrier_pipeline import BARRIER_BYTES, Slots
from mhsa_compile.kernels.cuda.primitives.warp import (
    COLUMNS,
    DEPTH,
    ROWS,
    ThreadIndex,
    load,
    materialize,
    pack,
    registers,
    set_register,
    store,
    warp_barrier,
)

CONSUMERS = 2  # warpgroups that multiply
CACHE_BYTES = 60
"""Bytes a clock that a multiprocessor gets of the second-level cache: on an H200, blocks of 128 columns took 5 to 10 %
longer than their products alone."""
DEEP, SHALLOW = 4, 1.06
"""The tiles of a ring with which products do not wait, and how much longer they take with fewer (256 columns on an
H200)."""
ELEMENT = 2  # bytes


@dataclass(frozen=True)
class HopperShape:
    """The sizes of a block: columns of y, and tiles of the ring, all but one of which are on their way."""

    columns: int
    stages: int
    rows = hopper_ptx.ROWS * CONSUMERS
    depth = PANEL
    threads = hopper_ptx.WARPGROUP * (1 + CONSUMERS)

    @property
    def tiles_bytes(self) -> int:
        """Bytes of the ring."""
        return self.stages * (tile_bytes(self.rows, self.depth) + tile_bytes(self.columns, self.depth))

    @property
    def barriers_byte(self) -> int:
        """The byte at which the barriers begin, counted from the first multiple of ALIGNMENT on: behind ring and
        output."""
        return self.tiles_bytes + tile_bytes(self.rows, self.columns)

    @property
    def shared_bytes(self) -> int:
        return ALIGNMENT + self.barriers_byte + 2 * BARRIER_BYTES * self.stages

    def parts(self, rows: int, columns: int) -> int:
        """How many parts y (rows, columns) has."""
        return -(-rows // self.rows) * -(-columns // self.columns)

    def clocks(self, profile: CudaProfile, rows: int, columns: int, depth: int) -> float:
        """About how long y (rows, columns) takes, as in `LinearBlockShape.clocks`: the tensor cores, shared memory at
        128 bytes a clock, the second-level cache at CACHE_BYTES; and what of a part is not hidden behind its
        products."""
        most = -(-self.parts(rows, columns) // profile.hardware.multiprocessors)
        terms = -(-depth // self.depth) * self.depth
        work = terms * max(
            self.rows * self.columns / 2048,
            CONSUMERS * (hopper_ptx.ROWS + self.columns) * ELEMENT / 128,
            (self.rows + self.columns) * ELEMENT / CACHE_BYTES,
        )
        if self.stages < DEEP:
            work *= SHALLOW
        return most * (work + 300 + 4 * self.columns)


def matrix_map(name: str, first: Expr, dims: Sequence[Expr], pitch: int, box: tuple[int, int], dtype: str) -> Expr:
    """A matrix as the copy engine sees it: `dims` are its columns and rows, `pitch` the elements from row to row."""
    tensor_map = T.Var(f"{name}_map", ty=T.handle("tensormap").ty)
    T.Bind(T.tvm_stack_alloca("tensormap", 1), var=tensor_map)
    T.evaluate(
        T.tensormap_encode_tiled(
            tensor_map,
            T.address_of(first),
            *dims,
            T.int64(pitch * ELEMENT),
            *(T.int64(size) for size in box),
            *(T.int64(1),) * 2,
            descriptor_dtype=dtype,
            rank=2,
            swizzle=3,  # CU_TENSOR_MAP_SWIZZLE_128B
            l2_promotion=2,  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B: what one row of a box has
        )
    )
    return tensor_map


class LinearSharedMemory:
    """Shared memory of a block: the ring of tiles of x and of the weights, y, and the barriers."""

    def __init__(self, shape: HopperShape) -> None:
        pool = T.alloc_buffer((shape.shared_bytes // ELEMENT,), "uint16", scope="shared.dyn")
        # A view: TVM would make the buffer itself as small as what it sees accessed.
        whole = T.decl_buffer((shape.shared_bytes // ELEMENT,), "uint16", data=pool.data, scope="shared.dyn")
        begin = materialize(T.cuda.cvta_generic_to_shared(T.address_of(whole[0])), "uint32")
        first = materialize(T.bitwise_and(begin + T.uint32(ALIGNMENT - 1), T.uint32(2**32 - ALIGNMENT)), "uint32")
        self.x = SwizzledTiles(first, shape.stages, shape.rows, shape.depth)
        behind = shape.stages * self.x.bytes
        self.weight = SwizzledTiles(first + T.uint32(behind), shape.stages, shape.columns, shape.depth)
        self.output = SwizzledTiles(first + T.uint32(shape.tiles_bytes), 1, shape.rows, shape.columns)
        self.ring = Slots(self.x, first + T.uint32(shape.barriers_byte), shape.stages)


def produce(
    memory: LinearSharedMemory, turns: int, maps: Sequence[Expr], row: Expr, column: Expr, before: Expr
) -> None:
    """Asks for the tiles of one part, each as soon as its place is free."""
    with T.serial(T.int32(turns)) as turn:
        use = materialize(before + turn)
        memory.ring.wait_empty(use)
        slot = memory.ring.slot(use)
        there, term = memory.ring.full(slot), materialize(turn * PANEL)
        # Before the copies: their bytes may arrive at once.
        hopper_ptx.arrive_expecting(there, memory.x.bytes + memory.weight.bytes)
        hopper_ptx.load_box(memory.x.start(slot), maps[0], (term, row), there)
        hopper_ptx.load_box(memory.weight.start(slot), maps[1], (term, column), there)


class LinearConsumer:
    """What a warpgroup that multiplies does; `place` counts threads from the first that does."""

    def __init__(
        self, dtype: str, shape: HopperShape, memory: LinearSharedMemory, place: ThreadIndex, bias: Expr, output: Expr
    ) -> None:
        self.dtype, self.shape, self.memory, self.place = dtype, shape, memory, place
        self.bias, self.output = bias, output
        self.group = materialize(hopper_ptx.same_for_warp(T.truncdiv(place.thread, T.int32(hopper_ptx.WARPGROUP))))
        self.thread_sums = shape.columns // 2  # sums of a thread
        self.sums, self.words = registers(self.thread_sums), registers(3, "uint32")

    def part(self, turns: int, row: Expr, column: Expr, before: Expr) -> None:
        ring, memory, lane = self.memory.ring, self.memory, self.place.lane
        for at in range(self.thread_sums):
            set_register(self.sums, at, T.float32(0))
        with T.serial(T.int32(turns)) as turn:
            use = materialize(before + turn)
            ring.wait_full(use)
            slot = ring.slot(use)
            left, right = memory.x.by_rows(slot, self.group * hopper_ptx.ROWS), memory.weight.by_rows(slot)
            hopper_ptx.pin(self.sums, self.thread_sums)
            hopper_ptx.products_begin()
            for step in range(self.shape.depth // DEPTH):
                a, b = left + T.uint64(memory.x.row_step(step)), right + T.uint64(memory.weight.row_step(step))
                hopper_ptx.multiply_shared(self.sums, self.shape.columns, a, b, True, self.dtype)
            hopper_ptx.products_end()
            # The products of this tile may run on; those of the tile before are done, so it can be given back.
            hopper_ptx.products_wait(1)
            with T.If(turn > 0), T.Then():
                ring.release(use - 1, lane)
        hopper_ptx.products_wait(0)
        hopper_ptx.pin(self.sums, self.thread_sums)
        ring.release(before + (turns - 1), lane)
        self._write(row, column)

    def end(self) -> None:
        """Waits until what was written has been read from shared memory, which is to stay until then."""
        with T.If(self.place.lane == 0), T.Then():
            hopper_ptx.wait_stores()

    def _write(self, row: Expr, column: Expr) -> None:
        """Writes a warp's rows by themselves, which the copy engine takes while the next part begins."""
        # The warp's rows of the part before must have left shared memory.
        self.end()
        warp_barrier()
        first = materialize(self.place.warp * ROWS)
        tiles, g, q = self.memory.output, self.place.g, self.place.q
        starts = [
            materialize(tiles.row_start(T.int32(0), first + g + 8 * half) + T.cast(4 * q, "uint32"), "uint32")
            for half in range(2)
        ]
        for n in range(self.shape.columns // COLUMNS):
            load(self.words, 0, 2, T.address_of(self.bias[column + (n * COLUMNS + 2 * q)]), "global")
            bias = [materialize(T.reinterpret("float32", self.words[e]), "float32") for e in range(2)]
            for half in range(2):
                at = 4 * n + 2 * half
                pack(self.words, 2, self.sums[at] + bias[0], self.sums[at + 1] + bias[1], self.dtype)
                store(starts[half] + tiles.chunk_in_row(n, g), [self.words[2]])
        # First each lane's own writes, then all of the warp's: one lane stores for all.
        hopper_ptx.fence_for_engines()
        warp_barrier()
        with T.If(self.place.lane == 0), T.Then():
            for panel in range(self.shape.columns // PANEL):
                place = tiles.row_start(T.int32(0), first) + T.uint32(panel * self.shape.rows * ROW_BYTES)
                hopper_ptx.store_box(self.output, (column + panel * PANEL, row + first), place)

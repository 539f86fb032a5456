"""y = x W^T + b of 16-bit types on Hopper: products of whole warpgroups (wgmma) on tiles that the copy engine brings.

There is one block for each multiprocessor, which goes from part to part of y: 128 rows and `columns`. One thread asks
for tiles as far ahead as the ring goes, into the next part too; two warpgroups multiply, 64 rows each:

    for each tile of 64 terms:   wait until it is there;  begin C = C + X W^T;  the tile before is done with: release it
    y = C + bias                 through shared memory, to where the copy engine takes it while the next part begins

What lies outside of x, W and y the copy engine reads as zeros, and does not write.
Source: the persistent, cooperative kernel of CUTLASS 3 (sm90_gemm_tma_warpspecialized_cooperative.hpp).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.kernels.common.buffers import ceil_div
from mhsa_compile.kernels.cuda.linear.block import LinearOperands, dealt
from mhsa_compile.kernels.cuda.linear.kernel import WIDEST, MmaLinearKernel, likely_clocks, likely_rows
from mhsa_compile.kernels.cuda.primitives import hopper_ptx, hopper_tma, simt
from mhsa_compile.kernels.cuda.primitives.hopper_tma import PANEL, ROW_BYTES, Slots, SwizzledTiles, tile_bytes
from mhsa_compile.kernels.cuda.primitives.simt import COLUMNS, ROWS, ThreadIndex, materialize, registers, warp_barrier
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import ELEMENT
from mhsa_compile.kernels.interface.kernel import Config, Emitted, unknown_knobs
from mhsa_compile.kernels.interface.ops import LinearOp

KNOBS = ("columns", "stages")
FEW_ROWS = 64
"""Up to so many rows, half of a block would be empty: mma.sync, in smaller blocks, serves them."""
_CHUNK = 8  # elements in 16 bytes, of which the copy engine's strides are multiples
CONSUMERS = 2  # warpgroups that multiply
CACHE_BYTES = 60
"""Bytes a clock that a multiprocessor gets of the second-level cache: on an H200, blocks of 128 columns took 5 to 10 %
longer than their products alone."""
DEEP, SHALLOW = 4, 1.06
"""The tiles of a ring with which products do not wait, and how much longer they take with fewer (256 columns on an
H200)."""


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
        return hopper_tma.ALIGNMENT + self.barriers_byte + 2 * hopper_tma.BARRIER_BYTES * self.stages

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


class LinearSharedMemory:
    """Shared memory of a block: the ring of tiles of x and of the weights, y, and the barriers."""

    def __init__(self, shape: HopperShape) -> None:
        first = hopper_tma.shared_memory(shape.shared_bytes)
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
        simt.clear(self.sums, self.thread_sums)
        with T.serial(T.int32(turns)) as turn:
            use = materialize(before + turn)
            ring.wait_full(use)
            slot = ring.slot(use)
            left, right = memory.x.by_rows(slot, self.group * hopper_ptx.ROWS), memory.weight.by_rows(slot)
            hopper_ptx.pin(self.sums, self.thread_sums)
            hopper_ptx.products_begin()
            for step in range(self.shape.depth // simt.DEPTH):
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
            simt.load(self.words, 0, 2, T.address_of(self.bias[column + (n * COLUMNS + 2 * q)]), "global")
            bias = [materialize(T.reinterpret("float32", self.words[e]), "float32") for e in range(2)]
            for half in range(2):
                at = 4 * n + 2 * half
                simt.pack(self.words, 2, self.sums[at] + bias[0], self.sums[at + 1] + bias[1], self.dtype)
                simt.store(starts[half] + tiles.chunk_in_row(n, g), [self.words[2]])
        # First each lane's own writes, then all of the warp's: one lane stores for all.
        hopper_ptx.fence_for_engines()
        warp_barrier()
        with T.If(self.place.lane == 0), T.Then():
            for panel in range(self.shape.columns // PANEL):
                place = tiles.row_start(T.int32(0), first) + T.uint32(panel * self.shape.rows * ROW_BYTES)
                hopper_ptx.store_box(self.output, (column + panel * PANEL, row + first), place)


class HopperLinearKernel:
    """A linear of 16-bit types by wgmma, for more rows than few."""

    name = "cuda.linear_hopper"
    op_type = LinearOp
    few = MmaLinearKernel()

    def why_not(self, op: LinearOp, profile: CudaProfile) -> str | None:
        if reason := self.few.why_not(op, profile):
            return reason
        if not profile.has_wgmma:
            return "made for GPUs with wgmma"
        if op.pitch % _CHUNK:
            return f"rows of y in multiples of {_CHUNK}, not {op.pitch}"
        rows = max(likely_rows(op))
        if rows <= FEW_ROWS:
            return f"more than {FEW_ROWS} rows, not {rows}"
        most = HopperShape(PANEL, 2).parts(rows, op.out_features)
        if 2 * most < profile.hardware.multiprocessors:
            return f"parts of y for half of the multiprocessors, not {most} for {profile.hardware.multiprocessors}"
        return None

    def search_space(self, op: LinearOp, profile: CudaProfile) -> dict[str, tuple[int, ...]]:
        return {"columns": (64, 128, 192, 256), "stages": (2, 3, 4, 5, 6, 7)}

    def default_config(self, op: LinearOp, profile: CudaProfile) -> dict[str, int]:
        """The columns that are fastest by the estimate, and as many tiles as fit."""
        sizes = product((256, 192, 128, 64), (2, 3, 4, 5, 6))
        configs = (dict(zip(KNOBS, values, strict=True)) for values in sizes)
        deepest = {config["columns"]: config for config in configs if self._fits(config, profile)}
        return min(deepest.values(), key=lambda config: likely_clocks(HopperShape(**config).clocks, op, profile))

    def _fits(self, config: Config, profile: CudaProfile) -> bool:
        return HopperShape(**config).shared_bytes <= 1024 * profile.hardware.shared_kib_per_block

    def why_not_config(self, op: LinearOp, profile: CudaProfile, config: Config) -> str | None:
        if reason := unknown_knobs(config, KNOBS):
            return reason
        if config["columns"] % PANEL or config["columns"] > WIDEST or config["stages"] < 2:
            return f"columns in multiples of {PANEL} up to {WIDEST} and two stages at least, not {dict(config)}"
        if not self._fits(config, profile):
            size, most = HopperShape(**config).shared_bytes, 1024 * profile.hardware.shared_kib_per_block
            return f"{size} bytes of shared memory of {most}"
        return None

    def emit(self, op: LinearOp, profile: CudaProfile, config: Config) -> Emitted:
        many = partial(_launch, op, HopperShape(**config), profile.hardware.multiprocessors)
        return self.few.emit_by_rows(op, profile, FEW_ROWS, many)


def _launch(op: LinearOp, shape: HopperShape, multiprocessors: int, operands: LinearOperands) -> None:
    K, N, rows = T.int64(op.in_features), T.int64(op.out_features), operands.rows
    # 1. The operands as the copy engine sees them; y by the rows of a warp.
    maps = tuple(
        _matrix_map(name, buffer, dims, pitch, lines)
        for name, buffer, dims, pitch, lines in (
            ("x", operands.x, (K, rows), op.in_features, shape.rows),
            ("weight", operands.weight, (K, N), op.in_features, shape.columns),
            ("y", operands.y, (N, rows), op.pitch, ROWS),
        )
    )
    parts = ceil_div(rows, shape.rows) * T.int64(-(-op.out_features // shape.columns))
    # One a multiprocessor, which goes from part to part.
    blocks = T.min(parts, T.int64(multiprocessors))
    # One at a time, or registers could not be given to another role.
    with simt.launch(blocks, shape.threads, together=1) as (block, thread):
        # 2. Shared memory, and which parts are this block's.
        memory = LinearSharedMemory(shape)
        with T.If(thread == 0), T.Then():
            memory.ring.begin(CONSUMERS * hopper_ptx.WARPGROUP // simt.WARP)
            hopper_ptx.fence_barriers()
        simt.barrier()
        number, count, all_blocks = (materialize(T.cast(n, "int32")) for n in (block, parts, blocks))
        lines = materialize(T.cast(rows, "int32"))
        turns = -(-op.in_features // shape.depth)

        def each_part(body: Callable[[Expr, Expr, Expr], None]) -> None:
            """body(first row, first column, how many tiles came before) for each part of y that is this block's."""
            with T.serial(T.truncdiv(count - number + (all_blocks - 1), all_blocks)) as turn:
                part = materialize(number + turn * all_blocks)
                row, column = dealt(part, lines, op.out_features, (shape.rows, shape.columns))
                body(row, column, materialize(turn * turns))

        # 3. The roles.
        def compute(place: ThreadIndex) -> None:
            consumer = LinearConsumer(op.dtype, shape, memory, place, operands.bias, maps[2])
            each_part(partial(consumer.part, turns))
            consumer.end()

        hopper_tma.launch_roles(thread, CONSUMERS, lambda: each_part(partial(produce, memory, turns, maps)), compute)


def _matrix_map(name: str, buffer: Expr, dims: Sequence[Expr], pitch: int, rows: int) -> Expr:
    """A matrix, of which boxes have so many rows; `dims` are its columns and rows, `pitch` from row to row."""
    tensor_map = hopper_tma.declare_map(name)
    hopper_tma.encode_map(tensor_map, buffer[(0,) * len(buffer.shape)], dims, [T.int64(pitch)], (PANEL, rows))
    return tensor_map

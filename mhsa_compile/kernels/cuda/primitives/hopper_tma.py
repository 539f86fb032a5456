"""Tiles in shared memory as the copy engine writes them and wgmma reads them: in panels of 64 columns, 128 bytes a row,
swizzled.

A panel is rows x 128 bytes. Of each eight rows, 1024 bytes that begin at a multiple of 1024, the 16-byte chunk c of row
r lies in the place of chunk c XOR r: bits 4 to 6 of an address are XORed with its bits 7 to 9 (PTX ISA 9.7.15.5.1.2,
"Swizzle<3, 4, 3>"; the tensor map's SWIZZLE_128B is the same). So eight rows, or eight columns of them, lie in
different banks.

A matrix descriptor (PTX ISA 9.7.15.5.1.2.2) has, each shifted right by 4: the start address in bits 0 to 13, the
leading-dimension byte offset in 16 to 29, the stride byte offset in 32 to 45; and in bits 62 and 63 the swizzle, 1 for
128 bytes.

    depth in rows (K-major: Q, and K as B^T)   stride 1024: from eight rows to the next eight; no leading offset, since
                                               16 elements never leave a panel; 16 columns further are 32 bytes
    depth in columns (MN-major: V as B)        stride 1024: from eight keys to the next eight; leading offset: from a
                                               panel of 64 columns to the next; 16 keys further are 2048 bytes

ThunderKittens (types/shared/descriptor.cuh) and DeepGEMM (mma/sm90.cuh) say the same. Of V's last panel a product takes
as many columns as V has, where PTX and CUTLASS draw whole panels; NVIDIA's Fuser has tests that multiply parts of them
on an H100 (tests/cpp/test_mma.cpp, HopperRS).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm.ir import Expr
from tvm.tirx.script import builder as T

from mhsa_compile.kernels.cuda.primitives import hopper_ptx
from mhsa_compile.kernels.cuda.primitives.hopper_ptx import DEPTH, WARPGROUP, arrive, begin_barrier, load_box, wait
from mhsa_compile.kernels.cuda.primitives.simt import ThreadIndex, materialize
from mhsa_compile.kernels.cuda.primitives.smem_pipeline import CHUNK, ELEMENT, padded
from mhsa_compile.kernels.interface.ops import HeadLayout

PANEL = 64  # columns
ROW_BYTES = PANEL * ELEMENT
ALIGNMENT = 1024
_SWIZZLE_128 = 1 << 62
_EIGHT_ROWS = 8 * ROW_BYTES


def panels(width: int) -> int:
    return -(-width // PANEL)


def tile_bytes(rows: int, width: int) -> int:
    return rows * panels(width) * ROW_BYTES


class SwizzledTiles:
    """`slots` tiles of `rows` x `width` from shared address `first` on, a multiple of 1024, `pitch` bytes from one to
    the next, by default as many as a tile has."""

    def __init__(self, first: Expr, slots: int, rows: int, width: int, pitch: int | None = None) -> None:
        self.first, self.slots, self.rows, self.width = first, slots, rows, width
        self.bytes = tile_bytes(rows, width)
        self._pitch = self.bytes if pitch is None else pitch
        self.chunks = padded(width) // CHUNK

    def start(self, slot: Expr) -> Expr:
        """The address of a tile."""
        return self.first if self.slots == 1 else self.first + T.cast(slot, "uint32") * T.uint32(self._pitch)

    def address(self, slot: Expr, row: Expr, column: Expr) -> Expr:
        """The address of an element whose column is even; it and what follows of its chunk lie in a row."""
        panel, rest = T.truncdiv(column, T.int32(PANEL)), T.truncmod(column, T.int32(PANEL)) * ELEMENT
        swizzled = T.bitwise_xor(rest, T.truncmod(row, T.int32(8)) * 16)
        return self.start(slot) + T.cast(panel * (self.rows * ROW_BYTES) + row * ROW_BYTES + swizzled, "uint32")

    def row_start(self, slot: Expr, row: Expr) -> Expr:
        """The address of a row's first chunk, as if nothing were swizzled."""
        return self.start(slot) + T.cast(row * ROW_BYTES, "uint32")

    def chunk_in_row(self, chunk: int, row: Expr) -> Expr:
        """How far a chunk is from `row_start`."""
        panel, rest = divmod(chunk, PANEL // CHUNK)
        swizzled = T.bitwise_xor(T.int32(16 * rest), T.truncmod(row, T.int32(8)) * 16)
        return T.cast(swizzled, "uint32") + T.uint32(panel * self.rows * ROW_BYTES)

    def each_chunk(self, thread: Expr, threads: int, body: Callable[[Expr, Expr], None]) -> None:
        """body(row, column) for the chunks of a tile that are this thread's, the same at every call."""
        total, chunks = self.rows * self.chunks, T.int32(self.chunks)
        with T.serial(T.int32(-(-total // threads))) as turn:
            number = materialize(thread + turn * threads)
            with T.If(number < total), T.Then():
                body(materialize(T.truncdiv(number, chunks)), materialize(T.truncmod(number, chunks) * CHUNK))

    def load(self, slot: Expr, tensor: Tensor, row: Expr, head: Expr, b: Expr, barrier: Expr) -> None:
        """Starts copying rows row .. row + `rows` of a head; columns and rows that it does not have become zeros."""
        for panel in range(panels(self.width)):
            address = self.start(slot) + T.uint32(panel * self.rows * ROW_BYTES)
            load_box(address, tensor.map, tensor.coordinates(T.int32(panel * PANEL), row, head, b), barrier)

    def store(self, slot: Expr, first_row: Expr, tensor: Tensor, row: Expr, head: Expr, b: Expr) -> None:
        """Starts copying the rows of a box from row `first_row` of a tile, a multiple of eight, to those of a head from
        `row` on, but for those that it does not have."""
        for panel in range(panels(self.width)):
            address = self.start(slot) + T.cast(panel * (self.rows * ROW_BYTES) + first_row * ROW_BYTES, "uint32")
            hopper_ptx.store_box(tensor.map, tensor.coordinates(T.int32(panel * PANEL), row, head, b), address)

    def by_rows(self, slot: Expr, first_row: Expr | None = None) -> Expr:
        """The descriptor of rows of 16 columns, from row `first_row` on, a multiple of eight. `row_step` leads on."""
        start = self.start(slot)
        if first_row is not None:
            start = start + T.cast(first_row * ROW_BYTES, "uint32")
        # The leading offset is not looked at here: 16 columns never leave a panel.
        return _descriptor(start, leading=ALIGNMENT, stride=_EIGHT_ROWS)

    def row_step(self, step: int) -> int:
        """What leads a descriptor `by_rows` to the columns from 16 `step` on."""
        column = step * DEPTH
        return (column // PANEL * self.rows * ROW_BYTES + column % PANEL * ELEMENT) >> 4

    def by_columns(self, slot: Expr) -> Expr:
        """The descriptor of 16 rows of `width` columns. `column_step` leads on."""
        return _descriptor(self.start(slot), leading=self.rows * ROW_BYTES, stride=_EIGHT_ROWS)

    def column_step(self, step: int) -> int:
        """What leads a descriptor `by_columns` to the rows from 16 `step` on."""
        return (step * DEPTH * ROW_BYTES) >> 4


def _descriptor(start: Expr, *, leading: int, stride: int) -> Expr:
    fixed = _SWIZZLE_128 | (stride >> 4) << 32 | (leading >> 4) << 16
    return materialize(T.cast(T.shift_right(start, T.uint32(4)), "uint64") + T.uint64(fixed), "uint64")


def declare_map(name: str) -> Expr:
    """A tensor's map, which `encode_map` fills in; on the host's side of a kernel."""
    tensor_map = T.Var(f"{name}_map", ty=T.handle("tensormap").ty)
    T.Bind(T.tvm_stack_alloca("tensormap", 1), var=tensor_map)
    return tensor_map


def encode_map(
    tensor_map: Expr, first: Expr, dims: Sequence[Expr], strides: Sequence[Expr], box: Sequence[int]
) -> None:
    """Fills in the map of what begins at `first`, by sizes and strides in elements, innermost first."""
    T.evaluate(
        T.tensormap_encode_tiled(
            tensor_map,
            T.address_of(first),
            *dims,
            *(stride * ELEMENT for stride in strides),
            *(T.int64(size) for size in box),
            *(T.int64(1),) * len(box),
            descriptor_dtype=first.ty.dtype,
            rank=len(box),
            swizzle=3,  # CU_TENSOR_MAP_SWIZZLE_128B
            l2_promotion=2,  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B: what one row of a panel has
        )
    )


class Tensor:
    """One operand as the copy engine sees it: its heads apart, so that a box which reaches beyond one reads zeros
    there, not the next head. Boxes are of `rows` x 64 elements."""

    def __init__(self, name: str, buffer: Expr, place: HeadLayout, sizes: Sequence[Expr], rows: int) -> None:
        """Reserves the map, which `encode` fills in; to be called on the host's side of a kernel. `sizes`: batch,
        length, heads, head_dim."""
        self.buffer, self.place, self.sizes, self.rows = buffer, place, sizes, rows
        self.by_rows = place.layout == "rows"
        self.map = declare_map(name)

    def encode(self) -> None:
        """Fills in the map of a tensor that has elements."""
        batch, length, heads, head_dim = self.sizes
        width = T.int64(self.place.width) if self.by_rows else head_dim
        if self.by_rows:
            # Heads are an axis of their own, though they lie in a row: a box of one cannot reach into the next.
            dims, strides = (head_dim, heads, length, batch), (head_dim, width, length * width)
        else:
            dims, strides = (head_dim, length, heads, batch), (width, length * width, heads * length * width)
        self._encode(self, dims, strides)

    def encode_stand_in(self, other: Tensor) -> None:
        """Fills in the map of a tensor that has no elements, so perhaps no address, which the driver refuses as it does
        sizes of 0: the map is of a row of another tensor, no narrower, which nobody reads."""
        head_dim, one = self.sizes[-1], T.int64(1)
        self._encode(other, (head_dim, one, one, one), (head_dim,) * 3)

    def _encode(self, source: Tensor, dims: Sequence[Expr], strides: Sequence[Expr]) -> None:
        first = source.buffer[0, 0, source.place.offset] if source.by_rows else source.buffer[0, 0, 0, 0]
        box = (PANEL, 1, self.rows, 1) if self.by_rows else (PANEL, self.rows, 1, 1)
        encode_map(self.map, first, dims, strides, box)

    def coordinates(self, column: Expr, row: Expr, head: Expr, b: Expr) -> tuple[Expr, ...]:
        return (column, head, row, b) if self.by_rows else (column, row, head, b)


def shared_memory(count: int) -> Expr:
    """The address of so many bytes of a block's shared memory, ALIGNMENT of them to spare: it begins anywhere, swizzled
    tiles at multiples of that."""
    pool = T.alloc_buffer((count // ELEMENT,), "uint16", scope="shared.dyn")
    # A view: TVM would make the buffer itself as small as what it sees accessed.
    whole = T.decl_buffer((count // ELEMENT,), "uint16", data=pool.data, scope="shared.dyn")
    begin = materialize(T.cuda.cvta_generic_to_shared(T.address_of(whole[0])), "uint32")
    return materialize(T.bitwise_and(begin + T.uint32(ALIGNMENT - 1), T.uint32(2**32 - ALIGNMENT)), "uint32")


BARRIER_BYTES = 8
REGISTERS = {2: (24, 240), 3: (32, 160)}
"""Registers of a thread that copies, and of one that computes, by the number of warpgroups that compute: together they
are no more than what the block begins with, 65536 in equal shares."""


class Slots:
    """A ring of tiles that the copy engine fills, and those who compute empty. Each has two barriers: `full`, which the
    bytes complete, and `empty`, at which every warp that computes arrives. The n-th use of a slot waits for the n-th
    phase of it."""

    def __init__(self, tiles: SwizzledTiles, barriers: Expr, count: int) -> None:
        self.tiles, self.count = tiles, count
        self._full, self._empty = barriers, barriers + T.uint32(BARRIER_BYTES * count)

    def begin(self, consumer_warps: int) -> None:
        for slot in range(self.count):
            # One arrival, of the thread that asks for the copies; their bytes count beside it.
            begin_barrier(self._full + T.uint32(BARRIER_BYTES * slot), 1)
            begin_barrier(self._empty + T.uint32(BARRIER_BYTES * slot), consumer_warps)

    def slot(self, use: Expr) -> Expr:
        """Which slot it is whose turn comes as number `use`, of all uses of all slots."""
        return materialize(T.truncmod(use, T.int32(self.count))) if self.count > 1 else T.int32(0)

    def full(self, slot: Expr) -> Expr:
        return self._full + T.cast(slot, "uint32") * T.uint32(BARRIER_BYTES)

    def wait_full(self, use: Expr) -> None:
        wait(self.full(self.slot(use)), self._phase(use))

    def wait_empty(self, use: Expr) -> None:
        # The other parity: a slot's first use waits for the phase before the first, which is over.
        wait(self._empty_of(use), T.bitwise_xor(self._phase(use), T.int32(1)))

    def release(self, use: Expr, lane: Expr) -> None:
        """Tells the one who fills the slot of this use that this warp is done with it."""
        with T.If(lane == 0), T.Then():
            arrive(self._empty_of(use))

    def _empty_of(self, use: Expr) -> Expr:
        return self._empty + T.cast(self.slot(use), "uint32") * T.uint32(BARRIER_BYTES)

    def _phase(self, use: Expr) -> Expr:
        return T.bitwise_and(T.truncdiv(use, T.int32(self.count)), T.int32(1))


def launch_roles(
    thread: Expr, consumers: int, copy: Callable[[], None], compute: Callable[[ThreadIndex], None]
) -> None:
    """What the threads of a block do: one copies, so many warpgroups compute, whose threads are counted from the first
    of them."""
    few, many = REGISTERS[consumers]
    with T.If(thread < WARPGROUP):
        with T.Then():
            hopper_ptx.give_registers(few)
            # One thread asks for whole boxes; the other 127 of its warpgroup are done.
            with T.If(thread == 0), T.Then():
                copy()
        with T.Else():
            hopper_ptx.take_registers(many)
            compute(ThreadIndex(materialize(thread - WARPGROUP)))

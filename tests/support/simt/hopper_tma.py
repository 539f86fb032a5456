"""The copy engine in the SIMT interpreter: tensor maps, boxes that arrive when the machine lets them, stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from support.simt.hopper_memory import CHUNK, active_lanes, barrier_at, operands_of, shared_of
from support.simt.memory import WARP, Array, GlobalMemory, SimtError
from support.simt.threads import Thunk

if TYPE_CHECKING:
    from support.simt.hopper import Copy, HopperMachine

_BYTES = {"bfloat16": 2, "float16": 2}
SPANS = {0: 16, 1: 32, 2: 64, 3: 128}
"""Bytes of a row of a box that is swizzled, by the driver's CUtensorMapSwizzle; 16 is none."""


def swizzled(address: Array, span: int) -> Array:
    """The address at which a swizzled byte lies: bits 4 .. of its address XORed with its bits 7 .., as many as there
    are 16-byte chunks in the span."""
    return address ^ ((address >> 7) & (span // 16 - 1)) << 4


@dataclass
class TensorMap:
    """What `tensormap_encode_tiled` fills in."""

    memory: GlobalMemory | None = None
    first: int = 0
    dims: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()  # bytes, of the innermost too
    box: tuple[int, ...] = ()
    span: int = 16

    def encode(
        self, pointer: tuple[GlobalMemory, int], numbers: list[int], dtype: str, rank: int, swizzle: int
    ) -> None:
        """`numbers`: dims, byte strides of all but the innermost, box, element strides. Raises SimtError where the
        driver would refuse."""
        element = _BYTES[dtype]
        self.memory, self.first = pointer
        self.dims, rest = tuple(numbers[:rank]), numbers[rank:]
        self.strides, rest = (element, *rest[: rank - 1]), rest[rank - 1 :]
        self.box, steps, self.span = tuple(rest[:rank]), rest[rank:], SPANS[swizzle]
        wrong = (
            (not self.memory.data.size, "an address of nothing"),
            (self.first % 16 != 0, "an address that is no multiple of 16"),
            (any(not 1 <= dim <= 1 << 32 for dim in self.dims), f"dims {self.dims}"),
            (any(s % 16 or not 0 <= s < 1 << 40 for s in self.strides[1:]), f"strides {self.strides}"),
            (any(not 1 <= size <= 256 for size in self.box), f"box {self.box}"),
            (self.box[0] * element % 16 != 0, f"box {self.box}"),
            (swizzle != 0 and self.box[0] * element > self.span, f"a row of {self.box[0]} in {self.span} bytes"),
            (any(step != 1 for step in steps), f"element strides {steps}"),
        )
        for is_wrong, what in wrong:
            if is_wrong:
                raise SimtError(f"tensor map: {what}")

    @property
    def bytes(self) -> int:
        return int(np.prod(self.box)) * self.strides[0]

    def places(self, corner: list[int]) -> tuple[Array, Array]:
        """(byte offset in global memory of each element of the box at `corner`, whether it is inside the tensor), both
        in the order of the box, the innermost dim fastest."""
        at, inside = np.zeros(1, np.int64), np.ones(1, np.bool_)
        for dim in range(len(self.dims)):
            index = corner[dim] + np.arange(self.box[dim])
            at = (index[:, None] * self.strides[dim] + at).ravel()
            inside = (((index >= 0) & (index < self.dims[dim]))[:, None] & inside).ravel()
        return at + self.first, inside

    def read(self, corner: list[int]) -> Array:
        """The bytes of a box, zeros outside of the tensor."""
        assert self.memory is not None
        at, inside = self.places(corner)
        bytes_at = at[inside][:, None] + np.arange(self.strides[0])
        self._check(bytes_at)
        data = np.zeros((at.size, self.strides[0]), np.uint8)
        if self.memory.writer is not None:
            raise SimtError(f"{self.memory.name}: written and loaded by the copy engine in one launch")
        data[inside] = self.memory.data[0][bytes_at]
        return data.ravel()

    def write(self, corner: list[int], values: Array, number: int) -> None:
        """Stores the bytes of a box, but for those outside of the tensor, for thread `number` of the launch."""
        assert self.memory is not None
        at, inside = self.places(corner)
        bytes_at = at[inside][:, None] + np.arange(self.strides[0])
        self._check(bytes_at)
        self.memory.stored(bytes_at, number)
        self.memory.data[0][bytes_at] = values.reshape(at.size, -1)[inside]

    def _check(self, bytes_at: Array) -> None:
        assert self.memory is not None
        if bytes_at.size and (bytes_at.min() < 0 or bytes_at.max() >= self.memory.data.shape[1]):
            raise SimtError(f"tensor map: bytes {bytes_at.min()} to {bytes_at.max()} of {self.memory.name}")


def new_map(machine: HopperMachine, node: Any) -> Thunk:
    assert str(node.args[0].value) == "tensormap"
    return TensorMap


def encode(machine: HopperMachine, node: Any) -> Thunk:
    operands, attrs = [machine.expression(a) for a in node.args], node.attrs

    def execute() -> None:
        tensor, pointer, *numbers = (operand() for operand in operands)
        place = pointer.memory, int(pointer.offset[0])
        tensor.encode(
            place, [int(n) for n in numbers], str(attrs.descriptor_dtype), int(attrs.rank), int(attrs.swizzle)
        )

    return execute


def load_box(machine: HopperMachine, node: Any) -> Thunk:
    address, tensor, *corner, barrier = (machine.expression(a) for a in operands_of(node))

    def execute() -> None:
        from support.simt.hopper import Copy

        memory, tensor_map = shared_of(machine), tensor()
        for block, warp, at, bar, *where in active_lanes(machine, address(), barrier(), *(c() for c in corner)):
            if at % (8 * tensor_map.span):
                raise SimtError(f"a box swizzled by {tensor_map.span} bytes at address {at}")
            places = swizzled(at + np.arange(tensor_map.bytes), tensor_map.span) - memory.base
            chunks = np.unique(places // CHUNK)
            memory.check(np.full(chunks.size, block), np.full(chunks.size, warp), chunks, is_write=True)
            memory.check_engines(block, chunks)
            barrier_at(machine, bar).check_engine(block)
            memory.data[block, places] = 0xFF
            clocks, engine = memory.clocks, memory.clocks.engine
            memory.written_at[block, chunks, engine] = clocks.known[block, engine, engine]
            clock = np.maximum(clocks.known[block, warp], clocks.release(block, engine))
            machine.copies_on_the_way.append(Copy(tensor_map, where, block, places, barrier_at(machine, bar), clock))

    return execute


def deliver(machine: HopperMachine, copy: Copy) -> None:
    """Writes a box that arrives to shared memory, and counts its bytes for its barrier."""
    data = copy.tensor.read(copy.corner)
    shared_of(machine).data[copy.block, copy.places] = data
    copy.barrier.bytes_arrived(copy.block, data.size, copy.clock)


def store_box(machine: HopperMachine, node: Any) -> Thunk:
    tensor, *corner, address = (machine.expression(a) for a in operands_of(node))

    def execute() -> None:
        memory, tensor_map = shared_of(machine), tensor()
        lanes = machine.lanes.thread % WARP
        for block, warp, lane, at, *where in active_lanes(machine, lanes, address(), *(c() for c in corner)):
            if at % (8 * tensor_map.span):
                raise SimtError(f"a box swizzled by {tensor_map.span} bytes at address {at}")
            if int(memory.accesses[block, warp]) & ~(1 << lane):
                raise SimtError("a lane stores what others wrote, and no barrier of the warp in between")
            chunks = np.unique(swizzled(at + np.arange(tensor_map.bytes), tensor_map.span) - memory.base) // CHUNK
            memory.check(np.full(chunks.size, block), np.full(chunks.size, warp), chunks, is_write=False)
            memory.check_engines(block, chunks)
            machine.strand.uncommitted.append((tensor_map, block, warp, list(where), at))

    return execute


def commit_stores(machine: HopperMachine, node: Any) -> Thunk:
    """Closes a group of stores: only what is in a group can be waited for."""

    def execute() -> None:
        strand, active = machine.strand, set(active_lanes(machine))
        strand.stores += [store for store in strand.uncommitted if store[1:3] in active]
        strand.uncommitted = [store for store in strand.uncommitted if store[1:3] not in active]

    return execute


def stores_read(machine: HopperMachine, node: Any) -> Thunk:
    """Ends all stores that were committed; where they go to, no other warp writes."""
    assert int(node.args[0]) == 0

    def execute() -> None:
        memory, strand, active = shared_of(machine), machine.strand, set(active_lanes(machine))
        for tensor, block, warp, where, at in strand.stores:
            if (block, warp) in active:
                places = swizzled(at + np.arange(tensor.bytes), tensor.span) - memory.base
                number = (block + machine.lanes.first) * machine.threads + warp * WARP
                tensor.write(where, memory.data[block, places], number)
        strand.stores = [store for store in strand.stores if store[1:3] not in active]

    return execute

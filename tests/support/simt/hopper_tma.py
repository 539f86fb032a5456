"""The copy engine in the SIMT interpreter: tensor maps, boxes that arrive when the machine lets them, stores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from support.simt.hopper_common import active_lanes, barrier_at, operands_of, shared_of
from support.simt.hopper_memory import CHUNK
from support.simt.memory import WARP, SimtError
from support.simt.tensor_map import TensorMap, swizzled
from support.simt.threads import Thunk

if TYPE_CHECKING:
    from support.simt.hopper import Copy, HopperMachine


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

"""The instructions of Hopper that the SIMT interpreter knows; each entry takes the machine and a Call, and gives a
closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from support.simt import ptx
from support.simt.hopper_memory import (
    MOST_BARRIERS,
    WARPGROUP,
    Mbarrier,
    NamedBarrier,
    active_lanes,
    barrier_at,
    operands_of,
    same_of,
    shared_of,
    whole_blocks,
    whole_warps,
    words_of,
)
from support.simt.hopper_tma import commit_stores, encode, load_box, new_map, store_box, stores_read
from support.simt.hopper_wgmma import commit_products, fence_products, product, wait_products
from support.simt.memory import WARP, Array, SimtError
from support.simt.threads import Pointer, Thunk

if TYPE_CHECKING:
    from support.simt.hopper import HopperMachine

# Addresses.


def _address(machine: HopperMachine, node: Any) -> Thunk:
    pointer = machine.expression(node.args[0])

    def execute() -> Array:
        view = pointer()
        return (view.offset + shared_of(machine).base).astype(np.uint32)

    return execute


class _Addressing:
    """The machine, to which one expression is a pointer into shared memory and not the number that it is."""

    def __init__(self, machine: HopperMachine, address: Any) -> None:
        self._machine, self._address = machine, address

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def expression(self, node: Any) -> Thunk:
        value = self._machine.expression(node)
        if node is not self._address:
            return value
        machine = self._machine

        def pointer() -> Any:
            offset = machine.spread(value()).astype(np.int64) - shared_of(machine).base
            return Pointer(shared_of(machine), offset)

        return pointer


AT_SHARED_ADDRESSES = {"ptx.ld": -1, "ptx.ld_vec": -1, "ptx.st": 0, "ptx.st_vec": 0, "ptx.ldmatrix": -1}
"""Instructions that take an address of shared memory, and which operand it is."""


def at_shared_address(machine: HopperMachine, node: Any, name: str) -> Thunk:
    address = operands_of(node)[AT_SHARED_ADDRESSES[name]]
    if "shared" not in " ".join(words_of(node)):
        return ptx.INSTRUCTIONS[name](machine, node)
    proxy = _Addressing(machine, address)
    # The same node object, so that the closure asks the proxy for it.
    operands = list(node.args)
    index = next(i for i, a in enumerate(operands) if a.same_as(address))
    proxy._address = operands[index]

    class _Node:
        args = operands
        op = node.op

    return ptx.INSTRUCTIONS[name](proxy, _Node)  # type: ignore[arg-type]


# Barriers.


def _begin_barrier(machine: HopperMachine, node: Any) -> Thunk:
    address, count = (machine.expression(a) for a in operands_of(node)[:2])

    def execute() -> None:
        memory, numbers = shared_of(machine), active_lanes(machine, address(), count())
        for at in {at for _, _, at, _ in numbers}:
            if at % 8 or at in machine.mbarriers:
                raise SimtError(f"mbarrier at address {at}, begun twice or not aligned")
            expected = numbers[0][3]
            machine.mbarriers[at] = Mbarrier.begun(machine.blocks, memory.clocks.engine, expected)
        for block, warp, at, _ in numbers:
            machine.mbarriers[at].begun_at[block] = warp, int(memory.clocks.known[block, warp, warp])
            machine.mbarriers[at].unknown.add(block)

    return execute


def _arrive(machine: HopperMachine, node: Any) -> Thunk:
    operands = [machine.expression(a) for a in operands_of(node)]
    expects = "expect_tx" in words_of(node)

    def execute() -> None:
        memory = shared_of(machine)
        numbers = active_lanes(machine, machine.lanes.thread % WARP, operands[0](), operands[1]() if expects else 0)
        for block, warp, lane, at, count in numbers:
            if int(memory.accesses[block, warp]) & ~(1 << lane):
                raise SimtError("mbarrier: a lane arrives for its warp, and the others may not be done")
            barrier = barrier_at(machine, at)
            barrier.check(block, memory.clocks.known[block, warp])
            barrier.expect(block, count)
            barrier.arrive(block, memory.clocks.release(block, warp))

    return execute


def _wait(machine: HopperMachine, node: Any) -> Thunk:
    address, parity = (machine.expression(a) for a in operands_of(node)[:2])

    def execute() -> None:
        numbers = sorted(set(active_lanes(machine, address(), parity())))
        barriers = [(block, warp, barrier_at(machine, at), phase) for block, warp, at, phase in numbers]
        for block, warp, barrier, _ in barriers:
            barrier.check(block, shared_of(machine).clocks.known[block, warp])
        what = ", ".join(sorted({f"mbarrier {at} of block {b}, parity {p}" for b, _, at, p in numbers}))
        machine.wait(lambda: all(barrier.is_over(block, phase) for block, _, barrier, phase in barriers), what)
        for block, warp, barrier, _ in barriers:
            shared_of(machine).clocks.acquire(block, warp, barrier.past[block])

    return execute


def _named(machine: HopperMachine, number: Any, threads: Any, flags: Any, waits: bool) -> dict[int, bool]:
    """Warps come to a named barrier; {block: whether any flag holds} of those that wait."""
    memory, come = shared_of(machine), list[tuple[int, int, NamedBarrier, int]]()
    blocks = whole_blocks(machine, "a named barrier")
    flag = machine.spread(flags).reshape(-1, WARPGROUP)
    for block in blocks:
        key = block, same_of(machine, number, block)
        if not 0 <= key[1] < MOST_BARRIERS:
            raise SimtError(f"named barrier {key[1]} of {MOST_BARRIERS}")
        barrier = machine.named.setdefault(key, NamedBarrier())
        for warp in sorted({w for b, w in active_lanes(machine) if b == block}):
            memory.accesses[block, warp] = 0
            clock = memory.clocks.release(block, warp)
            turn = barrier.arrive(WARP, int(threads), clock, bool(flag[block].any()))
            come.append((block, warp, barrier, turn))
    if waits:
        what = f"named barrier {sorted({same_of(machine, number, b) for b in blocks})}"
        machine.wait(lambda: all(len(barrier.complete) > turn for _, _, barrier, turn in come), what)
        for block, warp, barrier, turn in come:
            memory.clocks.acquire(block, warp, barrier.complete[turn][0])
    return {block: barrier.complete[turn][1] for block, _, barrier, turn in come} if waits else {}


def _named_barrier(waits: bool) -> Callable[[HopperMachine, Any], Thunk]:
    def translate(machine: HopperMachine, node: Any) -> Thunk:
        number, threads = (machine.expression(a) for a in operands_of(node)[:2])
        return lambda: _named(machine, number(), threads(), False, waits)

    return translate


def _any_at_barrier(machine: HopperMachine, node: Any) -> Thunk:
    target = ptx._target(machine, node.args[0])
    number, threads, flag = (machine.expression(a) for a in operands_of(node)[1:4])

    def execute() -> None:
        by_block = _named(machine, number(), threads(), np.asarray(flag()) != 0, True)
        result = np.zeros(machine.lanes.blocks, np.uint32)
        for block, holds in by_block.items():
            result[block] = holds
        target(np.repeat(result, WARPGROUP))

    return execute


def _block_barrier(machine: HopperMachine, node: Any) -> Thunk:
    return lambda: _named(machine, np.int32(0), machine.threads, False, True)


def _warp_barrier(machine: HopperMachine, node: Any) -> Thunk:
    def execute() -> None:
        for block, warp in whole_warps(machine, "a barrier of the warp"):
            shared_of(machine).accesses[block, warp] = 0

    return execute


def _fence_engines(machine: HopperMachine, node: Any) -> Thunk:
    fence = _fence_barriers(machine, node)

    def execute() -> None:
        if machine.memory is not None:
            machine.memory.fence(machine.lanes)
        fence()

    return execute


def _fence_barriers(machine: HopperMachine, node: Any) -> Thunk:
    def execute() -> None:
        for block, warp in active_lanes(machine):
            for barrier in machine.mbarriers.values():
                barrier.fence(block, warp)

    return execute


def _set_registers(machine: HopperMachine, node: Any) -> Thunk:
    count, takes = int(node.args[0]), "inc" in words_of(node)

    def execute() -> None:
        whole_blocks(machine, "setmaxnreg")
        begin = machine.registers_at_begin()
        if count < begin if takes else count > begin:
            raise SimtError(f"setmaxnreg: from {begin} to {count}")
        machine.strand.registers = count

    return execute


def _nothing(machine: HopperMachine, node: Any) -> Thunk:
    return lambda: None


INSTRUCTIONS: dict[str, Callable[[HopperMachine, Any], Thunk]] = {
    "cuda.cvta_generic_to_shared": _address,
    "tvm_stack_alloca": new_map,
    "tensormap_encode_tiled": encode,
    "tvm_storage_sync": _block_barrier,
    "cuda.warp_sync": _warp_barrier,
    "cuda.func_call": _nothing,  # pins
    "cuda.mbarrier_wait": _wait,
    "ptx.mbarrier_init": _begin_barrier,
    "ptx.mbarrier_arrive_nocount": _arrive,
    "ptx.mbarrier_arrive_expect_tx": _arrive,
    "ptx.fence_mbarrier_init": _fence_barriers,
    "ptx.fence_proxy": _fence_engines,
    "ptx.bar_sync_count": _named_barrier(True),
    "ptx.bar_arrive": _named_barrier(False),
    "ptx.bar_red_pred_count": _any_at_barrier,
    "ptx.cp_async_bulk_tensor_g2s_cluster": load_box,
    "ptx.cp_async_bulk_tensor_s2g": store_box,
    "ptx.cp_async_bulk_commit_group": commit_stores,
    "ptx.cp_async_bulk_wait_group": stores_read,
    "ptx.prefetch_tensormap": _nothing,
    "ptx.prefetch": _nothing,
    "ptx.setmaxnreg": _set_registers,
    "ptx.wgmma_fence": fence_products,
    "ptx.wgmma_commit_group": commit_products,
    "ptx.wgmma_wait_group": wait_products,
    **{f"ptx.wgmma_{dtype}_{form}": product(form) for dtype in ("f16", "bf16") for form in ("ss", "rs")},
}

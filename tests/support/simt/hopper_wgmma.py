"""wgmma in the SIMT interpreter: issued at once, executed when its group is waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from support.simt import ptx
from support.simt.hopper_common import WARPGROUP, operands_of, same_of, shared_of, whole_blocks, words_of
from support.simt.hopper_memory import CHUNK
from support.simt.memory import WARP, Array, SimtError
from support.simt.threads import Thunk
from support.simt.wgmma_descriptors import Descriptor, Product, accumulators, fragments, left_operand

if TYPE_CHECKING:
    from support.simt.hopper import HopperMachine


def _registers(machine: HopperMachine, node: Any) -> Callable[[], tuple[Any, int]]:
    """The register that an operand names."""
    key, indices = int(node.source.__chandle__()), [machine.expression(index) for index in node.indices]

    def find() -> tuple[Any, int]:
        view = machine.views[key]
        return view.memory, int(machine._element(view, [index() for index in indices]))

    return find


def _several(registers: list[tuple[Any, int]]) -> tuple[Any, Array]:
    assert all(memory is registers[0][0] for memory, _ in registers), "one array of registers a matrix"
    return registers[0][0], np.array([at for _, at in registers])


def product(form: str) -> Callable[[HopperMachine, Any], Thunk]:
    def translate(machine: HopperMachine, node: Any) -> Thunk:
        words, operands = words_of(node), operands_of(node)
        columns = int(next(w for w in words if w.startswith("m64n")).removeprefix("m64n").removesuffix("k16"))
        dtype = ptx.HALF[words[-2] if words[-2] in ptx.HALF else words[-3]]
        count = columns // 2
        sums = [_registers(machine, a) for a in operands[:count]]
        words_of_left = 4 if form == "rs" else 1
        left, rest = operands[count : count + words_of_left], operands[count + words_of_left :]
        left_words = [_registers(machine, a) for a in left] if form == "rs" else []
        left_descriptor = machine.expression(left[0]) if form == "ss" else None
        right, adds = machine.expression(rest[0]), machine.expression(rest[1])
        assert [int(n) for n in rest[2:4]] == [1, 1]
        transposed = (int(rest[4]) == 1, int(rest[5]) == 1) if form == "ss" else (False, int(rest[4]) == 1)

        def execute() -> None:
            blocks = whole_blocks(machine, "wgmma")
            memory, rows = _several([find() for find in sums])
            in_flight = [p for group in machine.strand.products for p in group if p.sums[0] is memory]
            if left_descriptor is None:
                source, at = _several([find() for find in left_words])
                _check_fenced(machine, source)
                a: Any = lambda: source.data[at]  # noqa: E731
            else:
                value = left_descriptor()
                a = [Descriptor.of(same_of(machine, value, block)) for block in blocks]
            begin = None
            if not in_flight:
                _check_fenced(machine, memory)
                begin = memory.data[rows].copy()
                active = _active(machine)
                memory.data[rows[:, None], np.flatnonzero(active)[None]] = np.nan
            descriptor = right()
            b = [Descriptor.of(same_of(machine, descriptor, block)) for block in blocks]
            product = Product(blocks, (memory, rows), begin, a, b, bool(adds()), dtype, transposed, _active(machine))
            machine.strand.products[-1].append(product)

        return execute

    return translate


def _active(machine: HopperMachine) -> Array:
    active = machine.lanes.active
    return np.ones(machine.lanes.count, np.bool_) if active is None else active.copy()


def _check_fenced(machine: HopperMachine, registers: Any) -> None:
    if getattr(registers, "written", 0) > machine.strand.fenced:
        raise SimtError("wgmma: registers were written since the last wgmma.fence")


def fence_products(machine: HopperMachine, node: Any) -> Thunk:
    def execute() -> None:
        whole_blocks(machine, "wgmma.fence")
        machine.strand.fenced = machine.clock

    return execute


def commit_products(machine: HopperMachine, node: Any) -> Thunk:
    return lambda: machine.strand.products.append([])


def wait_products(machine: HopperMachine, node: Any) -> Thunk:
    pending = int(node.args[0])

    def execute() -> None:
        whole_blocks(machine, "wgmma.wait_group")
        groups = machine.strand.products
        assert not groups[-1], "products that no group has"
        while len(groups) - 1 > pending:
            for product in groups.pop(0):
                _multiply(machine, product)

    return execute


def _multiply(machine: HopperMachine, product: Product) -> None:
    memory, rows = product.sums
    lanes = np.flatnonzero(product.active)
    if product.begin is not None:
        memory.data[rows[:, None], lanes[None]] = product.begin[:, lanes]

    def of_blocks(registers: Array) -> Array:
        return registers.reshape(len(registers), -1, WARPGROUP)[:, product.blocks]

    sums = accumulators(of_blocks(memory.data[rows]))
    if callable(product.left):
        a = left_operand(of_blocks(product.left()), product.dtype)
    else:
        a = _matrix(machine, product, product.left, 64, product.transposed[0])
    b = _matrix(machine, product, product.right, sums.shape[2], product.transposed[1])
    result = a @ b.swapaxes(1, 2) + (sums if product.adds else np.float32(0))
    memory.data[rows[:, None], lanes[None]] = fragments(result.astype(np.float32)).reshape(len(rows), -1)


def _matrix(machine: HopperMachine, product: Product, descriptors: list[Descriptor], rows: int, turned: bool) -> Array:
    """(blocks, rows, 16) of shared memory as float32."""
    shared, tiles = shared_of(machine), []
    warps = np.unique(machine.lanes.thread // WARP)
    for block, descriptor in zip(product.blocks, descriptors, strict=True):
        at = descriptor.addresses(rows, is_transposed=turned) - shared.base
        chunks = np.unique(at // CHUNK)
        if chunks[0] < 0 or chunks[-1] * CHUNK >= shared.data.shape[1]:
            raise SimtError(f"wgmma: bytes {at.min()} to {at.max()} of shared memory")
        shared.check_engines(block, chunks)
        for warp in warps:
            shared.check(np.array([block]), np.array([warp]), chunks, is_write=False)
            shared.read_at[block, chunks, warp] = shared.clocks.known[block, warp, warp]
        tiles.append(shared.data[block].view(product.dtype)[at // 2])
    return np.stack(tiles).astype(np.float32)

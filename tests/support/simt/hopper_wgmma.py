"""wgmma in the SIMT interpreter: issued at once, executed when its group is waited for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from support.simt import ptx
from support.simt.hopper_memory import CHUNK, WARPGROUP, operands_of, same_of, shared_of, whole_blocks, words_of
from support.simt.hopper_tma import swizzled
from support.simt.memory import WARP, Array, SimtError
from support.simt.threads import Thunk

if TYPE_CHECKING:
    from support.simt.hopper import HopperMachine

DEPTH = 16  # of a product of 16-bit elements
_SPANS = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes, by bits 62 and 63


@dataclass(frozen=True)
class Descriptor:
    """A matrix in shared memory: PTX ISA 9.7.15.5.1.2.2, "Matrix Descriptor Format"."""

    start: int
    leading: int
    stride: int
    span: int

    @classmethod
    def of(cls, word: int) -> Descriptor:
        fields = 0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62
        if word & ~fields:
            raise SimtError(f"wgmma: descriptor {word:#x} has a base offset, or bits that mean nothing")
        start, leading, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        descriptor = cls(start, leading, stride, _SPANS[word >> 62])
        if descriptor.span > 16 and start % (8 * descriptor.span) // 128:
            raise SimtError(f"wgmma: a matrix from address {start} on, where the pattern of its swizzle does not begin")
        return descriptor

    def addresses(self, rows: int, *, is_transposed: bool) -> Array:
        """Where elements (row, depth) of 2 bytes lie, (rows, 16): the canonical layouts of PTX ISA 9.7.15.5.1.2.1.3.

        Rows are those of A, or the columns of B. `is_transposed`: they, and not the depth, are neighbours; of the last
        pattern of a swizzle there may be fewer than it has, as in NVIDIA's Fuser (`hopper_tma`).
        """
        row, depth = np.arange(rows)[:, None], np.arange(DEPTH)[None]
        if is_transposed:
            width = self.span // 2
            if self.span == 16:
                at = row // 8 * self.stride + depth // 8 * self.leading + depth % 8 * 16 + row % 8 * 2
            else:
                at = row // width * self.leading + depth // 8 * self.stride + depth % 8 * self.span + row % width * 2
        elif self.span == 16:
            at = row // 8 * self.stride + row % 8 * 16 + depth // 8 * self.leading + depth % 8 * 2
        else:
            if self.start % self.span + 2 * DEPTH > self.span:
                raise SimtError("wgmma: a row of 16 elements leaves its span")
            at = row // 8 * self.stride + row % 8 * self.span + depth * 2
        return swizzled(self.start + at, self.span)


@dataclass
class Product:
    """One wgmma of a warpgroup in some blocks, issued. `sums` and `left` are registers, (register, its rows)."""

    blocks: list[int]
    sums: tuple[Any, Array]  # Registers, the numbers of the accumulators
    begin: Array | None  # what the accumulators held, where they were not in flight yet
    left: Callable[[], Array] | list[Descriptor]  # (registers, N) words, or the descriptor of each block
    right: list[Descriptor]
    adds: bool
    dtype: Any
    transposed: tuple[bool, bool]
    active: Array


def accumulators(rows: Array) -> Array:
    """Registers (N / 2, blocks, 128) of accumulators -> (blocks, 64, N): register 4 n + 2 h + e of lane 4 g + q of warp
    w is row 16 w + g + 8 h, column 8 n + 2 q + e (PTX ISA 9.7.15.5.1.1.1, figure of matrix D)."""
    tiles = rows.shape[0] // 4
    split = rows.reshape(tiles, 2, 2, -1, 4, 8, 4)  # n h e b w g q
    return split.transpose(3, 4, 1, 5, 0, 6, 2).reshape(rows.shape[1], 64, 8 * tiles)


def fragments(matrix: Array) -> Array:
    """The inverse of `accumulators`."""
    blocks, _, columns = matrix.shape
    split = matrix.reshape(blocks, 4, 2, 8, columns // 8, 4, 2)  # b w h g n q e
    return split.transpose(4, 2, 6, 0, 1, 3, 5).reshape(columns // 2, blocks, 128)


def left_operand(words: Array, dtype: Any) -> Array:
    """Words (4, blocks, 128) -> A (blocks, 64, 16): word i holds columns 2 q + 8 (i // 2) and the next of row g + 8 (i
    % 2) of a warp's 16 (figure of matrix A)."""
    pairs = np.ascontiguousarray(words)[..., None].view(dtype)  # i b lane e
    split = pairs.reshape(2, 2, -1, 4, 8, 4, 2)  # i // 2, i % 2, b w g q e
    return split.transpose(2, 3, 1, 4, 0, 5, 6).reshape(words.shape[1], 64, DEPTH).astype(np.float32)


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

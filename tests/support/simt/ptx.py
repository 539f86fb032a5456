"""The CUDA and PTX instructions that the SIMT interpreter knows, by the fragment layouts of the PTX ISA (9.7.14,
9.7.9).

Each entry of INSTRUCTIONS takes the machine and a Call, and gives a closure. A lane's place in its warp is 4 g + q: g
is the row of an 8 x 8 matrix, q the pair of its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from support.simt.memory import WARP, Array, Lanes, Memory, SimtError, numpy_dtype
from support.simt.threads import Thunk

if TYPE_CHECKING:
    from support.simt.interpreter import Machine

HALF = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


# Barriers.


def _block_barrier(machine: Machine, node: Any) -> Thunk:
    def execute() -> None:
        blocks = machine.lanes.whole(machine.lanes.threads, "a barrier of the block")
        machine.lanes.barriers[blocks] += 1
        for memory in machine.shared:
            memory.block_barrier(blocks)

    return execute


def _warp_barrier(machine: Machine, node: Any) -> Thunk:
    def execute() -> None:
        warps = machine.lanes.whole(WARP, "a barrier of the warp")
        machine.lanes.barriers += warps.reshape(machine.lanes.barriers.shape)
        for memory in machine.shared:
            memory.warp_barrier(machine.lanes, warps)

    return execute


def _storage_barrier(machine: Machine, node: Any) -> Thunk:
    return _warp_barrier(machine, node) if str(node.args[0].value) == "warp" else _block_barrier(machine, node)


# Shuffles: mask, value, lane (or how far), width.


def _shuffle(source: Callable[[Array, int], Array]) -> Callable[[Machine, Any], Thunk]:
    """`source(lane, operand)`: whose value a lane gets."""

    def translate(machine: Machine, node: Any) -> Thunk:
        mask, value, operand, width = (machine.expression(argument) for argument in node.args)

        def execute() -> Array:
            assert int(width()) == WARP
            number = np.arange(machine.lanes.count)
            lane = number % WARP
            lanes = source(lane, operand())
            lanes = np.where((lanes < 0) | (lanes >= WARP), lane, lanes)
            _take_part(machine, int(mask()), lanes)
            return np.asarray(machine.spread(value())[number - lane + lanes])

        return execute

    return translate


def _take_part(machine: Machine, mask: int, sources: Array) -> None:
    """Refuses a shuffle of other lanes than those that go on, or from another lane."""
    named = np.array([mask >> lane & 1 for lane in range(WARP)], np.bool_)
    active = np.ones(machine.lanes.count, np.bool_) if machine.lanes.active is None else machine.lanes.active
    warps = active.reshape(-1, WARP)
    some = warps.any(axis=1)
    if (warps[some] != named).any():
        raise SimtError("a shuffle: other lanes take part than its mask says")
    if not named[sources[active]].all():
        raise SimtError("a shuffle from a lane that does not take part")


# Votes.


def _any_of_warp(machine: Machine, node: Any) -> Thunk:
    condition = machine.expression(node.args[1])

    def execute() -> Array:
        machine.lanes.whole(WARP, "a vote")
        holds = machine.spread(condition()) != 0
        return np.repeat(holds.reshape(-1, WARP).any(axis=1), WARP).astype(np.int32)

    return execute


def _ballot(machine: Machine, node: Any) -> Thunk:
    mask, flag = (machine.expression(argument) for argument in node.args)

    def execute() -> Array:
        assert int(mask()) == 0xFFFFFFFF
        machine.lanes.whole(WARP, "a vote")
        flags = machine.spread(flag()).reshape(-1, WARP) != 0
        return np.repeat(np.packbits(flags, axis=1, bitorder="little").view(np.uint32)[:, 0], WARP)

    return execute


def _any_of_block(machine: Machine, node: Any) -> Thunk:
    condition, barrier = machine.expression(node.args[0]), _block_barrier(machine, node)

    def execute() -> Array:
        holds, threads = machine.spread(condition()) != 0, machine.lanes.threads
        barrier()
        return np.repeat(holds.reshape(-1, threads).any(axis=1), threads).astype(np.int32)

    return execute


def _first_bit(machine: Machine, node: Any) -> Thunk:
    """The number of the lowest bit that is set, from 1 on; 0 where none is."""
    value = machine.expression(node.args[0])

    def execute() -> Array:
        bits = np.unpackbits(machine.spread(value())[:, np.newaxis].view(np.uint8), axis=1, bitorder="little")
        return np.where(bits.any(axis=1), bits.argmax(axis=1) + 1, 0).astype(np.int32)

    return execute


# Matrices.


def _ldmatrix(machine: Machine, node: Any) -> Thunk:
    words = [str(a.value) for a in node.args if type(a).__name__ == "StringImm"]
    count, transposed = {"x1": 1, "x2": 2, "x4": 4}[next(w for w in words if w in ("x1", "x2", "x4"))], "trans" in words
    targets, pointer = [_target(machine, a) for a in node.args[:count]], machine.expression(node.args[count])

    def execute() -> None:
        lanes, at = machine.lanes, pointer()
        lanes.whole(WARP, "ldmatrix")
        with machine.only(np.arange(lanes.count) % WARP < 8 * count):
            rows = at.memory.read(lanes, at.offset, 16)
        matrices = rows.view(np.uint16).reshape(-1, 4, 8, 8)  # warp, matrix, row, column
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        fragments = np.ascontiguousarray(matrices).view(np.uint32)  # warp, matrix, g, q
        for i, target in enumerate(targets):
            target(fragments[:, i].reshape(-1))

    return execute


def _load(machine: Machine, node: Any) -> Thunk:
    """Words, 1 or more, from an address; or an element of 8 or 16 bits into the lowest bits of one."""
    *registers, address = [a for a in node.args if type(a).__name__ != "StringImm"]
    kinds = {str(a.value) for a in node.args if type(a).__name__ == "StringImm"}
    size = 1 if "u8" in kinds else 2 if "u16" in kinds else 4
    targets, pointer = [_target(machine, a) for a in registers], machine.expression(address)
    dtype = numpy_dtype(str(registers[0].ty.dtype))

    def execute() -> None:
        at = pointer()
        words = at.memory.read(machine.lanes, at.offset, size * len(targets)).view(f"u{size}" if size < 4 else dtype)
        for i, target in enumerate(targets):
            target(words[:, i])

    return execute


def _store(machine: Machine, node: Any) -> Thunk:
    operands = [a for a in node.args if type(a).__name__ != "StringImm"]
    pointer, values = machine.expression(operands[0]), [machine.expression(a) for a in operands[1:]]
    dtype = numpy_dtype(str(operands[1].ty.dtype))

    def execute() -> None:
        at, words = pointer(), np.stack([machine.spread(value()) for value in values], axis=1)
        at.memory.write(machine.lanes, at.offset, np.ascontiguousarray(words, dtype).view(np.uint8))

    return execute


def _mma(machine: Machine, node: Any) -> Thunk:
    words = [str(a.value) for a in node.args if type(a).__name__ == "StringImm"]
    assert words[2:6] == ["m16n8k16", "row", "col", "f32"] and words[8] == "f32", words
    halves = [HALF[words[6]], HALF[words[7]]]
    targets = [_target(machine, a) for a in node.args[:4]]
    a, b, c = ([machine.expression(x) for x in node.args[i:j]] for i, j in ((4, 8), (8, 10), (10, 14)))

    def execute() -> None:
        machine.lanes.whole(WARP, "mma")

        def fragments(registers: list[Thunk]) -> Array:
            return np.stack([machine.spread(register()) for register in registers]).reshape(len(registers), -1, 8, 4)

        def pairs(registers: list[Thunk], dtype: Any) -> Array:
            """(register, warp, g, q, which of the pair)"""
            return fragments(registers)[..., None].view(dtype).astype(np.float32)

        # A's registers: (rows from 8 on, columns from 8 on) = (i % 2, i // 2); B's: rows from 8 on; C's: rows, column.
        left = pairs(a, halves[0]).reshape(2, 2, -1, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
        right = pairs(b, halves[1]).transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
        summand = fragments(c).reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1).reshape(-1, 16, 8)
        result = (left @ right + summand).reshape(-1, 2, 8, 4, 2)  # warp, row from 8 on, g, q, column
        for i, target in enumerate(targets):
            target(result[:, i // 2, :, :, i % 2].reshape(-1))

    return execute


def _movmatrix(machine: Machine, node: Any) -> Thunk:
    target, value = _target(machine, node.args[0]), machine.expression(node.args[1])

    def execute() -> None:
        machine.lanes.whole(WARP, "movmatrix")
        matrices = np.ascontiguousarray(machine.spread(value())).view(np.uint16).reshape(-1, 8, 8)
        target(np.ascontiguousarray(matrices.swapaxes(1, 2)).view(np.uint32).reshape(-1))

    return execute


# Arithmetic.


def _ex2(machine: Machine, node: Any) -> Thunk:
    target, value = _target(machine, node.args[0]), machine.expression(node.args[1])
    return lambda: target(np.exp2(value()))


def _rcp(machine: Machine, node: Any) -> Thunk:
    target, value = _target(machine, node.args[0]), machine.expression(node.args[1])
    return lambda: target(np.float32(1) / value())


def _cvt_pair(machine: Machine, node: Any) -> Thunk:
    """d, a, b: b is the lower half."""
    words = [str(a.value) for a in node.args if type(a).__name__ == "StringImm"]
    dtype = HALF[next(w for w in words if w.endswith("x2")).removesuffix("x2")]
    target, upper, lower = _target(machine, node.args[0]), *(machine.expression(a) for a in node.args[1:3])

    def execute() -> None:
        pair = np.stack([machine.spread(lower()), machine.spread(upper())], axis=1).astype(dtype)
        target(np.ascontiguousarray(pair).view(np.uint32)[:, 0])

    return execute


def _fetch_add(machine: Machine, node: Any) -> Thunk:
    """A word of global memory, to which one lane adds after the other."""
    register, address, term = (a for a in node.args if type(a).__name__ != "StringImm")
    target, pointer, value = _target(machine, register), machine.expression(address), machine.expression(term)

    def execute() -> None:
        at, terms = pointer(), machine.spread(value())
        words, before = at.memory.data.reshape(-1).view(terms.dtype), np.zeros_like(terms)
        lanes = np.arange(machine.lanes.count)
        for lane in lanes if machine.lanes.active is None else lanes[machine.lanes.active]:
            place = int(at.offset[lane]) // terms.dtype.itemsize
            before[lane] = words[place]
            words[place] += terms[lane]
        target(before)

    return execute


def _target(machine: Machine, node: Any) -> Callable[[Any], None]:
    """Stores into a register that an instruction names."""
    key, indices = int(node.source.__chandle__()), [machine.expression(index) for index in node.indices]
    return lambda value: machine.store(machine.views[key], [index() for index in indices], value)


# Asynchronous copies.


@dataclass
class _Copy:
    memory: Memory
    offset: Array
    values: Array  # (N, bytes)
    lanes: Array  # whose copy is still under way


@dataclass
class AsyncCopies:
    """cp.async: each lane's copies, in the groups that it committed, oldest first; the last are not committed."""

    groups: list[list[_Copy]] = field(default_factory=list)
    committed: list[Array] = field(default_factory=list)  # of each group, by whom
    open: list[_Copy] = field(default_factory=list)

    def start(self, lanes: Lanes, memory: Memory, offset: Array, values: Array) -> None:
        """What is there is garbage from now on."""
        memory.write(lanes, offset, np.full_like(values, 0xFF))
        self.open.append(_Copy(memory, offset, values, _who(lanes)))

    def commit(self, lanes: Lanes) -> None:
        who = _who(lanes)
        self.groups.append([_Copy(c.memory, c.offset, c.values, c.lanes & who) for c in self.open])
        self.committed.append(who)
        for copy in self.open:
            copy.lanes = copy.lanes & ~who
        self.open = [copy for copy in self.open if copy.lanes.any()]

    def wait(self, machine: Machine, pending: int) -> None:
        """All but the last `pending` groups of each active lane arrive."""
        who, later = _who(machine.lanes), np.zeros(machine.lanes.count, np.int64)
        arriving = list[tuple[_Copy, Array]]()
        for group, committed in zip(reversed(self.groups), reversed(self.committed), strict=True):
            arriving += [(copy, copy.lanes & who & (later >= pending)) for copy in reversed(group) if copy.lanes.any()]
            later += committed
        for copy, now in reversed(arriving):
            with machine.only(now) as some:
                if some:
                    copy.memory.write(machine.lanes, copy.offset, copy.values)
            copy.lanes = copy.lanes & ~now


def _who(lanes: Lanes) -> Array:
    return np.ones(lanes.count, np.bool_) if lanes.active is None else lanes.active


def _copy(machine: Machine, node: Any) -> Thunk:
    """cp.async [to], [from], size {, bytes of the source}: the rest becomes zeros."""
    operands = [machine.expression(a) for a in node.args if type(a).__name__ != "StringImm"]
    size = int(node.args[2])

    def execute() -> None:
        to, source = operands[0](), operands[1]()
        sizes = machine.spread(operands[3]() if len(operands) > 3 else size)
        if not np.isin(sizes, (0, size)).all():
            raise SimtError("cp.async: all of the source or nothing")
        values = np.zeros((machine.lanes.count, size), np.uint8)
        with machine.only(sizes > 0) as some:
            if some:
                data = source.memory.read(machine.lanes, source.offset, size)
                values = np.where((sizes > 0)[:, None], data, 0).astype(np.uint8)
        machine.copies.start(machine.lanes, to.memory, to.offset, values)

    return execute


def _commit(machine: Machine, node: Any) -> Thunk:
    return lambda: machine.copies.commit(machine.lanes)


def _wait(machine: Machine, node: Any) -> Thunk:
    pending = int(node.args[0])
    return lambda: machine.copies.wait(machine, pending)


def _pointer(machine: Machine, node: Any) -> Thunk:
    return machine.expression(node.args[0])


INSTRUCTIONS: dict[str, Callable[[Machine, Any], Thunk]] = {
    "tvm_storage_sync": _storage_barrier,
    "cuda.cta_sync": _block_barrier,
    "cuda.warp_sync": _warp_barrier,
    "cuda.cvta_generic_to_shared": _pointer,
    "cuda.__shfl_sync": _shuffle(lambda lane, operand: np.broadcast_to(operand, lane.shape) % WARP),
    "cuda.__shfl_xor_sync": _shuffle(lambda lane, operand: lane ^ operand),
    "cuda.__shfl_up_sync": _shuffle(lambda lane, operand: lane - operand),
    "cuda.__shfl_down_sync": _shuffle(lambda lane, operand: lane + operand),
    "cuda.any_sync": _any_of_warp,
    "cuda.syncthreads_or": _any_of_block,
    "cuda.ballot_sync": _ballot,
    "cuda.ffs_u32": _first_bit,
    "ptx.atom": _fetch_add,
    "ptx.ld": _load,
    "ptx.ld_vec": _load,
    "ptx.st": _store,
    "ptx.st_vec": _store,
    "ptx.ldmatrix": _ldmatrix,
    "ptx.mma": _mma,
    "ptx.movmatrix": _movmatrix,
    "ptx.ex2": _ex2,
    "ptx.rcp": _rcp,
    "ptx.cvt_bf16x2_f32": _cvt_pair,
    "ptx.cvt_f16x2_f32": _cvt_pair,
    "ptx.cp_async_ca": _copy,
    "ptx.cp_async_cg": _copy,
    "ptx.cp_async_ca_src_size": _copy,
    "ptx.cp_async_cg_src_size": _copy,
    "ptx.cp_async_commit_group": _commit,
    "ptx.cp_async_wait_group": _wait,
}

"""Runs a TIR PrimFunc with thread bindings in NumPy: what a CUDA kernel computes, where there is no GPU.

All threads of some blocks run in lockstep, one NumPy axis: a value is a scalar, the same for all, or an array (N,) over
the N threads; of a vector type (N, lanes). Where they part, at a branch or in a loop whose trips differ, a mask says
who goes on.

What it proves: of the PrimFunc as a kernel emits it, before TVM's passes, that every index, mask, fragment layout and
tail is right; that no access of global memory is out of bounds or misaligned; that no thread reads shared memory which
another wrote, nor overwrites what another read, without a barrier in between; that none touches global memory which
another of its launch wrote; that copies are waited for (`cp.async` leaves garbage until its group is); that a barrier
is reached by all or by none.

What it does not: that TVM and nvcc compile it as it is meant; that threads of a warp which run apart would not race;
the rounding of tensor cores and of ex2.approx beyond float32's; anything of speed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
from support.simt import ptx
from support.simt.expressions import Expressions
from support.simt.memory import Array, GlobalMemory, Lanes, Memory, SharedMemory, SimtError, numpy_dtype
from support.simt.threads import Registers, Thunk, View, key_of

BLOCKS_TOGETHER = 16


def run(func: Any, *arrays: Array, blocks_together: int = BLOCKS_TOGETHER) -> None:
    """Calls a kernel whose arguments are buffers; outputs are written in place. Raises SimtError."""
    Machine(func, blocks_together)(*arrays)


class Machine(Expressions):
    """A kernel, translated into closures over the state of a run; to be called as often as one likes."""

    def __init__(self, func: Any, blocks_together: int = BLOCKS_TOGETHER) -> None:
        super().__init__()
        self.func, self.blocks_together = func, blocks_together
        self.copies = ptx.AsyncCopies()
        self._body = self.statement(func.body)

    def __call__(self, *arrays: Array) -> None:
        self.values.clear()
        with np.errstate(all="ignore"):
            for number, (param, array) in enumerate(zip(self.func.params, arrays, strict=True)):
                self._bind_argument(param, array, f"argument {number}")
            self._body()

    def _bind_argument(self, param: Any, array: Array, name: str) -> None:
        dtype = numpy_dtype(str(param.dtype))
        if array.dtype != dtype or array.ndim != len(param.shape):
            raise SimtError(f"{name}: {array.dtype} {array.shape} for {dtype} of {len(param.shape)} axes")
        for dim, size in zip(param.shape, array.shape, strict=True):
            if type(dim).__name__ == "Var":
                self.values.setdefault(key_of(dim), np.int64(size))
            if int(self.expression(dim)()) != size:
                raise SimtError(f"{name}: {size} for {dim}")
        self.views[key_of(param)] = self._view(param, GlobalMemory(name, array))

    def _view(self, buffer: Any, memory: Memory | Registers) -> View:
        assert not list(buffer.strides), "compact buffers only"
        shape = [self.expression(size) for size in buffer.shape]
        return View(memory, numpy_dtype(str(buffer.dtype)), shape, self.expression(buffer.elem_offset))

    # Statements: each kind of node has a method of its name.

    def statement(self, node: Any) -> Thunk:
        """A closure that executes a statement."""
        return getattr(self, f"_{type(node).__name__}")(node)  # type: ignore[no-any-return]

    def _SeqStmt(self, node: Any) -> Thunk:
        parts = [self.statement(part) for part in node.seq]

        def execute() -> None:
            for part in parts:
                part()

        return execute

    def _AttrStmt(self, node: Any) -> Thunk:
        if node.attr_key != "thread_extent":
            return self.statement(node.body)
        extents: dict[str, tuple[int, Thunk]] = {}
        while type(node).__name__ == "AttrStmt" and node.attr_key == "thread_extent":
            extents[str(node.node.thread_tag)] = key_of(node.node.var), self.expression(node.value)
            node = node.body
        body = self.statement(node)
        return lambda: self._launch(extents, body)

    def _launch(self, extents: dict[str, tuple[int, Thunk]], body: Thunk) -> None:
        """All blocks, some at a time."""
        sizes = {tag: int(extent()) for tag, (_, extent) in extents.items()}
        tags = sorted(sizes)  # blockIdx.x, .y, .z, threadIdx.x, ...; x is the fastest
        grid = [tag for tag in tags if tag.startswith("blockIdx")]
        block = [tag for tag in tags if tag.startswith("threadIdx")]
        threads = int(np.prod([sizes[tag] for tag in block]))
        blocks = int(np.prod([sizes[tag] for tag in grid]))
        self._begin_launch()
        for first in range(0, blocks, self.blocks_together):
            count = min(self.blocks_together, blocks - first)
            self.lanes, self.shared, self.copies = Lanes(count, threads, first), [], ptx.AsyncCopies()
            for group, number in ((grid, self.lanes.block + first), (block, self.lanes.thread)):
                for tag in group:
                    self.values[extents[tag][0]] = (number % sizes[tag]).astype(np.int32)
                    number = number // sizes[tag]
            body()

    def _begin_launch(self) -> None:
        for view in self.views.values():
            if isinstance(view.memory, GlobalMemory):
                view.memory.launched()

    def _Bind(self, node: Any) -> Thunk:
        key, value = key_of(node.var), self.expression(node.value)

        def execute() -> None:
            result = value()
            self.values[key] = result.copy() if isinstance(result, np.ndarray) else result

        return execute

    def _Evaluate(self, node: Any) -> Thunk:
        return self.expression(node.value)

    def _AllocBuffer(self, node: Any) -> Thunk:
        buffer, key = node.buffer, key_of(node.buffer)
        size, dtype = int(np.prod([int(n) for n in buffer.shape])), numpy_dtype(str(buffer.dtype))
        view, is_shared = self._view(buffer, Registers(0, dtype, 1)), str(buffer.scope()).startswith("shared")

        def execute() -> None:
            bytes_of_all = size * dtype.itemsize
            memory = self.shared_memory(bytes_of_all) if is_shared else Registers(size, dtype, self.lanes.count)
            self.views[key] = replace(view, memory=memory)

        return execute

    def shared_memory(self, count: int) -> Any:
        """So many bytes of a block's shared memory."""
        self.shared.append(SharedMemory("shared memory", self.lanes, count))
        return self.shared[-1]

    def _DeclBuffer(self, node: Any) -> Thunk:
        key, source = key_of(node.buffer), key_of(node.data.args[0])
        view = self._view(node.buffer, Registers(0, np.dtype(np.uint8), 1))

        def execute() -> None:
            self.views[key] = replace(view, memory=self.views[source].memory)

        return execute

    def _IfThenElse(self, node: Any) -> Thunk:
        condition, then = self.expression(node.condition), self.statement(node.then_case)
        other = None if node.else_case is None else self.statement(node.else_case)

        def execute() -> None:
            holds = condition()
            with self.only(holds) as some:
                if some:
                    then()
            if other is not None:
                with self.only(np.logical_not(holds)) as some:
                    if some:
                        other()

        return execute

    def _AssertStmt(self, node: Any) -> Thunk:
        """What the host refuses before the launch."""
        condition, words = self.expression(node.condition), "".join(str(part.value) for part in node.message_parts)

        def execute() -> None:
            if not condition():
                raise SimtError(f"refused: {words}")

        return execute

    def _For(self, node: Any) -> Thunk:
        key, body = key_of(node.loop_var), self.statement(node.body)
        first, count = self.expression(node.min), self.expression(node.extent)

        def execute() -> None:
            begin, trips = first(), count()
            for turn in itertools.count():
                with self.only(turn < trips) as some:
                    if some:
                        self.values[key] = begin + type(begin)(turn) if np.isscalar(begin) else begin + turn
                        body()
                if not some:
                    return

        return execute

    def _While(self, node: Any) -> Thunk:
        condition, body = self.expression(node.condition), self.statement(node.body)

        def execute() -> None:
            before = self.lanes.active
            while True:
                with self.only(condition()) as some:
                    if some:
                        body()
                        remaining = self.lanes.active
                if not some:
                    break
                self.lanes.active = remaining
            self.lanes.active = before

        return execute

    def _BufferStore(self, node: Any) -> Thunk:
        key, value = key_of(node.buffer), self.expression(node.value)
        indices = [self.expression(index) for index in node.indices]

        def execute() -> None:
            view, result = self.views[key], value()
            self.store(view, [index() for index in indices], result)

        return execute

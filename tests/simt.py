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
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import simt_ptx
from simt_memory import Array, GlobalMemory, Lanes, Memory, SharedMemory, SimtError, numpy_dtype

Thunk = Callable[[], Any]  # an expression or statement, ready to be run for the lanes that are active
BLOCKS_TOGETHER = 16


def run(func: Any, *arrays: Array, blocks_together: int = BLOCKS_TOGETHER) -> None:
    """Calls a kernel whose arguments are buffers; outputs are written in place. Raises SimtError."""
    Machine(func, blocks_together)(*arrays)


@dataclass(frozen=True)
class Pointer:
    """An address of each lane."""

    memory: Memory
    offset: Array  # (N,) bytes

    def __add__(self, further: Any) -> Pointer:
        """As numbers that cvta makes of pointers: bytes further on."""
        return Pointer(self.memory, self.offset + np.asarray(further, np.int64))


@dataclass
class View:
    """A buffer: where its elements lie."""

    memory: Memory | Registers
    dtype: np.dtype[Any]
    shape: list[Thunk]
    first: Thunk  # element offset


class Registers:
    """Each lane's own array, (size, N). It begins as garbage: all bits set."""

    def __init__(self, size: int, dtype: np.dtype[Any], lanes: int) -> None:
        self.data = np.full(size * lanes * dtype.itemsize, 0xFF, np.uint8).view(dtype).reshape(size, lanes)


class Machine:
    """A kernel, translated into closures over the state of a run; to be called as often as one likes."""

    def __init__(self, func: Any, blocks_together: int = BLOCKS_TOGETHER) -> None:
        self.func, self.blocks_together = func, blocks_together
        self.lanes = Lanes(1, 1)
        self.values: dict[int, Any] = {}  # of variables, by the identity of their node
        self.views: dict[int, View] = {}
        self.shared: list[SharedMemory] = []
        self.copies = simt_ptx.AsyncCopies()
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
                self.values.setdefault(_key(dim), np.int64(size))
            if int(self.expression(dim)()) != size:
                raise SimtError(f"{name}: {size} for {dim}")
        self.views[_key(param)] = self._view(param, GlobalMemory(name, array))

    def _view(self, buffer: Any, memory: Memory | Registers) -> View:
        assert not list(buffer.strides), "compact buffers only"
        shape = [self.expression(size) for size in buffer.shape]
        return View(memory, numpy_dtype(str(buffer.dtype)), shape, self.expression(buffer.elem_offset))

    # Masks.

    @contextmanager
    def only(self, mask: Any) -> Iterator[bool]:
        """Runs what follows for the active lanes where `mask` holds, and says whether there are any."""
        before = self.lanes.active
        if not isinstance(mask, np.ndarray):
            yield bool(mask)
            return
        active = mask if before is None else mask & before
        self.lanes.active = None if active.all() else active
        yield bool(active.any())
        self.lanes.active = before

    def spread(self, value: Any) -> Array:
        """A value as an array (N,)."""
        return value if isinstance(value, np.ndarray) else np.full(self.lanes.count, value)

    def merged(self, old: Array, new: Any) -> Array:
        """`new` for the active lanes, `old` for the others."""
        if self.lanes.active is None:
            return np.broadcast_to(np.asarray(new, old.dtype), old.shape)
        mask = self.lanes.active if old.ndim == 1 else self.lanes.active[:, None]
        return np.where(mask, np.asarray(new, old.dtype), old)

    # Statements.

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
            extents[str(node.node.thread_tag)] = _key(node.node.var), self.expression(node.value)
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
            self.lanes, self.shared, self.copies = Lanes(count, threads, first), [], simt_ptx.AsyncCopies()
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
        key, value = _key(node.var), self.expression(node.value)

        def execute() -> None:
            found = value()
            self.values[key] = found.copy() if isinstance(found, np.ndarray) else found

        return execute

    def _Evaluate(self, node: Any) -> Thunk:
        return self.expression(node.value)

    def _AllocBuffer(self, node: Any) -> Thunk:
        buffer, key = node.buffer, _key(node.buffer)
        size, dtype = int(np.prod([int(n) for n in buffer.shape])), numpy_dtype(str(buffer.dtype))
        view, is_shared = self._view(buffer, Registers(0, dtype, 1)), str(buffer.scope()).startswith("shared")

        def execute() -> None:
            if is_shared:
                view.memory = SharedMemory("shared memory", self.lanes, size * dtype.itemsize)
                self.shared.append(view.memory)
            else:
                view.memory = Registers(size, dtype, self.lanes.count)
            self.views[key] = view

        return execute

    def _DeclBuffer(self, node: Any) -> Thunk:
        key, source = _key(node.buffer), _key(node.data.args[0])
        view = self._view(node.buffer, Registers(0, np.dtype(np.uint8), 1))

        def execute() -> None:
            view.memory = self.views[source].memory
            self.views[key] = view

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
        key, body = _key(node.loop_var), self.statement(node.body)
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
        key, value = _key(node.buffer), self.expression(node.value)
        indices = [self.expression(index) for index in node.indices]

        def execute() -> None:
            view, found = self.views[key], value()
            self.store(view, [index() for index in indices], found)

        return execute

    # Buffers.

    def load(self, view: View, indices: list[Any]) -> Any:
        if isinstance(view.memory, Registers):
            at = self._element(view, indices)
            if not isinstance(at, np.ndarray):
                return view.memory.data[at]
            column = np.arange(self.lanes.count)
            return view.memory.data[at, column if at.ndim == 1 else column[:, None]]
        offset, lanes = self._offset(view, indices)
        size = view.dtype.itemsize * lanes
        plainly = {"plainly": True} if isinstance(view.memory, GlobalMemory) else {}
        found = view.memory.read(self.lanes, offset, size, **plainly).reshape(-1).view(view.dtype)
        return found if lanes == 1 else found.reshape(-1, lanes)

    def store(self, view: View, indices: list[Any], value: Any) -> None:
        if isinstance(view.memory, Registers):
            at = self._element(view, indices)
            if not isinstance(at, np.ndarray):
                view.memory.data[at] = self.merged(view.memory.data[at], value)
                return
            column = np.arange(self.lanes.count)
            place = (at, column if at.ndim == 1 else column[:, None])
            view.memory.data[place] = self.merged(view.memory.data[place], value)
            return
        offset, lanes = self._offset(view, indices)
        shape = (self.lanes.count,) if lanes == 1 else (self.lanes.count, lanes)
        values = np.ascontiguousarray(np.broadcast_to(np.asarray(value, view.dtype), shape))
        view.memory.write(self.lanes, offset, values.reshape(self.lanes.count, -1).view(np.uint8))

    def address(self, view: View, indices: list[Any]) -> Pointer:
        assert isinstance(view.memory, Memory), "registers have no address"
        offset = self.spread(self._element(view, indices)).astype(np.int64) * view.dtype.itemsize
        return Pointer(view.memory, offset)

    def _element(self, view: View, indices: list[Any]) -> Any:
        """The number of an element in its memory."""
        at: Any = 0
        is_vector = any(np.ndim(index) == 2 for index in indices)
        for index, size in zip(indices, view.shape, strict=True):
            if not isinstance(index, np.ndarray):
                index = int(index)
            elif is_vector and index.ndim == 1:
                index = index[:, np.newaxis]
            at = at * int(size()) + index
        return at + int(view.first())

    def _offset(self, view: View, indices: list[Any]) -> tuple[Array, int]:
        """(each lane's byte offset, elements in a row from there). Raises SimtError where an index is beyond its
        axis."""
        for index, size in zip(indices, view.shape, strict=True):
            wrong = np.asarray((index < 0) | (index >= int(size())))
            if self.lanes.active is not None:
                wrong = wrong & (self.lanes.active if wrong.ndim < 2 else self.lanes.active[:, None])
            if wrong.any():
                bad = np.broadcast_to(index, wrong.shape)[wrong].flat[0]
                name = view.memory.name  # type: ignore[union-attr]
                raise SimtError(f"{name}: index {int(bad)} on an axis of {int(size())}")
        at = self._element(view, indices)
        if isinstance(at, np.ndarray) and at.ndim == 2:
            assert (np.diff(at, axis=1) == 1).all(), "vectors of neighbours only"
            return np.broadcast_to(at[:, 0], self.lanes.count).astype(np.int64) * view.dtype.itemsize, at.shape[1]
        return self.spread(at).astype(np.int64) * view.dtype.itemsize, 1

    # Expressions.

    def expression(self, node: Any) -> Thunk:
        """A closure that gives an expression's value for the active lanes."""
        name = type(node).__name__
        if name in _BINARY:
            a, b, apply = self.expression(node.a), self.expression(node.b), _BINARY[name]
            return lambda: apply(a(), b())
        return getattr(self, f"_{name}")(node)  # type: ignore[no-any-return]

    def _IntImm(self, node: Any) -> Thunk:
        value = numpy_dtype(_scalar(node)[0]).type(int(node.value))
        return lambda: value

    def _FloatImm(self, node: Any) -> Thunk:
        value = numpy_dtype(_scalar(node)[0]).type(float(node.value))
        return lambda: value

    def _StringImm(self, node: Any) -> Thunk:
        value = str(node.value)
        return lambda: value

    def _Var(self, node: Any) -> Thunk:
        key = _key(node)
        return lambda: self.values[key]

    def _Cast(self, node: Any) -> Thunk:
        dtype, value = numpy_dtype(_scalar(node)[0]), self.expression(node.value)
        return lambda: value().astype(dtype)

    def _Not(self, node: Any) -> Thunk:
        value = self.expression(node.a)
        return lambda: np.logical_not(value())

    def _And(self, node: Any) -> Thunk:
        return self._lazily(node, lambda a: a, np.logical_and)

    def _Or(self, node: Any) -> Thunk:
        return self._lazily(node, np.logical_not, np.logical_or)

    def _lazily(self, node: Any, needs: Callable[[Any], Any], join: Callable[[Any, Any], Any]) -> Thunk:
        """The second operand is evaluated only where it matters, as in C."""
        a, b = self.expression(node.a), self.expression(node.b)

        def evaluate() -> Any:
            left = a()
            with self.only(needs(left)) as some:
                right = b() if some else np.False_
            return join(left, right)

        return evaluate

    def _Select(self, node: Any) -> Thunk:
        parts = [self.expression(part) for part in (node.condition, node.true_value, node.false_value)]

        def evaluate() -> Any:
            condition, yes, no = (part() for part in parts)
            return np.where(condition, yes, no)[()]

        return evaluate

    def _Ramp(self, node: Any) -> Thunk:
        base, stride, lanes = self.expression(node.base), self.expression(node.stride), np.arange(int(node.lanes))
        return lambda: np.reshape(base(), (-1, 1)) + stride() * lanes

    def _Broadcast(self, node: Any) -> Thunk:
        value, lanes = self.expression(node.value), int(node.lanes)
        return lambda: np.repeat(np.reshape(value(), (-1, 1)), lanes, axis=1)

    def _Shuffle(self, node: Any) -> Thunk:
        vectors = [self.expression(vector) for vector in node.vectors]
        picked = [int(index) for index in node.indices]

        def evaluate() -> Any:
            pairs = zip(vectors, node.vectors, strict=True)
            found = [np.reshape(vector(), (-1, _scalar(part)[1])) for vector, part in pairs]
            rows = max(part.shape[0] for part in found)
            joined = np.concatenate([np.broadcast_to(part, (rows, part.shape[1])) for part in found], axis=1)
            return joined[:, picked[0]] if len(picked) == 1 else joined[:, picked]

        return evaluate

    def _TensorLoad(self, node: Any) -> Thunk:
        key, indices = _key(node.source), [self.expression(index) for index in node.indices]
        return lambda: self.load(self.views[key], [index() for index in indices])

    def _Call(self, node: Any) -> Thunk:
        name = str(node.op.name).removeprefix("tirx.").removeprefix("prim.")
        if name == "address_of":
            key, indices = _key(node.args[0].source), [self.expression(index) for index in node.args[0].indices]
            return lambda: self.address(self.views[key], [index() for index in indices])
        if name == "if_then_else":
            return self._lazy_choice(node)
        if name in simt_ptx.INSTRUCTIONS:
            return simt_ptx.INSTRUCTIONS[name](self, node)
        arguments = [self.expression(argument) for argument in node.args]
        if name == "reinterpret":
            dtype = numpy_dtype(_scalar(node)[0])
            return lambda: np.asarray(arguments[-1]()).copy().view(dtype)[()]
        if name == "call_pure_extern":  # a function of CUDA's: the name, then its operands
            name, arguments = arguments[0](), arguments[1:]
        apply = _FUNCTIONS[name]
        return lambda: apply(*(argument() for argument in arguments))

    def _lazy_choice(self, node: Any) -> Thunk:
        condition, yes, no = (self.expression(part) for part in node.args)
        dtype = numpy_dtype(_scalar(node)[0])

        def evaluate() -> Any:
            holds, nothing = condition(), dtype.type(0)
            with self.only(holds) as some:
                first = yes() if some else nothing
            with self.only(np.logical_not(holds)) as some:
                second = no() if some else nothing
            return np.where(holds, first, second)[()]

        return evaluate


def _key(node: Any) -> int:
    return int(node.__chandle__())


def _scalar(node: Any) -> tuple[str, int]:
    """(element type, lanes) of an expression: float32x4 is of four float32."""
    element, _, lanes = str(node.ty.dtype).partition("x")
    return element, int(lanes or 1)


def _truncated_quotient(a: Any, b: Any) -> Any:
    if np.asarray(a).dtype.kind == "f" or np.asarray(a).dtype.name == "bfloat16":
        return a / b
    quotient = np.floor_divide(a, b)
    return quotient + np.asarray((quotient < 0) & (quotient * b != a), np.asarray(quotient).dtype)


def _truncated_rest(a: Any, b: Any) -> Any:
    return a - _truncated_quotient(a, b) * b


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _truncated_quotient,
    "Mod": _truncated_rest,
    "FloorDiv": np.floor_divide,
    "FloorMod": np.mod,
    "Min": np.fmin,
    "Max": np.fmax,
    "EQ": operator.eq,
    "NE": operator.ne,
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseXor": np.bitwise_xor,
    "LShift": np.left_shift,
    "RShift": np.right_shift,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log2": np.log2,
    "log": np.log,
    "logf": np.log,
    "tanh": np.tanh,
    "fabs": np.abs,
    "sqrt": np.sqrt,
    "isnan": np.isnan,
    "fma": lambda a, b, c: a * b + c,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_not": np.bitwise_not,
    "shift_left": np.left_shift,
    "shift_right": np.right_shift,
}

"""The threads of some blocks in lockstep: which of them go on, what they hold, and their loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from support.simt.memory import Array, GlobalMemory, Lanes, Memory, SharedMemory, SimtError

Thunk = Callable[[], Any]  # an expression or statement, ready to be run for the lanes that are active


@dataclass(frozen=True)
class Pointer:
    """An address of each lane."""

    memory: Memory
    offset: Array  # (N,) bytes

    def __add__(self, further: Any) -> Pointer:
        """The pointer that lies so many bytes further on, as of the numbers that cvta makes of pointers."""
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


class Threads:
    """The state of a run. A value is a scalar, the same for all, or an array (N,) over the N threads; of a vector type
    (N, lanes)."""

    def __init__(self) -> None:
        self.lanes = Lanes(1, 1)
        self.values: dict[int, Any] = {}  # of variables, by the identity of their node
        self.views: dict[int, View] = {}
        self.shared: list[SharedMemory] = []

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
        values = view.memory.read(self.lanes, offset, size, **plainly).reshape(-1).view(view.dtype)
        return values if lanes == 1 else values.reshape(-1, lanes)

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


def key_of(node: Any) -> int:
    """The identity of a node of TIR."""
    return int(node.__chandle__())

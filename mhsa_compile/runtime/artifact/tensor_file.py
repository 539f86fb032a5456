"""The tensors of a safetensors file, each read straight into memory of its own.

The package safetensors takes a whole file as bytes, of which it makes copies, or maps the file by its name, whose bytes
may change behind the map. Here a file is read once, from one end to the other, through whoever hashes it on the way,
and nothing of it lies in memory twice. What its header says is held against the file's size before any memory is asked
for.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Annotated, Protocol

import ml_dtypes
import msgspec
import numpy as np

from mhsa_compile.files import system
from mhsa_compile.files.input_files import require_unique_keys

_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "BOOL": np.bool_,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8,
}  # fmt: skip
_LENGTH = 8  # bytes in front, which hold the length of the header
_LONGEST_HEADER = 100_000_000  # that safetensors reads
_BLOCK = 2**20  # bytes that are read at once
_OWN_PAGES = 2**16
"""Bytes from which on a tensor gets pages of its own: they are the system's again as soon as the tensor is gone, where
a heap would keep them."""
_METADATA = "__metadata__"
_Size = Annotated[int, msgspec.Meta(ge=0)]


class TensorSource(Protocol):
    """Bytes that are read once, in their order."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fills the buffer, or its beginning; 0 at the end."""
        ...


class _TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[tuple[_Size, ...], msgspec.Meta(max_length=32)]  # of NumPy's arrays
    data_offsets: tuple[_Size, _Size]


def read_tensors(
    source: TensorSource, size: int, needs: Callable[[str], bool] = lambda name: True
) -> dict[str, np.ndarray]:
    """The tensors by name, where `needs` says yes to one; `source` is read to its end, which is `size` bytes away.

    Raises ValueError for what is no such file, and OSError.
    """
    tensors = {}
    for name, entry in _entries(source, size):
        memory = _memory(_bytes(entry)) if needs(name) else None
        if memory is None:
            skip(source, _bytes(entry))
            continue
        _fill(source, memory)
        if (
            entry.dtype == "BOOL" and memory.size and memory.max() > 1
        ):  # compiled code may look at one bit of such a byte
            raise ValueError(f"{name!r} has {memory.max()} in a byte, where 0 or 1 are truths")
        tensors[name] = memory.view(_DTYPES[entry.dtype]).reshape(entry.shape)
    return tensors


def skip(source: TensorSource, size: int) -> None:
    """Reads so many bytes, and keeps none. Raises ValueError where there are fewer."""
    block = np.empty(min(size, _BLOCK), np.uint8)
    for begin in range(0, size, _BLOCK):
        _fill(source, block[: size - begin])


def _entries(source: TensorSource, size: int) -> Iterator[tuple[str, _TensorEntry]]:
    """The entries in the order in which their tensors lie behind the header: one behind the other, to the end."""
    if size < _LENGTH:
        raise ValueError(f"a length of {_LENGTH} bytes in front is missing")
    length = int.from_bytes(_read(source, _LENGTH), "little")
    if length > min(size - _LENGTH, _LONGEST_HEADER):
        raise ValueError(f"a header of {length} bytes, of {size - _LENGTH} that there are")
    header = _read(source, length)
    require_unique_keys(header)
    raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
    msgspec.json.decode(raw.pop(_METADATA, b"{}"), type=dict[str, str])
    entries = {name: msgspec.json.decode(entry, type=_TensorEntry) for name, entry in raw.items()}
    end = 0
    in_order = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    for name, entry in in_order:
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{name!r} is of {entry.dtype!r}, which no weight is")
        first, last = entry.data_offsets
        if first != end or last - first != _bytes(entry):
            raise ValueError(
                f"{name!r} lies at {first} to {last}, where {_bytes(entry)} bytes from {end} on are its own"
            )
        end = last
    if end != size - _LENGTH - length:
        raise ValueError(f"tensors of {end} bytes, in a file that has {size - _LENGTH - length} for them")
    yield from in_order


def _bytes(entry: _TensorEntry) -> int:
    return math.prod(entry.shape) * int(np.dtype(_DTYPES[entry.dtype]).itemsize)


def _read(source: TensorSource, size: int) -> bytes:
    data = np.empty(size, np.uint8)
    _fill(source, data)
    return data.tobytes()


def _fill(source: TensorSource, memory: np.ndarray) -> None:
    view = memory.data
    while view:
        if not (count := source.readinto(view[:_BLOCK])):
            raise ValueError("it ends before its last tensor does")
        view = view[count:]


def _memory(size: int) -> np.ndarray:
    """Bytes that begin with a cache line."""
    if size >= _OWN_PAGES:
        try:
            # Windows has its own arguments, and no others are needed there.
            private = {} if system.IS_WINDOWS else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
            pages = mmap.mmap(-1, size, **private)
        except OSError as error:
            raise MemoryError(f"Unable to allocate {size} bytes") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                pages.madvise(mmap.MADV_HUGEPAGE)  # of 2 MB: a fault for each of 4 KB is half of the time to read them
        return np.frombuffer(pages, np.uint8)
    memory = np.empty(size + 64, np.uint8)
    first = -memory.__array_interface__["data"][0] % 64
    return memory[first : first + size]

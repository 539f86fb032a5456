"""A few instructions that only machine code can ask with, such as CPUID, called from Python without a compiler.

No page is ever to be written and run at once, which hardened systems forbid: the code is mapped from a file without a
name, as that of artifacts is, and is read-only there. Where no such file may be run, a page of memory is written first
and made executable then.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from mhsa_compile.files import system
from mhsa_compile.files.opened_once import mappable

_FAILED = ctypes.c_void_p(-1).value
_POINTER_BITS = 64
_COMMIT_AND_RESERVE, _RELEASE, _READ_WRITE, _EXECUTE_READ = 0x3000, 0x8000, 0x04, 0x20  # of Windows


@contextmanager
def callable_code(code: bytes, result: Any, *arguments: Any) -> Iterator[Callable[..., Any] | None]:
    """The function of these instructions, of the types of ctypes that are stated; it is gone when the context ends.
    None where this process may not run code of its own making, or is one of 32 bits."""
    if ctypes.sizeof(ctypes.c_void_p) * 8 != _POINTER_BITS:
        yield None
        return
    if system.IS_WINDOWS:
        with _page_of_windows(code) as address:
            yield None if address is None else ctypes.CFUNCTYPE(result, *arguments)(address)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    address = _mapped_file(libc, code) or _sealed_page(libc, code)
    if address is None:
        yield None
        return
    try:
        yield ctypes.CFUNCTYPE(result, *arguments)(address)
    finally:
        libc.munmap(address, mmap.PAGESIZE)


@contextmanager
def _page_of_windows(code: bytes) -> Iterator[int | None]:
    """A page that can be written no more, as `_sealed_page`."""
    kernel: Any = ctypes.WinDLL("kernel32")  # type: ignore[attr-defined]
    pointer, size, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32
    kernel.VirtualAlloc.restype, kernel.VirtualAlloc.argtypes = pointer, (pointer, size, word, word)
    kernel.VirtualProtect.argtypes = (pointer, size, word, pointer)
    kernel.VirtualFree.argtypes = (pointer, size, word)
    address = kernel.VirtualAlloc(None, mmap.PAGESIZE, _COMMIT_AND_RESERVE, _READ_WRITE)
    if address is None:
        yield None
        return
    try:
        ctypes.memmove(address, code, len(code))
        before = word()
        sealed = kernel.VirtualProtect(address, mmap.PAGESIZE, _EXECUTE_READ, ctypes.byref(before))
        yield int(address) if sealed else None
    finally:
        kernel.VirtualFree(address, 0, _RELEASE)


def _mapped_file(libc: Any, code: bytes) -> int | None:
    handle = -1
    with suppress(OSError):
        handle = mappable(code, "instructions")
    if handle < 0:
        return None
    try:
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, handle, 0)
    finally:
        os.close(handle)
    return None if address == _FAILED else int(address)


def _sealed_page(libc: Any, code: bytes) -> int | None:
    """A page that can be written no more."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if address == _FAILED:
        return None
    ctypes.memmove(address, code, len(code))
    if libc.mprotect(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC) == 0:
        return int(address)
    libc.munmap(address, mmap.PAGESIZE)
    return None

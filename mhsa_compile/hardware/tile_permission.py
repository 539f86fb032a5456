"""The permission to use matrix tiles (AMX), which Linux grants to a process that asks.

    if reason := tile_permission.refusal():
        ...  # the first tile instruction would end this process

The state of tiles is 8 KiB, so Linux saves it for those alone that want it (Documentation/arch/x86/xstate.rst). The
permission is the process's: threads that are there and that come have it, children by fork too, what exec starts has to
ask anew. It is never taken back. The standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys

TILES = "amx_tile"
"""The feature without which no code has tiles, as /proc/cpuinfo names it."""
WITHOUT_TILES = "x86-64-v4"
"""The target to compile for where tiles are refused."""
_ARCH_PRCTL = 158  # the system call's number on x86-64
_GET_PERMITTED, _REQUEST = 0x1022, 0x1023  # ARCH_GET_XCOMP_PERM, ARCH_REQ_XCOMP_PERM
_TILE_DATA = 18  # its bit in XCR0
_SANDBOX = "a sandbox keeps this process from asking (arch_prctl): seccomp must allow it"
_REASONS = {
    errno.EINVAL: "this kernel grants no tiles: Linux does from 5.16 on",
    errno.EOPNOTSUPP: "this kernel saves no tiles on this CPU",
    errno.ENOSPC: "a thread's alternate signal stack (sigaltstack) is too small for a frame with tiles: make it "
    "larger, or ask before that thread begins",
    errno.EPERM: _SANDBOX,
    errno.ENOSYS: _SANDBOX,
}
"""By what the request fails with; those of `runtime/standalone/program/tile_permission.h` are the same."""


def refusal() -> str:
    """Why this process may not use tiles; empty where it may. What is held already is not requested again."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or ctypes.sizeof(ctypes.c_void_p) != 8:
        here = f"{sys.platform} on {platform.machine() or 'an unknown CPU'}"
        return f"only Linux grants tiles, to processes of 64 bits on x86-64, and this is {here}"
    permitted = ctypes.c_uint64()
    if _arch_prctl(_GET_PERMITTED, ctypes.byref(permitted)) == 0 and permitted.value >> _TILE_DATA & 1:
        return ""
    if (number := _arch_prctl(_REQUEST, ctypes.c_ulong(_TILE_DATA))) == 0:
        return ""
    return _REASONS.get(number) or f"this kernel refuses them: {os.strerror(number)}"


def _arch_prctl(option: int, argument: object) -> int:
    """0, or the number of the error."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    code: int = libc.syscall(ctypes.c_long(_ARCH_PRCTL), ctypes.c_long(option), argument)
    return 0 if code == 0 else ctypes.get_errno()

"""A command whose process, and all that come of it, are refused matrix tiles, by a filter of seccomp.

    python tests/support/refused_tiles.py ENOSYS COMMAND ...

Exit code 77 where the system lets nobody filter.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

_NO_FILTER = 77
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2  # of prctl
_LOAD, _IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # of BPF: a word, at equality one instruction on, a verdict
_ARCHITECTURE, _NUMBER, _FIRST_ARGUMENT = 4, 0, 16  # where seccomp_data has them
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_X86_64, _ARCH_PRCTL, _REQUEST = 0xC000003E, 158, 0x1023


def command(error: str, *words: object) -> list[str]:
    """The words of a command under the filter, by which the request fails with an error such as ENOSYS."""
    return [sys.executable, str(Path(__file__)), error, *map(str, words)]


def require() -> None:
    """Skips a test where the system lets nobody filter."""
    if subprocess.run(command("EPERM", "true"), check=False).returncode == _NO_FILTER:
        import pytest

        pytest.skip("no filters of seccomp")


def _refuse(number: int) -> bool:
    """Whether the request fails with this error from now on."""
    verdicts = [(_RETURN, 0, 0, _FAIL | number), (_RETURN, 0, 0, _ALLOW)]
    steps = ((_ARCHITECTURE, _X86_64), (_NUMBER, _ARCH_PRCTL), (_FIRST_ARGUMENT, _REQUEST))
    program = []
    for i, (place, value) in enumerate(steps):
        to_allow = 2 * (len(steps) - 1 - i) + 1
        program += [(_LOAD, 0, 0, place), (_IF_EQUAL, 0, to_allow, value)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in (*program, *verdicts)))
    heading = struct.pack("@HP", len(program) + len(verdicts), ctypes.addressof(code))
    prctl = ctypes.CDLL(None).prctl
    return prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and prctl(_SET_SECCOMP, _FILTER, heading) == 0


if __name__ == "__main__":
    if not _refuse(getattr(errno, sys.argv[1])):
        sys.exit(_NO_FILTER)
    os.execvp(sys.argv[2], sys.argv[2:])

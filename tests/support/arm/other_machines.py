"""32-bit ARM and RISC-V without such machines: programs under QEMU with Debian's C library, and nothing else. There are
no packages of TVM for them, and so no Python.

    python -m support.arm.other_machines riscv64 ./attention --dim L=7
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from support.arm import machine
from support.arm.machine import Missing

RELEASE = "trixie"
Found = TypeVar("Found")
QEMU = {"armv7": "arm", "riscv64": "riscv64", "aarch64": "aarch64"}
DEBIAN = {"armv7": "armhf", "riscv64": "riscv64"}
"""What others call an architecture."""


def require(architecture: str) -> Path:
    """The root of that machine's files; the test is skipped where there is none, and fails where there has to be."""
    emulator(architecture)
    return _or_skip(lambda: _library(DEBIAN[architecture]))


def emulator(architecture: str) -> str:
    """QEMU's program for an architecture; skips and fails as `require`."""
    names = [f"qemu-{QEMU[architecture]}{ending}" for ending in ("-static", "")]
    return _or_skip(lambda: _program(names))


def _program(names: list[str]) -> str:
    for path in map(shutil.which, names):
        if path is not None:
            return path
    raise Missing(f"no {names[-1]} on this machine: apt-get install qemu-user-static")


def _or_skip(find: Callable[[], Found]) -> Found:
    try:
        return find()
    except Missing as error:
        if os.environ.get(machine.REQUIRED) == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))


def _library(debian: str) -> Path:
    """A folder with Debian's C library, from the cache if it was fetched before. Raises Missing."""
    root = machine.cache() / f"{debian}-{RELEASE}"
    with root.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not root.is_dir():
            staged = Path(tempfile.mkdtemp(prefix=f".{debian}-", dir=root.parent))
            try:
                machine.unpack_debian(staged, RELEASE, debian, ("libc6",))
                (staged / "lib").symlink_to("usr/lib")  # as its package base-files has it
                staged.rename(root)
            finally:
                shutil.rmtree(staged, ignore_errors=True)
    return root


def command(architecture: str, *words: str | Path) -> list[str]:
    """A program of that machine, with arguments, here."""
    return [emulator(architecture), "-L", str(require(architecture)), *map(str, words)]


if __name__ == "__main__":
    sys.exit(subprocess.run(command(*sys.argv[1:])).returncode)

"""Builds `emulator.c`, and installs its handler of SIGILL in this process."""

from __future__ import annotations

import ctypes
from pathlib import Path
from tempfile import TemporaryDirectory

from mhsa_compile.hardware import zig

SOURCE = Path(__file__).with_name("emulator.c")


def install() -> ctypes.CDLL:
    """From here on tile instructions that fault are emulated, in all threads; `tiles_emulated` counts them. Raises
    OSError where no handler can be set."""
    with TemporaryDirectory() as folder:
        library = Path(folder, "emulator.so")
        # Every sum is rounded as written, and a fused multiply-add is an instruction.
        words = ["-O2", "-mcpu=x86_64_v3", "-ffp-contract=off", "-fno-sanitize=undefined", "-shared", "-fPIC"]
        zig.run("cc", "x86_64-linux-gnu", [*words, "-o", library, SOURCE, "-lm"], "an emulator of tiles")
        handler = ctypes.CDLL(str(library))
    handler.tiles_emulated.restype = ctypes.c_long
    if handler.emulate_tiles() != 0:
        raise OSError("no handler of SIGILL")
    return handler

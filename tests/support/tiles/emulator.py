"""Builds `emulator.c`, and installs its handler of SIGILL in this process.

With MHSA_EMULATED_TILES=1 a whole run of pytest has tiles that are emulated, whatever CPU it is on: `conftest.py`
begins with `refuse`, and `support.this_cpu` counts them among what is here.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from mhsa_compile.hardware import tile_permission, zig

SOURCE = Path(__file__).with_name("emulator.c")


def refuse() -> None:
    """Has nobody in this process get real tiles: the permission is never taken back, and where it is held nothing
    faults. To be called before anything asks for it, which oneDNN does too."""
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"
    tile_permission.refusal = lambda: "tiles are emulated"


def held() -> bool:
    """Whether the process has the permission all the same."""
    permitted = ctypes.c_uint64()
    refused = tile_permission._arch_prctl(tile_permission._GET_PERMITTED, ctypes.byref(permitted))
    return not refused and bool(permitted.value >> tile_permission._TILE_DATA & 1)


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

"""libcuda.so.1 and libcudart.so.13 of driver.c and runtime.c, built by Zig, and what they note."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from mhsa_compile.hardware import host, zig

HERE = Path(__file__).parent
FOLDER = "PRETENDED_GPU"
"""The environment variable that names the folder of the two libraries."""
_VERSIONS = "libcudart.so.13 { global: cuda*; local: *; };\n"  # TVM's runtime asks for symbols of this version


def build(folder: Path) -> None:
    """Writes both libraries."""
    triple = f"{host.architecture()}-linux-gnu"
    versions, driver = folder / "versions", folder / "libcuda.so.1"
    versions.write_text(_VERSIONS)
    words = ["-shared", "-fPIC", "-O1"]
    zig.run("cc", triple, [*words, f"-Wl,-soname,{driver.name}", "-o", str(driver), str(HERE / "driver.c")], "a driver")
    runtime = [*words, "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={versions}"]
    runtime += ["-o", str(folder / "libcudart.so.13"), str(HERE / "runtime.c"), str(driver)]
    zig.run("cc", triple, runtime, "a runtime")


class Pretended:
    """Both libraries, loaded into this process: whoever asks for them by name gets these. It cannot be undone."""

    def __init__(self, folder: Path) -> None:
        self._driver: Any = ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(folder / "libcudart.so.13"), ctypes.RTLD_GLOBAL)
        self._driver.pretended_notes.restype = ctypes.c_char_p

    def take(self) -> list[str]:
        """What was noted since the last time, a line each."""
        lines = self._driver.pretended_notes().decode().splitlines()
        self._driver.pretended_clear()
        return lines

    def compute(self, kernels: Path) -> None:
        """Has this library of `emulator` compute launches from now on."""
        assert self._driver.pretended_kernels(str(kernels).encode()), kernels

    def fail(self, kernel: str, code: int) -> None:
        """Has launches of this kernel ("*" of any) answered with this error of CUDA's from now on; 0 is none."""
        self._driver.pretended_fail(kernel.encode(), code)

"""CUDA C++ -> machine code for one architecture: by nvcc where it is on the path, else by NVRTC, NVIDIA's package.

No GPU and no driver is needed. Arithmetic is IEEE's: kernels ask for approximations by name.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from mhsa_compile.errors import BuildError, InstallationError
from mhsa_compile.files import atomic_write
from mhsa_compile.hardware import environment
from mhsa_compile.hardware.profile import CudaProfile, TargetProfile

_SOURCE, _CUBIN = "kernels.cu", "kernels.cubin"
_ELF_ARCHITECTURE = 190  # EM_CUDA
_PACKAGES = ("nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-cuda-crt")
_INFINITY = "#define inff __int_as_float(0x7f800000)\n"
"""The definition of `inff`, which TVM 0.27 writes for the infinity of a bfloat16, and does not define."""
_TENSOR_MAP = "struct alignas(64) CUtensorMap { unsigned long long opaque[16]; };\n"
"""The type CUtensorMap as in cuda.h, which NVRTC cannot read, and TVM 0.27 includes for nvcc alone."""
_NVRTC, _BUILTINS = "libnvrtc.so.13", "libnvrtc-builtins.so.13.*"


def compiled(source: str, arch: str) -> bytes:
    """The ELF file of all kernels. The same bytes for the same source and compiler.

    Raises BuildError with the compiler's words, and InstallationError where there is none.
    """
    if re.search(r"\binff\b", source):
        source = _INFINITY + source
    nvcc = shutil.which("nvcc")
    return _by_nvcc(nvcc, source, arch) if nvcc else _Nvrtc().compiled(source, arch)


def compiler() -> tuple[str, str]:
    """What `compiled` uses, "nvcc" or "nvrtc", and of which CUDA, such as "13.0". Raises InstallationError and
    BuildError."""
    if (nvcc := shutil.which("nvcc")) is None:
        return "nvrtc", _Nvrtc().version
    text = _run([nvcc, "--version"], "its version").stdout
    if (match := re.search(r"release (\d+\.\d+)", text)) is None:
        raise BuildError("nvcc", "its version", text.strip()[-200:])
    return "nvcc", match[1]


def versions(profile: TargetProfile) -> dict[str, str]:
    """The version of what compiles a target's kernels, by its name; nothing for a CPU. Raises as `compiler`."""
    return dict([compiler()]) if isinstance(profile, CudaProfile) else {}


def architecture(cubin: bytes) -> str:
    """What a cubin was compiled for, by the note that ptxas leaves in it: "sm_90a", whose header is that of sm_90.

    Raises BuildError.
    """
    if cubin[:4] != b"\x7fELF" or int.from_bytes(cubin[18:20], "little") != _ELF_ARCHITECTURE:
        raise BuildError("cubin", "an ELF file of NVIDIA's", f"{len(cubin)} bytes of something else")
    if (match := re.search(rb"-arch (sm_\d+[a-z]?)", cubin)) is None:
        raise BuildError("cubin", "ptxas's note of its options", "none")
    return match[1].decode()


def _by_nvcc(nvcc: str, source: str, arch: str) -> bytes:
    with atomic_write.temporary() as folder:
        (folder / _SOURCE).write_text(source, encoding="utf-8")
        # Names without a folder: whatever of them gets into the file is the same every time.
        words = [nvcc, "--cubin", f"-arch={arch}", "-O3", "-std=c++17", "-o", _CUBIN, _SOURCE]
        _run(words, f"kernels for {arch}", str(folder))
        return (folder / _CUBIN).read_bytes()


def _run(words: list[str], what: str, folder: str | None = None) -> subprocess.CompletedProcess[str]:
    process = subprocess.run(words, capture_output=True, text=True, cwd=folder)
    if process.returncode:
        raise BuildError("nvcc", what, (process.stderr or process.stdout).strip()[-2000:] or "no message")
    return process


class _Nvrtc:
    """The library, called through its C interface (nvrtc.h)."""

    def __init__(self) -> None:
        self.root = _package_folder()
        self.library = _library(self.root / "lib" / _NVRTC)

    @property
    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "its version")
        return f"{major.value}.{minor.value}"

    def compiled(self, source: str, arch: str) -> bytes:
        program, what = ctypes.c_void_p(), f"kernels for {arch}"
        source = _TENSOR_MAP + source
        code = self.library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), _SOURCE.encode(), 0, None, None)
        self._check(code, what)
        try:
            include = self.root / "include"
            # Without warnings: of a long log the errors are to be seen.
            words = [f"--gpu-architecture={arch}", "--std=c++17", "-default-device", "--device-int128", "-w"]
            words += [f"-I{include}", f"-I{include / 'cccl'}"]
            options = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
            if self.library.nvrtcCompileProgram(program, len(words), options):
                log = self._text(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
                raise BuildError("NVRTC", what, log[-2000:] or "no message")
            return self._text(program, "CUBIN")
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"nvrtcGet{name}Size")(program, ctypes.byref(size)), name)
        text = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, f"nvrtcGet{name}")(program, text), name)
        return text.raw

    def _check(self, result: int, what: str) -> None:
        if result:
            words: Callable[[int], bytes] = self.library.nvrtcGetErrorString
            raise BuildError("NVRTC", what, words(result).decode())


@cache
def _library(path: Path) -> Any:
    for builtins in path.parent.glob(_BUILTINS):
        ctypes.CDLL(str(builtins))  # NVRTC asks for it by this name alone, and some do not look beside themselves
    library = ctypes.CDLL(str(path))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def _package_folder() -> Path:
    """The folder in which NVIDIA's packages put their files. Raises InstallationError."""
    for folder in environment.nvidia_folders():
        if (folder / "lib" / _NVRTC).is_file() and (folder / "include" / "cuda_runtime.h").is_file():
            return folder
    raise InstallationError(
        "CUDA compiler",
        f"nvcc on the path, or NVRTC 13 ({', '.join(_PACKAGES)})",
        "neither",
        "Run: pip install 'mhsa-compile[cuda]'",
    )

"""NVIDIA's GPUs of this machine, and whether an artifact runs on one, before anything is launched.

The driver's own library answers (libcuda.so.1, by ctypes): nothing else of CUDA's is needed to say what is wrong.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from mhsa_compile.errors import ArtifactError, DeviceError, InputError, InstallationError
from mhsa_compile.hardware.profile import CudaProfile
from mhsa_compile.runtime.artifact.manifest import Manifest

FAMILY = "cuda"
OLDEST_CUDA = 13
"""What TVM's runtime is linked against. A driver runs what any CUDA of its own number or an older one has compiled."""
_DRIVER = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_MULTIPROCESSORS, _MAJOR, _MINOR, _SHARED_BYTES = 16, 75, 76, 97  # CUdevice_attribute; the last is "opt-in"
_DEFAULT_STREAMS = (0, 1, 2)  # legacy, legacy by name, of each thread: on whichever device is current
_NEXT = "Compile it for this GPU: `mhsa targets` lists the targets."


@dataclass(frozen=True)
class Gpu:
    """One GPU as this process numbers it (CUDA_VISIBLE_DEVICES)."""

    index: int
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    shared_kib_per_block: int

    def __str__(self) -> str:
        return f"cuda:{self.index}"


class Driver(Protocol):
    """What is asked of the driver."""

    cuda: tuple[int, int]  # the latest CUDA that it runs
    count: int  # of GPUs

    def gpu(self, index: int) -> Gpu: ...

    def free_bytes(self, index: int) -> int: ...

    def device_of(self, stream: int) -> int: ...


@functools.cache
def driver() -> Driver:
    """NVIDIA's driver. Raises InstallationError where there is none, or none that works."""
    try:
        library = ctypes.CDLL(_DRIVER)
    except OSError as error:
        next_step = "Install NVIDIA's driver; in a container, start it with --gpus all."
        raise InstallationError("NVIDIA driver", _DRIVER, str(error), next_step) from None
    return _Library(library)


def select_gpu(manifest: Manifest, device: str | None) -> Gpu:
    """The GPU on which to load an artifact: `device` is "cuda:1" or the like, "cuda" or None the first.

    Raises InstallationError (no driver, an older one), DeviceError (no GPU, too little memory), InputError (none of
    that number) and ArtifactError (compiled for another).
    """
    index = _index(device)
    nvidia = driver()
    _check_cuda(manifest, nvidia)
    if not nvidia.count:
        raise DeviceError("device", "an NVIDIA GPU", "none that this process may use", "Look at CUDA_VISIBLE_DEVICES.")
    if index >= nvidia.count:
        last = f" to cuda:{nvidia.count - 1}" if nvidia.count > 1 else ""
        raise InputError("device", f"cuda:0{last}", f"cuda:{index}")
    gpu = nvidia.gpu(index)
    _check_target(manifest, gpu)
    least, free = _weight_bytes(manifest), nvidia.free_bytes(index)
    if free < least:
        raise DeviceError(
            f"device {gpu}", f"{least / 2**20:,.0f} MiB free for the weights", f"{free / 2**20:,.0f} MiB",
            "Free some, or load it on another GPU: device=\"cuda:1\".",
        )  # fmt: skip
    return gpu


def first() -> Gpu | None:
    """The first GPU that this process may use, or None where there is none, or no driver that works."""
    try:
        nvidia = driver()
        return nvidia.gpu(0) if nvidia.count else None
    except (InstallationError, DeviceError):
        return None


def runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code for `arch` runs on a GPU: that for 8.0 on 8.6, not the other way round, nor on 9.0; with an "a"
    (sm_90a) it runs on what it says alone."""
    major, minor, exact = _versions(arch)
    return capability == (major, minor) if exact else capability[0] == major and capability[1] >= minor


def capabilities(arch: str) -> str:
    """The compute capabilities on which code for `arch` runs, in words: "8.0 to 8.9"."""
    major, minor, exact = _versions(arch)
    return f"{major}.{minor}" + ("" if exact or minor == 9 else f" to {major}.9")


def _versions(arch: str) -> tuple[int, int, bool]:
    digits = arch.removeprefix("sm_").removesuffix("a")
    return int(digits[:-1]), int(digits[-1]), arch.endswith("a")


def handle_of(stream: Any, gpu: Gpu) -> int:
    """The handle of a stream: PyTorch's, an object with __cuda_stream__, or a number. Raises InputError."""
    if isinstance(stream, int) and not isinstance(stream, bool):
        handle = stream
    elif hasattr(stream, "__cuda_stream__"):
        handle = int(stream.__cuda_stream__()[1])
    elif hasattr(stream, "cuda_stream"):  # PyTorch's
        handle = int(stream.cuda_stream)
    else:
        expected = "a stream of PyTorch's, an object with __cuda_stream__, or a handle"
        raise InputError("stream", expected, type(stream).__name__)
    index = gpu.index if handle in _DEFAULT_STREAMS else driver().device_of(handle)
    if index != gpu.index:
        raise InputError("stream", f"one of {gpu}, where the artifact is loaded", f"one of cuda:{index}")
    return handle


def _index(device: str | None) -> int:
    match = re.fullmatch(r"cuda(?::(\d+))?", device or FAMILY)
    if match is None:
        expected = '"cuda", or "cuda:1" and the like: the artifact was compiled for a GPU'
        raise InputError("device", expected, repr(device))
    return int(match[1] or 0)


def _check_cuda(manifest: Manifest, nvidia: Driver) -> None:
    compiled = [
        int(manifest.versions[name].partition(".")[0]) for name in ("nvcc", "nvrtc") if name in manifest.versions
    ]
    version = max([OLDEST_CUDA, *compiled])
    if nvidia.cuda[0] < version:
        got = f"one for CUDA {nvidia.cuda[0]}.{nvidia.cuda[1]}"
        raise InstallationError("NVIDIA driver", f"one for CUDA {version}.0 or later", got, "Update the driver.")


def _check_target(manifest: Manifest, gpu: Gpu) -> None:
    target = manifest.target
    assert isinstance(target, CudaProfile)  # who loads it looked at its family
    arch = target.tvm.arch
    if not runs(arch, gpu.capability):
        expected = f"a GPU of compute capability {capabilities(arch)}, as it was compiled for one"
        raise ArtifactError("artifact", expected, f"{gpu}, {gpu.name}, of {_version_text(gpu.capability)}", _NEXT)
    least = target.hardware.shared_kib_per_block
    if gpu.shared_kib_per_block < least:
        expected = f"a GPU with {least} KiB of shared memory a block, as it was compiled for one"
        raise ArtifactError("artifact", expected, f"{gpu}, {gpu.name}, with {gpu.shared_kib_per_block}", _NEXT)


def _weight_bytes(manifest: Manifest) -> int:
    sizes = ((math.prod(map(int, info.dims)), _element_bytes(info.dtype)) for info in manifest.weights)
    return sum(count * size for count, size in sizes)


def _element_bytes(dtype: str) -> int:
    return np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype).itemsize


def _version_text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


class _Library:
    """libcuda.so.1 through its C interface (cuda.h)."""

    def __init__(self, library: Any) -> None:
        self._library = library
        code = library.cuInit(0)
        if code not in (0, _NO_DEVICE):
            raise InstallationError("NVIDIA driver", "one that starts", self._message(code), "Does nvidia-smi work?")
        version = self._number(library.cuDriverGetVersion)
        self.cuda = (version // 1000, version % 1000 // 10)
        self.count = 0 if code else self._number(library.cuDeviceGetCount)

    def gpu(self, index: int) -> Gpu:
        name = ctypes.create_string_buffer(256)
        self._check(self._library.cuDeviceGetName(name, len(name), self._device(index)))
        major, minor, multiprocessors, shared = (
            self._attribute(index, which) for which in (_MAJOR, _MINOR, _MULTIPROCESSORS, _SHARED_BYTES)
        )
        return Gpu(index, name.value.decode(errors="replace"), (major, minor), multiprocessors, shared // 1024)

    def free_bytes(self, index: int) -> int:
        """A GPU's free bytes, asked in its own context, which whoever runs something there needs as well."""
        library, device, context = self._library, self._device(index), ctypes.c_void_p()
        self._check(library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        try:
            self._check(library.cuCtxPushCurrent_v2(context))
            free, total = ctypes.c_size_t(), ctypes.c_size_t()
            code = library.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
            self._check(library.cuCtxPopCurrent_v2(ctypes.byref(context)))
            self._check(code)
            return free.value
        finally:
            library.cuDevicePrimaryCtxRelease_v2(device)

    def device_of(self, stream: int) -> int:
        device = ctypes.c_int()
        self._check(self._library.cuStreamGetDevice(ctypes.c_void_p(stream), ctypes.byref(device)))
        return device.value

    def _device(self, index: int) -> int:
        return self._number(self._library.cuDeviceGet, index)

    def _attribute(self, index: int, which: int) -> int:
        return self._number(self._library.cuDeviceGetAttribute, which, self._device(index))

    def _number(self, ask: Callable[..., int], *of: int) -> int:
        """What a function of the driver writes to its first argument."""
        number = ctypes.c_int()
        self._check(ask(ctypes.byref(number), *of))
        return number.value

    def _check(self, result: int) -> None:
        if result:
            raise DeviceError("NVIDIA driver", "an answer", self._message(result), "Does nvidia-smi work?")

    def _message(self, result: int) -> str:
        words = ctypes.c_char_p()
        self._library.cuGetErrorString(result, ctypes.byref(words))
        return f"error {result}" + (f", {words.value.decode()}" if words.value else "")

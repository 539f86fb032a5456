"""cuda_devices.py: whether an artifact runs on a GPU, asked of made-up drivers. No GPU is needed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cuda.made_up_gpus import A10, A100, H200, L4, MadeUp

from mhsa_compile.errors import ArtifactError, DeviceError, InputError, InstallationError, MhsaError
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.runtime import cuda_devices
from mhsa_compile.runtime.artifact.manifest import Manifest, TensorInfo
from mhsa_compile.runtime.cuda_devices import Gpu


def manifest(target: str, **versions: str) -> Manifest:
    return Manifest(
        mhsa_version="0.1.0",
        inputs=(),
        outputs=(),
        weights=(TensorInfo("w", "bfloat16", (1024, 1024)), TensorInfo("b", "float32", (256,))),
        semantics=(),
        spec=None,
        target=load_profile(target),
        versions=versions,
        ops=(),
        files={},
    )


def choose(monkeypatch: pytest.MonkeyPatch, driver: MadeUp, target: str, device: str | None, **versions: str) -> Gpu:
    monkeypatch.setattr(cuda_devices, "driver", lambda: driver)
    return cuda_devices.select_gpu(manifest(target, **versions), device)


@pytest.mark.parametrize(
    ("target", "device", "found"),
    [("cuda-sm80", None, A100), ("cuda-sm80", "cuda", A100), ("cuda-sm80", "cuda:0", A100),
     ("cuda-sm86", "cuda:1", A10), ("cuda-sm86", "cuda:2", L4), ("cuda-sm90a", "cuda:3", H200)],
)  # fmt: skip
def test_what_runs_where(monkeypatch: pytest.MonkeyPatch, target: str, device: str | None, found: Gpu) -> None:
    assert choose(monkeypatch, MadeUp(), target, device, nvcc="13.0") == found


REFUSED: dict[str, tuple[str, str | None, MadeUp, dict[str, str], type[MhsaError], str]] = {
    "an older driver": ("cuda-sm80", None, MadeUp(cuda=(12, 9)), {}, InstallationError,
                        "NVIDIA driver: expected one for CUDA 13.0 or later, got one for CUDA 12.9"),
    "a newer compiler": ("cuda-sm80", None, MadeUp(), {"nvrtc": "14.1"}, InstallationError, "CUDA 14.0 or later"),
    "no GPU": ("cuda-sm80", None, MadeUp([]), {}, DeviceError, "expected an NVIDIA GPU, got none"),
    "no such GPU": ("cuda-sm80", "cuda:5", MadeUp(), {}, InputError, "device: expected cuda:0 to cuda:4, got cuda:5"),
    "only one GPU": ("cuda-sm80", "cuda:1", MadeUp([A100]), {}, InputError, "expected cuda:0, got cuda:1"),
    "an older GPU": ("cuda-sm86", "cuda:0", MadeUp(), {}, ArtifactError,
                     "8.6 to 8.9, as it was compiled for one, got cuda:0, NVIDIA A100-SXM4-80GB, of 8.0"),
    "less shared memory": ("cuda-sm80", "cuda:1", MadeUp(), {}, ArtifactError,
                           "163 KiB of shared memory a block, as it was .*, got cuda:1, NVIDIA A10, with 99"),
    "a newer GPU": ("cuda-sm90a", "cuda:4", MadeUp(), {}, ArtifactError, "capability 9.0, .*NVIDIA B200, of 10.0"),
    "another family": ("cuda-sm80", "cuda:3", MadeUp(), {}, ArtifactError, "8.0 to 8.9, .*NVIDIA H200, of 9.0"),
    "too little memory": ("cuda-sm80", None, MadeUp(free=2**20), {}, DeviceError,
                          "device cuda:0: expected 2 MiB free for the weights, got 1 MiB"),
    "a CPU": ("cuda-sm80", "cpu", MadeUp(), {}, InputError, "the artifact was compiled for a GPU, got 'cpu'"),
    "nonsense": ("cuda-sm80", "cuda:one", MadeUp(), {}, InputError, "got 'cuda:one'"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("target", "device", "driver", "versions", "kind", "message"), REFUSED.values(), ids=REFUSED.keys()
)
def test_what_does_not_fit_is_named(
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    device: str | None,
    driver: MadeUp,
    versions: dict[str, str],
    kind: type[MhsaError],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        choose(monkeypatch, driver, target, device, **versions)


@dataclass  # so that its name in a test is the same in every process
class Stream:
    """A stream by the protocol of CUDA's own Python packages."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@dataclass
class TorchStream:
    cuda_stream: int


@pytest.mark.parametrize("stream", [0, 1, 5001, Stream(5001), TorchStream(5001)], ids=repr)
def test_streams_of_the_gpu(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    monkeypatch.setattr(cuda_devices, "driver", MadeUp)
    assert cuda_devices.handle_of(stream, A10) == (stream if isinstance(stream, int) else 5001)


@pytest.mark.parametrize("stream", [5002, Stream(5002), TorchStream(5002), "s", True], ids=repr)
def test_other_streams_are_refused(monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
    monkeypatch.setattr(cuda_devices, "driver", MadeUp)
    message = (
        "expected a stream of PyTorch's" if isinstance(stream, str | bool) else "one of cuda:1.* got one of cuda:2"
    )
    with pytest.raises(InputError, match=f"stream: .*{message}|stream: {message}"):
        cuda_devices.handle_of(stream, A10)


def test_no_driver_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cuda_devices, "_DRIVER", str(tmp_path / "libcuda.so.1"))
    with pytest.raises(InstallationError, match=r"NVIDIA driver: expected .*libcuda\.so\.1, got .*--gpus all"):
        cuda_devices.driver.__wrapped__()


class Library:
    """libcuda.so.1 with one H200 and 3 GiB free, answering into pointers; `started` is what cuInit says."""

    def __init__(self, started: int = 0) -> None:
        self.started = started
        self.contexts = 0

    def __getattr__(self, name: str) -> Any:
        simple = {"cuDriverGetVersion": 13010, "cuDeviceGetCount": 1, "cuStreamGetDevice": 0}
        if name in simple:
            return lambda *pointers: self.answer(pointers[-1], simple[name])
        raise AttributeError(name)

    def answer(self, pointer: Any, value: Any) -> int:
        pointer._obj.value = value
        return 0

    def cuInit(self, flags: int) -> int:
        return self.started

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return self.answer(device, index) if index == 0 else 101

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = b"NVIDIA H200"
        return 0

    def cuDeviceGetAttribute(self, value: Any, which: int, device: Any) -> int:
        return self.answer(value, {75: 9, 76: 0, 16: 132, 97: 227 * 1024}[which])

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        self.contexts += 1
        return self.answer(context, 4096)

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        self.contexts -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: ctypes.c_void_p) -> int:
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        return self.answer(free, 3 * 2**30)

    def cuGetErrorString(self, result: int, words: Any) -> int:
        return self.answer(words, b"invalid device ordinal" if result == 101 else b"unknown error")


def test_what_the_driver_says() -> None:
    library = Library()
    found = cuda_devices._Library(library)
    assert (found.cuda, found.count, found.device_of(77)) == ((13, 1), 1, 0)
    assert found.gpu(0) == Gpu(0, "NVIDIA H200", (9, 0), 132, 227)
    assert found.free_bytes(0) == 3 * 2**30
    assert library.contexts == 0
    with pytest.raises(DeviceError, match="error 101, invalid device ordinal"):
        found.gpu(1)


def test_a_driver_without_a_gpu_starts_and_one_that_is_broken_does_not() -> None:
    assert cuda_devices._Library(Library(started=100)).count == 0
    with pytest.raises(InstallationError, match="one that starts, got error 999, unknown error"):
        cuda_devices._Library(Library(started=999))

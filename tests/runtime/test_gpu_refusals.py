"""Bad input to an artifact for a GPU, from load to call: each is named, and nothing was loaded or launched before.

The artifact's machine code is made up, as are the driver and the tensors that lie on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda.made_up_gpus import A10, H200, MadeUp, OnTheOther, on_gpu

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.errors import ArtifactError, DeviceError, InputError, InstallationError, MhsaError
from mhsa_compile.runtime import cuda_devices, tvm_runtime
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.compiled_attention import CompiledAttention
from mhsa_compile.runtime.cuda_arguments import DeviceSignature
from mhsa_compile.runtime.cuda_launch import Launches

GPU = cuda_devices.Gpu(1, "NVIDIA H200", (9, 0), 132, 227)
SPEC = mhsa.AttentionSpec(embed_dim=64, num_heads=4, mask="bool", dtype="bfloat16")


@pytest.fixture(scope="module")
def artifact() -> Iterator[Artifact]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_compiler, "compiler", lambda: ("nvrtc", "13.0"))
        patch.setattr(cuda_compiler, "compiled", lambda source, arch: b"\x7fELF made up")
        yield mhsa.compile(SPEC, "cuda-sm90a")


def absent() -> Any:
    raise InstallationError("NVIDIA driver", "libcuda.so.1", "none", "Install NVIDIA's driver.")


LOADS: dict[str, tuple[Callable[[], Any], dict[str, Any], type[MhsaError], str]] = {
    "no driver": (absent, {}, InstallationError, "NVIDIA driver: expected libcuda"),
    "an older driver": (lambda: MadeUp([H200], cuda=(12, 8)), {}, InstallationError, "CUDA 13.0 or later, got .* 12.8"),
    "no GPU": (lambda: MadeUp([]), {}, DeviceError, "expected an NVIDIA GPU, got none"),
    "another GPU": (lambda: MadeUp([A10]), {}, ArtifactError, "capability 9.0.*NVIDIA A10, of 8.6"),
    "too little memory": (lambda: MadeUp([H200], free=100), {}, DeviceError, "free for the weights, got 0 MiB"),
    "no such GPU": (lambda: MadeUp([H200]), {"device": "cuda:1"}, InputError, "expected cuda:0, got cuda:1"),
    "a CPU": (lambda: MadeUp([H200]), {"device": "cpu"}, InputError, "compiled for a GPU, got 'cpu'"),
    "threads": (lambda: MadeUp([H200]), {"threads": 1}, InputError, "a GPU computes, got 1"),
    "weights elsewhere": (lambda: MadeUp([H200]), {"weights": "other GPU"}, InputError, "weight '.*one on cuda:1"),
}


@pytest.mark.parametrize(("driver", "words", "kind", "message"), LOADS.values(), ids=LOADS.keys())
def test_loads(
    artifact: Artifact,
    monkeypatch: pytest.MonkeyPatch,
    driver: Callable[[], Any],
    words: dict[str, Any],
    kind: type[MhsaError],
    message: str,
) -> None:
    monkeypatch.setattr(cuda_devices, "driver", driver)
    monkeypatch.setattr(tvm_runtime, "start_cuda", lambda: pytest.fail("CUDA was loaded"))
    if "weights" in words:
        state = mhsa.MultiHeadAttention(SPEC).state_dict()
        words = {"weights": {name: on_gpu(tensor) for name, tensor in state.items()}}
    with pytest.raises(kind, match=message):
        mhsa.load(artifact, **words)


class Recorder:
    """Stands in the place of launches: notes that there was one. Streams are checked as ever."""

    count = 1
    lock = nullcontext()

    def __init__(self) -> None:
        self._gpu = GPU
        self.launched = 0

    def bind(self, weights: list[Any], shared: object = None) -> tuple[Any, ...]:
        return ()

    def run(self, arrays: Any, sizes: Any, packed: Any) -> list[Any]:
        self.launched += 1
        return [on_gpu(torch.zeros(sizes["B"], sizes["L"], 64, dtype=torch.bfloat16))]

    def on(self, stream: Any) -> Any:
        return Launches.on(self, stream)  # type: ignore[arg-type]


@pytest.fixture
def loaded(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> tuple[CompiledAttention, Recorder]:
    monkeypatch.setattr(cuda_devices, "driver", MadeUp)
    recorder: Any = Recorder()
    return CompiledAttention(
        artifact.manifest, DeviceSignature(artifact.manifest, recorder._gpu), recorder, []
    ), recorder


def x(*shape: int) -> torch.Tensor:
    return torch.zeros(shape or (2, 5, 64), dtype=torch.bfloat16)


MASK = on_gpu(torch.ones(2, 4, 5, 5, dtype=torch.bool))
CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "of the host": ({"x": x()}, r"input 'x': .*memory of cuda:1, got one on cpu.*x\.to\('cuda:1'\)"),
    "of NumPy": ({"x": np.zeros((2, 5, 64), np.float32)}, r"input 'x': .*got a NumPy array.*from_host"),
    "of another GPU": ({"x": on_gpu(x(), OnTheOther)}, "input 'x': .*memory of cuda:1, got one on cuda:0"),
    "with gaps": ({"x": on_gpu(x(2, 64, 5).mT)}, r"input 'x': .*a tensor with gaps.*x\.contiguous\(\)"),
    "unaligned": ({"x": on_gpu(x(2 * 5 * 64 + 1)[1:].view(2, 5, 64))}, "input 'x': .*of 16 bytes, got .* 2 bytes"),
    "of another dtype": ({"x": on_gpu(x().half())}, "input 'x': expected bfloat16 .*got float16"),
    "of another width": ({"x": on_gpu(x(2, 5, 63))}, r"input 'x': .*got bfloat16 of shape \(2, 5, 63\)"),
    "a mask of the host": ({"x": on_gpu(x()), "mask": torch.ones(2, 4, 5, 5, dtype=torch.bool)},
                           "input 'mask': .*got one on cpu"),
    "a mask of other sizes": ({"x": on_gpu(x()), "mask": on_gpu(torch.ones(2, 4, 5, 6, dtype=torch.bool))},
                              "input 'mask': .*S = 5|input 'mask': .*L = 5"),
    "no mask": ({"x": on_gpu(x()), "mask": None}, "input 'mask': .*got nothing"),
    "an unknown input": ({"x": on_gpu(x()), "y": on_gpu(x())}, "input 'y': expected one of x, mask"),
    "a stream of another GPU": ({"x": on_gpu(x()), "stream": 5002}, "stream: .*one of cuda:1.*got one of cuda:2"),
    "no stream": ({"x": on_gpu(x()), "stream": "0"}, "stream: expected a stream of PyTorch's.*got str"),
}  # fmt: skip


@pytest.mark.parametrize(("inputs", "message"), CALLS.values(), ids=CALLS.keys())
def test_calls(loaded: tuple[CompiledAttention, Recorder], inputs: dict[str, Any], message: str) -> None:
    attention, recorder = loaded
    with pytest.raises(InputError, match=message):
        attention(**{"mask": MASK, **inputs})
    assert recorder.launched == 0


def test_what_is_right_is_launched(loaded: tuple[CompiledAttention, Recorder]) -> None:
    attention, recorder = loaded
    assert attention(on_gpu(x()), MASK).shape == (2, 5, 64)
    assert recorder.launched == 1


def test_nothing_to_compute_is_not_launched(
    loaded: tuple[CompiledAttention, Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention, recorder = loaded
    monkeypatch.setattr(
        "mhsa_compile.runtime.cuda_arguments.empty", lambda shape, *_: on_gpu(torch.empty(tuple(shape)))
    )
    y = attention(on_gpu(x(0, 5, 64)), on_gpu(torch.ones(1, 1, 5, 5, dtype=torch.bool)))
    assert y.shape == (0, 5, 64) and recorder.launched == 0

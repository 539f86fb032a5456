"""This machine's NVIDIA GPU, for tests: whether there is one, the target that it takes, arrays there and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from gpu_bench import artifact_cache
from torch import nn

import mhsa_compile as mhsa
from mhsa_compile.errors import MhsaError
from mhsa_compile.hardware.profile import profile_of_gpu
from mhsa_compile.runtime import cuda_devices
from mhsa_compile.runtime.artifact.artifact import Artifact

Arrays = Mapping[str, np.ndarray]
KEEP = "MHSA_KEEP_ARTIFACTS"
"""The environment variable that names a folder for what is compiled. The next run, as that under compute-sanitizer,
then finds it."""


def _missing() -> str | None:
    """Why no test can run on a GPU here, in the words of whoever found out first."""
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is made for CPUs: install the one for CUDA"
    try:
        count = cuda_devices.driver().count
    except MhsaError as error:
        return str(error)
    return None if count and torch.cuda.is_available() else "there is no NVIDIA GPU here that PyTorch can use"


_WHY = _missing()
marks = [pytest.mark.gpu, pytest.mark.skipif(_WHY is not None, reason=_WHY or "")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two NVIDIA GPUs here")


@cache
def target() -> str:
    """The target of this machine's first GPU: the latest that it runs."""
    gpu = cuda_devices.driver().gpu(0)
    profile = profile_of_gpu(gpu.capability)
    if profile is None:
        pytest.skip(f"no target for {gpu.name}, of compute capability {gpu.capability[0]}.{gpu.capability[1]}")
    return profile.name


def compiled(source: mhsa.AttentionSpec | nn.Module | onnx.ModelProto, **dims: int) -> Artifact:
    """The source compiled for this machine's GPU; with KEEP once for several runs of the tests."""
    folder = os.environ.get(KEEP)
    parts = [target().encode(), repr(sorted(dims.items())).encode(), *_parts(source)]
    return artifact_cache.artifact(
        Path(folder) if folder else None, lambda: mhsa.compile(source, target(), dims=dims), *parts
    )


def _parts(source: mhsa.AttentionSpec | nn.Module | onnx.ModelProto) -> Iterator[bytes]:
    """All that a source is."""
    if isinstance(source, mhsa.AttentionSpec):
        yield repr(source).encode()
    elif isinstance(source, nn.Module):
        yield repr(source.spec).encode()
        for name, value in source.state_dict().items():
            yield name.encode() + value.view(torch.uint8).numpy().tobytes()
    else:
        yield source.SerializeToString(deterministic=True)


def there(array: np.ndarray) -> torch.Tensor:
    """A copy on the GPU."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(np.array(array)).cuda()


def back(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.cpu().view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.cpu().numpy()


def through(attention: Any) -> Callable[[Arrays | tuple[np.ndarray, ...]], list[np.ndarray]]:
    """Calls of a loaded artifact with arrays of the host, inputs by name or by position; all outputs in order."""

    def run(inputs: Arrays | tuple[np.ndarray, ...]) -> list[np.ndarray]:
        if isinstance(inputs, tuple):
            outputs = attention(*map(there, inputs))
        else:
            outputs = attention(**{name: there(array) for name, array in inputs.items()})
        return [back(one) for one in (outputs if isinstance(outputs, tuple) else (outputs,))]

    return run

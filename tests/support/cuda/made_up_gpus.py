"""GPUs that are not here, and their driver; tensors that say they lie on one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from mhsa_compile.runtime.cuda_devices import Gpu

A100 = Gpu(0, "NVIDIA A100-SXM4-80GB", (8, 0), 108, 163)
A10 = Gpu(1, "NVIDIA A10", (8, 6), 72, 99)
L4 = Gpu(2, "NVIDIA L4", (8, 9), 58, 99)
H200 = Gpu(3, "NVIDIA H200", (9, 0), 132, 227)
B200 = Gpu(4, "NVIDIA B200", (10, 0), 148, 227)


@dataclass
class MadeUp:
    """A driver with these GPUs, by their index."""

    found: list[Gpu] = field(default_factory=lambda: [A100, A10, L4, H200, B200])
    cuda: tuple[int, int] = (13, 0)
    free: int = 2**34

    @property
    def count(self) -> int:
        return len(self.found)

    def gpu(self, index: int) -> Gpu:
        return self.found[index]

    def free_bytes(self, index: int) -> int:
        return self.free

    def device_of(self, stream: int) -> int:
        return stream % 1000  # in place of an address


class OnGpu(torch.Tensor):
    """A tensor that says it lies on cuda:1."""

    device = property(lambda self: torch.device("cuda", 1))  # type: ignore[assignment]


class OnTheOther(OnGpu):
    device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]


def on_gpu(tensor: torch.Tensor, kind: type[OnGpu] = OnGpu) -> Any:
    return tensor.as_subclass(kind)

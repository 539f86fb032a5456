"""What measured: a device, as its records name it."""

from __future__ import annotations

import msgspec


class GpuDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An NVIDIA GPU of a device's; `capability` is its compute capability, such as (9, 0)."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ran the candidates.

    cpu       the model's name, or what the device is known as
    emulated  whether an emulator ran them: its times say nothing about hardware
    gpu       the one that code for a GPU runs on, None where there is none
    """

    cpu: str
    cores: int
    architecture: str
    l1d_kib: int | None = None
    l2_kib: int | None = None
    emulated: bool = False
    features: tuple[str, ...] = ()
    gpu: GpuDevice | None = None

    @property
    def name(self) -> str:
        """The name of what ran them, as far as it is known."""
        return self.cpu if self.gpu is None else self.gpu.name

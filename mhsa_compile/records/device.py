"""What measured: a device, as its records name it."""

from __future__ import annotations

import re

import msgspec

from mhsa_compile.hardware import microarchitecture
from mhsa_compile.hardware.arm_cpu import Core

_ARM_NUMBERS = re.compile(r"implementer (0x[0-9a-f]+) part (0x[0-9a-f]+)")


class GpuDevice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An NVIDIA GPU of a device's; `capability` is its compute capability, such as (9, 0)."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ran the candidates.

    cpu       the marketing name, or what the device is known as: often of several microarchitectures
    microarchitecture  such as zen5; empty where the device does not tell, and in records from before they said it
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
    microarchitecture: str = ""

    @property
    def name(self) -> str:
        """The name of what ran them, as far as it is known."""
        if self.gpu is not None:
            return self.gpu.name
        return f"{self.cpu} ({self.microarchitecture})" if self.microarchitecture else self.cpu

    def why_unlike(self, own: str) -> str | None:
        """Why what its CPU measured says nothing of a microarchitecture, or None."""
        if self.known_microarchitecture == own:
            return None
        if self.known_microarchitecture:
            return f"measured on {self.known_microarchitecture}, not {own}"
        return (
            f"measured on {self.cpu!r}, a name that does not tell the microarchitecture, here {own}: "
            "`mhsa records measured-on` adds it"
        )

    @property
    def known_microarchitecture(self) -> str:
        """What it says or, of an ARM CPU, what its numbers say; empty where neither does."""
        numbers = _ARM_NUMBERS.fullmatch(self.cpu)
        if self.microarchitecture or numbers is None:
            return self.microarchitecture
        return microarchitecture.of_arm([Core(int(numbers[1], 16), int(numbers[2], 16))])

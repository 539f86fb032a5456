"""CPUs that are not here, by what CPUID would say of them."""

from __future__ import annotations

import struct
from collections.abc import Collection

import pytest

from mhsa_compile.hardware import arm_cpu, cpuid, host
from mhsa_compile.hardware.cpuid import CpuId

ALL_STATE = 0b111 | 0b111 << 5 | 0b11 << 17
_AVX2 = {
    "abm", "avx", "avx2", "bmi1", "bmi2", "cx16", "f16c", "fma", "lahf_lm", "movbe", "pni", "popcnt", "sse4_1",
    "sse4_2", "ssse3", "xsave",
}  # fmt: skip
_AVX512 = {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl", "avx512_vnni"}
# (vendor, family, model, stepping, marketing name, features)
CPUS = {
    "zen3": ("AuthenticAMD", 25, 1, 1, "AMD EPYC", _AVX2),
    "zen4": ("AuthenticAMD", 25, 17, 1, "AMD EPYC", _AVX2 | _AVX512 | {"avx512_bf16"}),
    "zen5": ("AuthenticAMD", 26, 2, 1, "AMD EPYC", _AVX2 | _AVX512 | {"avx512_bf16", "avx_vnni"}),
    "skylake-avx512": ("GenuineIntel", 6, 85, 4, "Intel(R) Xeon(R) Processor", _AVX2 | _AVX512 - {"avx512_vnni"}),
    "cascadelake": ("GenuineIntel", 6, 85, 7, "Intel(R) Xeon(R) Processor", _AVX2 | _AVX512),
    "sapphirerapids": ("GenuineIntel", 6, 143, 8, "Intel(R) Xeon(R) Processor", _AVX2 | _AVX512 | {"amx_tile"}),
}


def made(name: str, saved_state: int = ALL_STATE, hypervisor: str = "") -> CpuId:
    """What one of CPUS says where the system saves this state; 0 is a system that does not use XSAVE."""
    vendor, family, model, stepping, brand, features = CPUS[name]
    return cpu(vendor, family, model, stepping, brand, features, saved_state, hypervisor)


def cpu(
    vendor: str, family: int, model: int, stepping: int, brand: str, features: Collection[str], saved_state: int,
    hypervisor: str = "",
) -> CpuId:  # fmt: skip
    leaves = {leaf: [0, 0, 0, 0] for leaf in cpuid._BITS}
    for leaf, registers in cpuid._BITS.items():
        for register, bits in registers.items():
            leaves[leaf][register] = sum(1 << bit for bit, feature in bits.items() if feature in features)
    base = min(family, 15)
    leaves[1, 0][0] = stepping | (model & 15) << 4 | base << 8 | (model >> 4) << 16 | (family - base) << 20
    leaves[1, 0][2] |= (saved_state != 0) << 27 | bool(hypervisor) << 31
    first, second, third = struct.unpack("<3I", vendor.encode())
    leaves[0, 0] = [7, first, third, second]
    words = struct.unpack("<12I", brand.encode().ljust(48, b"\0"))
    for i in range(3):
        leaves[1 << 31 | 2 + i, 0] = list(words[4 * i : 4 * i + 4])
    if hypervisor:
        leaves[1 << 30, 0] = [0, *struct.unpack("<3I", hypervisor.encode().ljust(12, b"\0"))]
    return CpuId({leaf: (a, b, c, d) for leaf, (a, b, c, d) in leaves.items()}, saved_state)


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, **how: int) -> None:
    """Makes this process see one of CPUS."""
    monkeypatch.setattr(host, "architecture", lambda: "x86_64")
    answers = made(name, **how)
    monkeypatch.setattr(cpuid, "read", lambda: answers)


def pretend_arm(monkeypatch: pytest.MonkeyPatch, vector: dict[int, int], core: arm_cpu.Core | None) -> None:
    """Makes this process see an aarch64 CPU with this auxiliary vector."""
    monkeypatch.setattr(host, "architecture", lambda: "aarch64")
    monkeypatch.setattr(arm_cpu, "auxiliary_vector", lambda: vector)
    monkeypatch.setattr(arm_cpu, "running_core", lambda vector: core)

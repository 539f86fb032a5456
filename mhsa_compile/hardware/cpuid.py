"""What an x86-64 CPU says of itself: CPUID and XGETBV. No file takes part.

    cpu = cpuid.read()
    cpu.features            # {"avx2", "fma", ...}, of which the system saves the registers
    cpu.family, cpu.model   # 26, 2

The bits are those of Intel's manual (volume 2, CPUID), AMD's (volume 3, appendix E) and Linux's cpufeatures.h, whose
names in /proc/cpuinfo they have here.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from mhsa_compile.files import system
from mhsa_compile.hardware.machine_code import callable_code

Registers = tuple[int, int, int, int]
"""EAX, EBX, ECX, EDX."""

_CPUID = bytes.fromhex("f30f1efa 53 4989d0 89f8 89f1 0fa2 418900 41895804 41894808 4189500c 5b c3")
"""void cpuid(uint32_t leaf, uint32_t subleaf, uint32_t registers[4]): endbr64; push rbx; mov r8, rdx; mov eax, edi;
mov ecx, esi; cpuid; mov [r8], eax; mov [r8 + 4], ebx; mov [r8 + 8], ecx; mov [r8 + 12], edx; pop rbx; ret"""
_CPUID_OF_WINDOWS = bytes.fromhex("53 89c8 89d1 0fa2 418900 41895804 41894808 4189500c 5b c3")
"""The same, by Windows' convention of calls: push rbx; mov eax, ecx; mov ecx, edx; cpuid; ..."""
_XGETBV = bytes.fromhex("f30f1efa 31c9 0f01d0 48c1e220 4809d0 c3")
"""uint64_t xcr0(void): endbr64; xor ecx, ecx; xgetbv; shl rdx, 32; or rax, rdx; ret"""

_VENDOR, _BASIC, _EXTENDED, _MORE, _AMD, _LARGEST_AMD = (0, 0), (1, 0), (7, 0), (7, 1), (1 << 31 | 1, 0), (1 << 31, 0)
_BRAND = tuple((1 << 31 | leaf, 0) for leaf in (2, 3, 4))
_AMD_CACHES, _INTEL_CACHES = 1 << 31 | 0x1D, 4
_MOST_CACHES = 8
_HYPERVISOR = 1 << 30
_OSXSAVE = 27  # of _BASIC's ECX

_EAX, _EBX, _ECX, _EDX = range(4)
# Instructions of programs, by where their bit is: {leaf: {register: {bit: name}}}.
_BITS: dict[tuple[int, int], dict[int, dict[int, str]]] = {
    _BASIC: {
        _ECX: {
            0: "pni", 1: "pclmulqdq", 9: "ssse3", 12: "fma", 13: "cx16", 19: "sse4_1", 20: "sse4_2", 22: "movbe",
            23: "popcnt", 25: "aes", 26: "xsave", 28: "avx", 29: "f16c", 31: "hypervisor",
        },
        _EDX: {0: "fpu", 4: "tsc", 8: "cx8", 15: "cmov", 19: "clflush", 23: "mmx", 24: "fxsr", 25: "sse", 26: "sse2"},
    },
    _EXTENDED: {
        _EBX: {
            0: "fsgsbase", 3: "bmi1", 5: "avx2", 8: "bmi2", 9: "erms", 16: "avx512f", 17: "avx512dq",
            19: "adx", 21: "avx512ifma", 23: "clflushopt", 24: "clwb", 26: "avx512pf", 27: "avx512er", 28: "avx512cd",
            29: "sha_ni", 30: "avx512bw", 31: "avx512vl",
        },
        _ECX: {
            1: "avx512vbmi", 6: "avx512_vbmi2", 8: "gfni", 9: "vaes", 10: "vpclmulqdq", 11: "avx512_vnni",
            12: "avx512_bitalg", 14: "avx512_vpopcntdq", 27: "movdiri", 28: "movdir64b",
        },
        _EDX: {
            2: "avx512_4vnniw", 3: "avx512_4fmaps", 4: "fsrm", 8: "avx512_vp2intersect", 14: "serialize",
            22: "amx_bf16", 23: "avx512_fp16", 24: "amx_tile", 25: "amx_int8",
        },
    },
    _MORE: {_EAX: {4: "avx_vnni", 5: "avx512_bf16", 21: "amx_fp16", 23: "avx_ifma"}},
    _AMD: {
        _ECX: {
            0: "lahf_lm", 5: "abm", 6: "sse4a", 7: "misalignsse", 8: "3dnowprefetch", 11: "xop", 16: "fma4", 21: "tbm",
        },
        _EDX: {27: "rdtscp", 29: "lm"},
    },
}  # fmt: skip

# The state in XCR0 without which an instruction is illegal, or its registers are lost: SSE, which whoever uses XSAVE
# saves; AVX; with it the masks and both parts of AVX-512; the configuration and the data of tiles.
_SSE, _AVX, _AVX512, _TILES = 0b10, 0b110, 0b1110_0110, 0b11 << 17
_VECTORS = frozenset({"f16c", "fma", "fma4", "vaes", "vpclmulqdq", "xop"})


def names() -> frozenset[str]:
    """All features that are asked about."""
    return frozenset(name for registers in _BITS.values() for bits in registers.values() for name in bits.values())


def state_of(name: str) -> int:
    """The bits of XCR0 without which a feature is not to be used."""
    if name.startswith("avx512"):
        return _AVX512
    if name.startswith("amx"):
        return _TILES
    if name.startswith("avx") or name in _VECTORS:
        return _AVX
    return _SSE if name == "xsave" else 0


@dataclass(frozen=True)
class CpuId:
    """The answers of one CPU: the registers of each leaf and subleaf that it has, and XCR0, the state that the system
    saves; 0 where the system does not use XSAVE."""

    leaves: Mapping[tuple[int, int], Registers]
    saved_state: int

    def _register(self, leaf: tuple[int, int], register: int) -> int:
        return self.leaves.get(leaf, (0, 0, 0, 0))[register]

    @property
    def vendor(self) -> str:
        """The maker's name, such as GenuineIntel."""
        _, ebx, ecx, edx = self.leaves[_VENDOR]
        return _text(ebx, edx, ecx)

    @property
    def hypervisor(self) -> str:
        """The hypervisor's name, such as KVMKVMKVM; empty on the hardware itself."""
        present = self._register(_BASIC, _ECX) >> 31 & 1
        return _text(*self.leaves.get((_HYPERVISOR, 0), (0, 0, 0, 0))[1:]) if present else ""

    @property
    def brand(self) -> str:
        """The marketing name, such as AMD EPYC 9R14 96-Core Processor; empty where there is none."""
        return _text(*(word for leaf in _BRAND for word in self.leaves.get(leaf, ())))

    @property
    def family(self) -> int:
        signature = self._register(_BASIC, _EAX)
        family = signature >> 8 & 15
        return family + (signature >> 20 & 255) if family == 15 else family

    @property
    def model(self) -> int:
        signature = self._register(_BASIC, _EAX)
        low, high = signature >> 4 & 15, signature >> 16 & 15
        return high << 4 | low if signature >> 8 & 15 in (6, 15) else low

    @property
    def stepping(self) -> int:
        return self._register(_BASIC, _EAX) & 15

    @property
    def features(self) -> frozenset[str]:
        """The features that the CPU has and the system lets programs use."""
        return frozenset(
            name
            for leaf, registers in _BITS.items()
            for register, bits in registers.items()
            for bit, name in bits.items()
            if self._register(leaf, register) >> bit & 1 and self.saved_state & state_of(name) == state_of(name)
        )

    def cache_kib(self, level: int) -> int | None:
        """KiB of the data (or unified) cache of a level."""
        leaf = _AMD_CACHES if self.vendor in ("AuthenticAMD", "HygonGenuine") else _INTEL_CACHES
        for subleaf in range(_MOST_CACHES):
            eax, ebx, ecx, _ = self.leaves.get((leaf, subleaf), (0, 0, 0, 0))
            kind, of_level = eax & 31, eax >> 5 & 7
            if kind in (1, 3) and of_level == level:  # data, unified
                ways, parts, line = (ebx >> 22) + 1, (ebx >> 12 & 1023) + 1, (ebx & 4095) + 1
                return ways * parts * line * (ecx + 1) // 1024
        return None


@functools.cache
def read() -> CpuId | None:
    """What this CPU says; None where this process may not run the few instructions that ask."""
    uint32 = ctypes.c_uint32
    code = _CPUID_OF_WINDOWS if system.IS_WINDOWS else _CPUID
    with callable_code(code, None, uint32, uint32, ctypes.POINTER(uint32)) as call:
        if call is None:
            return None

        def registers_of(leaf: tuple[int, int]) -> Registers:
            registers = (uint32 * 4)()
            call(*leaf, registers)
            return registers[0], registers[1], registers[2], registers[3]

        leaves = {leaf: registers_of(leaf) for leaf in (_VENDOR, _LARGEST_AMD)}
        largest, largest_amd = leaves[_VENDOR][_EAX], leaves[_LARGEST_AMD][_EAX]
        caches = [(leaf, subleaf) for leaf in (_INTEL_CACHES, _AMD_CACHES) for subleaf in range(_MOST_CACHES)]
        for leaf in (_BASIC, _EXTENDED, _AMD, *_BRAND, *caches):
            if leaf[0] <= (largest_amd if leaf[0] >> 31 else largest):
                leaves[leaf] = registers_of(leaf)
        if leaves.get(_EXTENDED, (0,))[0] >= 1:  # its last subleaf
            leaves[_MORE] = registers_of(_MORE)
        if leaves[_BASIC][_ECX] >> 31 & 1:
            leaves[_HYPERVISOR, 0] = registers_of((_HYPERVISOR, 0))
    return CpuId(leaves, _saved_state() if leaves[_BASIC][_ECX] >> _OSXSAVE & 1 else 0)


def _saved_state() -> int:
    with callable_code(_XGETBV, ctypes.c_uint64) as call:
        return 0 if call is None else int(call())


def _text(*words: int) -> str:
    return struct.pack(f"<{len(words)}I", *words).decode("latin-1").strip("\0 ")

"""What an aarch64 CPU is and has: the auxiliary vector, which Linux hands to each process, and MIDR_EL1, the register
that names a core. Emulators show both rightly, and not always the file /proc/cpuinfo."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from mhsa_compile.hardware.machine_code import callable_code

HWCAP, HWCAP2 = 16, 26
"""The places of the vector with features: AT_HWCAP and AT_HWCAP2."""
# Bit by bit, named as in /proc/cpuinfo (arch/arm64/include/uapi/asm/hwcap.h and kernel/cpuinfo.c of Linux).
_FEATURES = {
    HWCAP: """
        fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3
        sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg
    """,
    HWCAP2: """
        dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm bf16
        dgh rng bti mte
    """,
}
_READS_REGISTERS = 1 << 11  # of HWCAP: Linux reads registers such as MIDR_EL1 for programs
_MIDR = bytes.fromhex("5f2403d5 000038d5 c0035fd6")
"""uint64_t midr(void): bti c; mrs x0, midr_el1; ret"""


@dataclass(frozen=True)
class Core:
    """What MIDR_EL1 says of a core: who designed it (0x41 is Arm), and which of theirs it is."""

    implementer: int
    part: int

    @staticmethod
    def of(midr: int) -> Core:
        """The core of a value of MIDR_EL1."""
        return Core(midr >> 24 & 255, midr >> 4 & 4095)


def auxiliary_vector() -> Mapping[int, int]:
    """This process's, as far as features go; empty where the C library does not tell."""
    try:
        get = ctypes.CDLL(None).getauxval
    except AttributeError:
        return {}
    get.restype, get.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
    return {place: int(get(place)) for place in (HWCAP, HWCAP2)}


def features(vector: Mapping[int, int]) -> frozenset[str]:
    """The features that an auxiliary vector has."""
    return frozenset(
        name
        for place, words in _FEATURES.items()
        for bit, name in enumerate(words.split())
        if vector.get(place, 0) >> bit & 1
    )


def running_core(vector: Mapping[int, int]) -> Core | None:
    """The core that runs this process now, as it says itself; None where Linux does not let programs ask."""
    if not vector.get(HWCAP, 0) & _READS_REGISTERS:
        return None
    with callable_code(_MIDR, ctypes.c_uint64) as call:
        return None if call is None else Core.of(int(call()))

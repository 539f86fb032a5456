"""What a Mac says of itself, by sysctl. Apple's documentation has the names, in "Determining Instruction Set
Characteristics" and "Determining System Capabilities"; those of features are macOS 12's and later."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

Sysctl = Callable[[str], "int | str | None"]
"""The value of a name; None where this machine has none of it."""

FEATURES = {
    "fp": "hw.optional.floatingpoint",
    "asimd": "hw.optional.arm64",
    "crc32": "hw.optional.armv8_crc32",
    "atomics": "hw.optional.arm.FEAT_LSE",
    "fphp": "hw.optional.arm.FEAT_FP16",
    "asimdhp": "hw.optional.arm.FEAT_FP16",
    "asimdrdm": "hw.optional.arm.FEAT_RDM",
    "jscvt": "hw.optional.arm.FEAT_JSCVT",
    "fcma": "hw.optional.arm.FEAT_FCMA",
    "lrcpc": "hw.optional.arm.FEAT_LRCPC",
    "ilrcpc": "hw.optional.arm.FEAT_LRCPC2",
    "sha3": "hw.optional.arm.FEAT_SHA3",
    "asimddp": "hw.optional.arm.FEAT_DotProd",
    "asimdfhm": "hw.optional.arm.FEAT_FHM",
    "uscat": "hw.optional.arm.FEAT_LSE2",
    "flagm": "hw.optional.arm.FEAT_FlagM",
    "flagm2": "hw.optional.arm.FEAT_FlagM2",
    "frint": "hw.optional.arm.FEAT_FRINTTS",
    "i8mm": "hw.optional.arm.FEAT_I8MM",
    "bf16": "hw.optional.arm.FEAT_BF16",
}
"""Names of sysctl by those of /proc/cpuinfo on Linux."""
_FAMILIES = {0x1B588BB3: "apple-m1", 0xDA33D83D: "apple-m2"}
"""hw.cpufamily, as <mach/machine.h> has it: CPUFAMILY_ARM_FIRESTORM_ICESTORM and _BLIZZARD_AVALANCHE."""
_CACHES = {1: "l1dcachesize", 2: "l2cachesize"}
_TEXTS = ("machdep.cpu.brand_string",)


def sysctl(name: str) -> int | str | None:
    """What macOS answers to a name of sysctl's: a number, or a text of _TEXTS; None where it has none."""
    call: Any = getattr(ctypes.CDLL(None), "sysctlbyname", None)
    if call is None:
        return None
    size, memory = ctypes.c_size_t(256), ctypes.create_string_buffer(256)
    if call(name.encode(), memory, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    if name in _TEXTS:
        return memory.value.decode(errors="replace")
    return int.from_bytes(memory.raw[: size.value], "little")


def features(ask: Sysctl = sysctl) -> frozenset[str]:
    """The features of an ARM Mac, named as in /proc/cpuinfo."""
    return frozenset(feature for feature, name in FEATURES.items() if ask(name))


def microarchitecture(ask: Sysctl = sysctl) -> str | None:
    """The microarchitecture by hw.cpufamily, as targets/ names it; None for one that is not listed here."""
    family = ask("hw.cpufamily")
    return _FAMILIES.get(family & 0xFFFFFFFF) if isinstance(family, int) else None


def brand(ask: Sysctl = sysctl) -> str | None:
    """The marketing name: Apple M1."""
    name = ask("machdep.cpu.brand_string")
    return name if isinstance(name, str) and name else None


def cache_kib(level: int, ask: Sysctl = sysctl) -> int | None:
    """KiB of a performance core's data cache of that level. Cores of a cluster share the second level: its share."""
    if level not in _CACHES:
        return None
    size, sharing = ask(f"hw.perflevel0.{_CACHES[level]}"), ask("hw.perflevel0.cpusperl2") if level > 1 else 1
    if not isinstance(size, int):
        size, sharing = ask(f"hw.{_CACHES[level]}"), 1  # an Intel Mac, or macOS 11
    if not isinstance(size, int) or not isinstance(sharing, int):
        return None
    return size // max(sharing, 1) // 1024 or None

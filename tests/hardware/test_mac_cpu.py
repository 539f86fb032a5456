"""mac_cpu.py, shown what owners of Macs published of `sysctl`: an M1 Pro (github.com/Dr-Noob/cpufetch/issues/139), an
M1 with macOS 11 (github.com/google/cpu_features/pull/150), and an M5 (github.com/archspec/archspec/pull/216)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mhsa_compile.hardware import host, mac_cpu, profile
from mhsa_compile.runtime.standalone import runtimes

M1_PRO = """
hw.perflevel1.cpusperl2: 2
hw.perflevel1.l1dcachesize: 65536
hw.perflevel1.l2cachesize: 4194304
hw.perflevel0.cpusperl2: 4
hw.perflevel0.l1dcachesize: 131072
hw.perflevel0.l2cachesize: 12582912
"""
M1_WITH_MACOS_11 = """
hw.optional.floatingpoint: 1
hw.optional.neon: 1
hw.optional.neon_hpfp: 1
hw.optional.neon_fp16: 1
hw.optional.armv8_1_atomics: 1
hw.optional.armv8_crc32: 1
hw.optional.armv8_2_fhm: 1
hw.optional.armv8_2_sha512: 1
hw.optional.armv8_2_sha3: 1
hw.optional.arm64: 1
hw.cpufamily: 458787763
"""
M5 = """
hw.optional.arm.FEAT_CRC32: 1
hw.optional.arm.FEAT_FlagM: 1
hw.optional.arm.FEAT_FlagM2: 1
hw.optional.arm.FEAT_FHM: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_SHA3: 1
hw.optional.arm.FEAT_RDM: 1
hw.optional.arm.FEAT_LSE: 1
hw.optional.arm.FEAT_SPECRES: 0
hw.optional.arm.FEAT_FRINTTS: 1
hw.optional.arm.FEAT_LRCPC: 1
hw.optional.arm.FEAT_LRCPC2: 1
hw.optional.arm.FEAT_FCMA: 1
hw.optional.arm.FEAT_JSCVT: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_LSE2: 1
"""
HEADER = runtimes.PROGRAM_FILES / "cpu_features.h"


def answers(text: str) -> mac_cpu.Sysctl:
    """A Mac that prints this."""
    known = {name: int(value) for name, _, value in (line.partition(": ") for line in text.strip().splitlines())}
    return known.get


def test_features_and_caches() -> None:
    assert {"bf16", "i8mm", "asimddp", "atomics", "uscat", "flagm2"} <= mac_cpu.features(answers(M5))
    assert mac_cpu.features(answers(M1_WITH_MACOS_11)) == {"fp", "asimd", "crc32"}  # the others have no name there
    assert [mac_cpu.cache_kib(level, answers(M1_PRO)) for level in (1, 2, 3)] == [128, 3072, None]
    assert mac_cpu.cache_kib(1, answers("hw.l1dcachesize: 32768")) == 32  # an Intel Mac has cores of one kind
    assert mac_cpu.cache_kib(1, answers(M5)) is None


def test_the_microarchitecture_is_that_of_the_family() -> None:
    assert mac_cpu.microarchitecture(answers(M1_WITH_MACOS_11)) == "apple-m1"
    assert mac_cpu.microarchitecture(answers("hw.cpufamily: 7")) is None
    assert mac_cpu.microarchitecture(answers("hw.cpufamily: -1")) is None


def test_native_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    every = "\n".join(f"{name}: 1" for name in mac_cpu.FEATURES.values() if "BF16" not in name and "I8MM" not in name)
    ask = answers(f"{M1_PRO}{every}\nhw.cpufamily: 458787763")
    for name in ("features", "microarchitecture", "cache_kib", "brand"):
        real = getattr(mac_cpu, name)
        monkeypatch.setattr(mac_cpu, name, lambda *words, real=real: real(*words, ask))
    monkeypatch.setattr(host, "system", lambda: "macos")
    monkeypatch.setattr(host, "architecture", lambda: "aarch64")
    native, shipped = profile.detect(), profile.load_profile("apple-m1")
    assert (native.tvm.mtriple, native.link.triple) == (shipped.tvm.mtriple, shipped.link.triple)
    for fact in ("microarchitecture", "l1d_kib", "l2_kib", "vector_bits", "vector_registers"):
        assert getattr(native.hardware, fact) == getattr(shipped.hardware, fact), fact
    assert native.hardware.features == ("asimd", "asimddp", "fp")
    assert set(shipped.hardware.features) <= host.cpu_features() and host.features_from() == "sysctl"


def test_the_program_of_a_bundle_asks_by_the_same_names() -> None:
    rows = re.findall(r'\{"(\w+)", "(hw\.optional\.[\w.]+)"\}', Path(HEADER).read_text())
    assert dict(rows) == mac_cpu.FEATURES and len(rows) == len(mac_cpu.FEATURES)

"""host.py, shown other machines' /proc and /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.cpu_quotas import QUOTAS, machine

from mhsa_compile.hardware import host


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


def test_x86_features_and_model(tmp_path: Path) -> None:
    block = "processor\t: {}\nmodel name\t: AMD EPYC 9R14\nflags\t\t: fpu avx2 fma\n\n"
    root = machine(tmp_path, {"proc/cpuinfo": block.format(0) + block.format(1)})
    assert host.cpu_features(root) == {"fpu", "avx2", "fma"}
    assert host.cpu_model(root) == "AMD EPYC 9R14"


@pytest.fixture
def on_aarch64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.platform, "machine", lambda: "aarch64")


@pytest.mark.usefixtures("on_aarch64")
def test_arm_features_and_model(tmp_path: Path) -> None:
    text = "processor\t: 0\nFeatures\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
    root = machine(tmp_path, {"proc/cpuinfo": text})
    assert host.cpu_features(root) == {"fp", "asimd", "asimddp"}
    assert host.cpu_model(root) == "implementer 0x41 part 0xd0c"
    assert not host.is_emulated(root)


def test_extensions_of_riscv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host.platform, "machine", lambda: "riscv64")
    text = "processor\t: 0\nhart\t\t: 0\nisa\t\t: rv64imafdcv_zicsr_zvfh\nuarch\t\t: sifive,u74-mc\n"
    root = machine(tmp_path, {"proc/cpuinfo": text})
    assert host.cpu_features(root) == {"i", "m", "a", "f", "d", "c", "v", "zicsr", "zvfh"}
    assert host.features_from(root) == "/proc/cpuinfo"


@pytest.mark.usefixtures("on_aarch64")
def test_an_emulator_is_noticed(tmp_path: Path) -> None:
    """QEMU 7.2 shows the file of the machine it runs on."""
    root = machine(tmp_path, {"proc/cpuinfo": "model name\t: AMD EPYC\nflags\t: avx2 fma\n"})
    assert host.is_emulated(root)
    assert host.cpu_model(root) == "an emulated aarch64 CPU"


@pytest.mark.parametrize(("name", "emulated"), [("qemu-x86_64-st", True), ("python3", False)])
def test_an_emulator_is_known_by_its_process(tmp_path: Path, name: str, emulated: bool) -> None:
    assert host.is_emulated(machine(tmp_path, {"proc/self/comm": f"{name}\n"})) is emulated


def test_data_caches_are_told_from_instruction_caches(tmp_path: Path) -> None:
    caches = [("1", "Instruction", "32K"), ("1", "Data", "48K"), ("2", "Unified", "2M")]
    files = {
        f"sys/devices/system/cpu/cpu0/cache/index{i}/{key}": value + "\n"
        for i, cache in enumerate(caches)
        for key, value in zip(("level", "type", "size"), cache, strict=True)
    }
    root = machine(tmp_path, files)
    assert (host.cache_kib(1, root), host.cache_kib(2, root), host.cache_kib(3, root)) == (48, 2048, None)


@pytest.mark.parametrize(("listed", "threads"), [("0", 1), ("0,64", 2), ("0-3", 4), ("0-1,64-65", 4)])
def test_threads_of_a_core_are_counted(tmp_path: Path, listed: str, threads: int) -> None:
    file = "sys/devices/system/cpu/cpu0/topology/thread_siblings_list"
    assert host.threads_per_core(machine(tmp_path, {file: f"{listed}\n"})) == threads


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    assert host.cpu_features(tmp_path) == frozenset()
    assert host.cpu_model(tmp_path) == "unknown"
    assert host.cache_kib(1, tmp_path) is None
    assert host.allowed_cpus(tmp_path) >= 1
    assert host.threads_per_core(tmp_path) == 1


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(("files", "expected"), QUOTAS.values(), ids=QUOTAS.keys())
def test_cpu_quotas(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert host.allowed_cpus(machine(tmp_path, files)) == expected


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3})
    assert host.allowed_cpus(tmp_path) == 1


@pytest.mark.parametrize(
    ("machine_name", "expected"),
    [("x86_64", "x86_64"), ("AMD64", "x86_64"), ("arm64", "aarch64"), ("riscv64", "riscv64")],
)
def test_architecture_is_spelled_as_llvm_does(
    monkeypatch: pytest.MonkeyPatch, machine_name: str, expected: str
) -> None:
    monkeypatch.setattr(host.platform, "machine", lambda: machine_name)
    assert host.architecture() == expected

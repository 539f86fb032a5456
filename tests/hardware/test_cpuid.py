"""What a CPU says of itself: this one, and others that are pretended."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from support.pretended_cpu import CPUS, made, pretend, pretend_arm

from mhsa_compile.hardware import cpuid, host, machine_code, microarchitecture, profile
from mhsa_compile.hardware.arm_cpu import Core
from mhsa_compile.runtime.standalone import bundle

on_x86 = pytest.mark.skipif(host.architecture() != "x86_64", reason="asks an x86-64 CPU")
HEADER = Path(bundle.__file__).parent / "program/cpu_features.h"


@on_x86
def test_this_cpu_says_what_linux_says_of_it() -> None:
    fields = next(host._cpuinfo(Path("/")))
    if "flags" not in fields:
        pytest.skip("no /proc/cpuinfo of this machine")
    cpu = cpuid.read()
    assert cpu is not None
    assert cpu.features == set(fields["flags"].split()) & cpuid.names()
    assert (cpu.vendor, str(cpu.family), str(cpu.model)) == (
        fields["vendor_id"], fields["cpu family"], fields["model"],
    )  # fmt: skip
    assert cpu.brand == fields["model name"]
    for level in (1, 2):
        if (told := host.cache_kib(level)) is not None:
            assert cpu.cache_kib(level) == told


@pytest.mark.parametrize("name", CPUS)
def test_cpus_of_one_marketing_name_are_told_apart(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend(monkeypatch, name)
    assert host.microarchitecture_name() == name
    assert host.cpu_model() == CPUS[name][4]
    assert (host.cpu_features() - {"hypervisor"}, host.features_from()) == (CPUS[name][5], "CPUID")
    native = profile.detect()
    assert native.hardware.microarchitecture == name
    assert f'microarchitecture = "{name}"' in native.to_toml()


@pytest.mark.parametrize(
    ("state", "mcpu"),
    [
        (0b1110_0111, "x86-64-v4"),
        (0b0110_0111, "x86-64-v3"),
        (0b111, "x86-64-v3"),
        (0b11, "x86-64-v2"),
        (0, "x86-64-v2"),
    ],
)
def test_registers_that_the_system_does_not_save_are_not_used(
    monkeypatch: pytest.MonkeyPatch, state: int, mcpu: str
) -> None:
    pretend(monkeypatch, "sapphirerapids", saved_state=state)
    features = host.cpu_features()
    assert "sse4_2" in features and "bmi2" in features and "amx_tile" not in features
    assert ("fma" in features, "avx" in features, "avx2" in features) == (state & 0b110 == 0b110,) * 3
    assert any(feature.startswith("avx512") for feature in features) == (mcpu == "x86-64-v4")
    assert ("xsave" in features) == (state != 0)
    assert profile.detect().tvm.mcpu == mcpu


def test_tiles_need_both_parts_of_their_state() -> None:
    assert "amx_tile" in made("sapphirerapids").features
    for part in (17, 18):
        assert "amx_tile" not in made("sapphirerapids", 0b1110_0111 | 1 << part).features


def test_a_cpu_without_the_leaves_has_not_their_features() -> None:
    zen3 = made("zen3")
    old = cpuid.CpuId({leaf: zen3.leaves[leaf] for leaf in ((0, 0), (1, 0))}, zen3.saved_state)
    assert old.features == zen3.features - {"abm", "avx2", "bmi1", "bmi2", "lahf_lm"}
    assert (old.brand, old.hypervisor, old.cache_kib(1)) == ("", "", None)


def test_qemu_without_hardwares_help_is_an_emulator(monkeypatch: pytest.MonkeyPatch) -> None:
    for hypervisor, emulated in (("KVMKVMKVM", False), ("TCGTCGTCGTCG", True)):
        monkeypatch.setattr(host, "architecture", lambda: "x86_64")
        answers = made("zen4", hypervisor=hypervisor)
        monkeypatch.setattr(cpuid, "read", lambda answers=answers: answers)
        assert (answers.hypervisor, host.is_emulated()) == (hypervisor, emulated)


@on_x86
@pytest.mark.parametrize("forbidden", ["_mapped_file", "_sealed_page"])
def test_either_way_to_run_instructions_serves(monkeypatch: pytest.MonkeyPatch, forbidden: str) -> None:
    first = cpuid.read()
    monkeypatch.setattr(machine_code, forbidden, lambda libc, code: None)
    other = cpuid.read.__wrapped__()  # its leaves also hold the number of the CPU that ran this
    assert (other.features, other.brand, other.model) == (first.features, first.brand, first.model)
    assert len(other.features) > 9


def test_where_no_instructions_may_run_the_file_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for way in ("_mapped_file", "_sealed_page"):
        monkeypatch.setattr(machine_code, way, lambda libc, code: None)
    monkeypatch.setattr(host, "architecture", lambda: "x86_64")
    monkeypatch.setattr(cpuid, "read", cpuid.read.__wrapped__)
    (tmp_path / "proc").mkdir()
    text = "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\nstepping\t: 1\nflags\t: fpu avx2\n"
    (tmp_path / "proc/cpuinfo").write_text(text)
    monkeypatch.setattr(host, "ROOT", tmp_path)
    assert (host.cpu_features(tmp_path), host.features_from(tmp_path)) == ({"fpu", "avx2"}, "/proc/cpuinfo")
    assert host.microarchitecture_name(tmp_path) == "zen4"
    (tmp_path / "proc/cpuinfo").unlink()
    assert (host.cpu_features(tmp_path), host.features_from(tmp_path)) == (frozenset(), "nobody")
    assert host.microarchitecture_name(tmp_path) == "unknown"


def test_no_page_is_written_and_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hardened kernel refuses: here its C library does."""
    seen = []

    class Strict(ctypes.CDLL):
        def __getattr__(self, name: str) -> object:
            function = super().__getattr__(name)
            if name not in ("mmap", "mprotect"):
                return function

            def checked(*arguments: int) -> object:
                seen.append(arguments[2])
                assert arguments[2] & 6 != 6, "a page that is written and run"
                function.restype, function.argtypes = checked.restype, checked.argtypes
                return function(*arguments)

            checked.restype, checked.argtypes = ctypes.c_int, None
            setattr(self, name, checked)
            return checked

    monkeypatch.setattr(machine_code.ctypes, "CDLL", Strict)
    for way in ("_mapped_file", "_sealed_page"):
        with monkeypatch.context() as patch:
            other = {"_mapped_file": "_sealed_page", "_sealed_page": "_mapped_file"}[way]
            patch.setattr(machine_code, other, lambda libc, code: None)
            with machine_code.callable_code(b"\xc3", None) as call:
                assert call is not None
    assert seen == [5, 3, 5]


@on_x86
def test_a_process_that_may_not_make_memory_executable_asks_too() -> None:
    """PR_SET_MDWE, which systemd's MemoryDenyWriteExecute= sets: the kernel itself refuses."""
    program = """
import ctypes, sys
from mhsa_compile.hardware import host, machine_code
if ctypes.CDLL(None).prctl(65, 1, 0, 0, 0):
    sys.exit(77)
print(host.features_from())
machine_code._mapped_file = lambda *arguments: None
with machine_code.callable_code(b"\\xc3", None) as call:
    print(call)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if done.returncode == 77:
        pytest.skip("a kernel before 6.3")
    assert done.stdout.split() == ["CPUID", "None"], done.stderr  # the control: a page made executable is refused


def test_an_arm_cpu_is_asked_for_its_features_and_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_arm(monkeypatch, {16: 0x119FFB, 26: 1 << 13}, Core(0x41, 0xD0C))
    assert host.cpu_features() == {
        "fp", "asimd", "aes", "pmull", "sha1", "sha2", "crc32", "atomics", "fphp", "asimdhp", "cpuid", "asimdrdm",
        "lrcpc", "dcpop", "asimddp", "i8mm",
    }  # fmt: skip
    assert host.features_from() == "the auxiliary vector"
    assert host.microarchitecture_name() == profile.detect().hardware.microarchitecture == "neoverse-n1"


def test_the_cores_of_an_arm_board_are_read_from_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "architecture", lambda: "aarch64")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 4})
    for cpu, midr in enumerate((0x410FD034, 0x410FD034, 0x410FD034, 0x410FD034, 0x410FD082)):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/regs/identification"
        folder.mkdir(parents=True)
        (folder / "midr_el1").write_text(f"0x{midr:016x}\n")
    assert host.microarchitecture_name(tmp_path) == "cortex-a53+cortex-a72"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {4})  # a process that stays on the large core
    assert host.microarchitecture_name(tmp_path) == "cortex-a72"
    assert host.cpu_model(tmp_path) == "implementer 0x41 part 0xd08"


def test_a_core_that_no_file_lists_is_an_emulators(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_arm(monkeypatch, {16: 1 << 11}, Core(0x41, 0xD40))
    assert host.microarchitecture_name() == "neoverse-v1"
    assert Core.of(0x411FD401) == Core(0x41, 0xD40)


def test_unlisted_cpus_are_named_by_their_numbers() -> None:
    names = [microarchitecture.of_x86("GenuineIntel", 6, model, 0) for model in (0xFE, 0xFD)]
    names += [microarchitecture.of_x86("CentaurHauls", 7, 27, 0), microarchitecture.of_arm([Core(0x41, 0xFFE)])]
    assert names == ["genuineintel-6-254", "genuineintel-6-253", "centaurhauls-7-27", "0x41-0xffe"]


def test_no_two_rows_of_the_table_are_for_one_cpu() -> None:
    table = microarchitecture._table()
    known: dict[tuple[str, int, int, int], str] = {}
    for row in table["x86"]:
        least, most = row.get("steppings", (0, 15))
        for name, models in row["names"].items():
            for first, last in models:
                assert 0 <= first <= last <= 255
                for model, stepping in product(range(first, last + 1), range(least, most + 1)):
                    cpu = row["vendor"], row["family"], model, stepping
                    assert known.setdefault(cpu, name) == name, cpu
    for parts in table["arm"].values():
        assert len(set(parts.values())) == len(parts)


@on_x86
def test_a_bundles_program_asks_as_python_does(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = """
#include <cstdio>
#include "cpu_features.h"
int main() {
  for (const std::string& word : mhsa::cpu_features()) std::puts(word.c_str());
}
"""
    words = [
        compiler,
        "-std=c++17",
        "-Wall",
        "-Werror",
        f"-I{HEADER.parent}",
        "-x",
        "c++",
        "-",
        "-o",
        tmp_path / "asks",
    ]
    subprocess.run(list(map(str, words)), input=program, text=True, check=True)
    done = subprocess.run([tmp_path / "asks"], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == host.cpu_features()


def test_a_bundles_program_has_the_same_table() -> None:
    rows = re.findall(r'\{(\w+), (\d), k(E\wx), (\d+), "(\w+)", (\w+)\}', HEADER.read_text())
    states = {"0": 0, "kSse": 0b10, "kAvx": 0b110, "kAvx512": 0b1110_0110, "kTiles": 0b11 << 17}
    registers = ("Eax", "Ebx", "Ecx", "Edx")
    theirs = [
        (
            (1 << 31 | 1 if leaf == "kAmd" else int(leaf), int(subleaf)),
            registers.index(register),
            int(bit),
            name,
            states[state],
        )
        for leaf, subleaf, register, bit, name, state in rows
    ]
    ours = [
        (leaf, register, bit, name, cpuid.state_of(name))
        for leaf, by_register in cpuid._BITS.items()
        for register, bits in by_register.items()
        for bit, name in bits.items()
    ]
    assert theirs == ours

"""profile.py and the files of targets/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.this_cpu import CPUINFO

from mhsa_compile.errors import TargetError
from mhsa_compile.hardware import data_paths, host, profile
from mhsa_compile.hardware.profile import (
    CpuProfile,
    CudaProfile,
    TargetProfile,
    load_cpu_profile,
    load_profile,
    profile_names,
)

FILES = [name for name in profile_names() if isinstance(load_profile(name), CpuProfile) and name != profile.NATIVE]
GPUS = [name for name in profile_names() if isinstance(load_profile(name), CudaProfile)]
ARMV7 = {"neon": "neon", "vfp3": "vfpv3", "vfp4": "vfpv4"}
RISCV = {"v": "v"}
WEBASSEMBLY = {"simd128": "simd128", "relaxed-simd": "relaxed_simd"}
REGISTERS = {"x86-64-v3": 16, "armv7-generic": 16, "riscv64-generic": 8}  # of 128 bits: 32 floats, there are no vectors
REGISTERS |= {"wasm32": 16, "wasm32-relaxed": 16}  # of x86, on which most of it runs: its own are any number
REGISTERS |= {"x86-64-v3-macos": 16, "x86-64-v3-windows": 16}

MINIMAL = """family = "cpu"
[tvm]
kind = "llvm"
mtriple = "riscv64-linux-gnu"
[hardware]
[link]
triple = "riscv64-linux-gnu"
"""
MINIMAL_GPU = """family = "cuda"
[tvm]
kind = "cuda"
arch = "sm_90a"
mtriple = "x86_64-linux-gnu"
[hardware]
multiprocessors = 132
shared_kib_per_block = 227
shared_kib_per_multiprocessor = 228
registers_per_multiprocessor = 65536
threads_per_multiprocessor = 2048
blocks_per_multiprocessor = 32
[link]
triple = "x86_64-linux-gnu"
"""


def test_every_promised_target_is_there() -> None:
    x86 = {"x86-64-v3", "x86-64-v4", "znver4", "znver5", "sapphirerapids", "graniterapids"}
    arm = {"aarch64-generic", "cortex-a53", "cortex-a72", "cortex-a76", "neoverse-n1", "neoverse-v1", "neoverse-v2"}
    assert x86 | arm | {"armv7-generic", "riscv64-generic", "wasm32", "wasm32-relaxed"} <= set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_llvm_knows_the_cpu_and_its_features_are_stated(name: str) -> None:
    """A feature that LLVM may use but the profile does not state would crash on a machine without it."""
    tvm = pytest.importorskip("tvm")
    from tvm.target import codegen

    stated = load_profile(name)
    with tvm.target.Target(stated.tvm_config()) as target:
        assert codegen.llvm_is_valid_cpu(stated.tvm.mcpu, stated.tvm.mtriple)
        architecture = stated.tvm.mtriple.partition("-")[0]
        names = CPUINFO | {"armv7": ARMV7, "riscv64": RISCV, "wasm32": WEBASSEMBLY}.get(architecture, {})
        used = {names[feature] for feature in map(str, codegen.llvm_get_cpu_features(target)) if feature in names}
    assert used <= set(stated.hardware.features)


@pytest.mark.parametrize("name", GPUS)
def test_tvm_takes_a_gpu(name: str) -> None:
    tvm = pytest.importorskip("tvm")

    stated = load_profile(name)
    assert isinstance(stated, CudaProfile)
    target = tvm.target.Target(stated.tvm_config())
    assert str(target.attrs["arch"]) == stated.tvm.arch
    assert str(target.host.attrs["mtriple"]) == stated.tvm.mtriple


# By hand: (threads, registers of each, bytes of shared memory) -> blocks at once.
BLOCKS = {
    "cuda-sm80": [((128, 128, 0), 4), ((256, 64, 48 * 1024), 3), ((1024, 32, 0), 2), ((128, 32, 163 * 1024), 1),
                  ((128, 255, 0), 2), ((128, 32, 164 * 1024), 0), ((64, 168, 0), 6), ((160, 128, 0), 3)],
    "cuda-sm86": [((128, 32, 0), 12), ((32, 32, 0), 16), ((1024, 32, 0), 1), ((128, 32, 99 * 1024), 1),
                  ((256, 128, 40 * 1024), 2)],
    "cuda-sm90a": [((384, 168, 227 * 1024), 1), ((128, 168, 100 * 1024), 2), ((1025, 32, 0), 0), ((512, 128, 0), 1)],
}  # fmt: skip


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_at_once(name: str) -> None:
    stated = load_profile(name)
    assert isinstance(stated, CudaProfile)
    assert [stated.blocks_at_once(*block) for block, _ in BLOCKS[name]] == [blocks for _, blocks in BLOCKS[name]]


@pytest.mark.parametrize(
    ("capability", "target"),
    [((7, 5), None), ((8, 0), "cuda-sm80"), ((8, 6), "cuda-sm86"), ((8, 9), "cuda-sm86"), ((9, 0), "cuda-sm90a"),
     ((10, 0), None)],
)  # fmt: skip
def test_the_best_target_of_a_gpu(capability: tuple[int, int], target: str | None) -> None:
    found = profile.profile_of_gpu(capability)
    assert (found and found.name) == target


def test_what_is_for_cpus_refuses_a_gpu() -> None:
    with pytest.raises(TargetError, match="a CPU: tuning is for those so far, got 'cuda-sm80', a GPU"):
        load_cpu_profile("cuda-sm80", "tuning")
    assert load_cpu_profile("znver4", "tuning") == load_profile("znver4")


@pytest.mark.parametrize("name", profile_names())
def test_toml_round_trip(name: str, tmp_path: Path) -> None:
    original = load_profile(name)
    path = tmp_path / f"{name}.toml"
    path.write_text(original.to_toml())
    assert load_profile(path) == load_profile(str(path)) == original


def test_lanes_follow_vector_width_and_dtype() -> None:
    assert load_profile("x86-64-v3").vector_lanes("float32") == 8
    assert load_profile("x86-64-v4").vector_lanes("float32") == 16
    assert load_profile("cortex-a72").vector_lanes("float32") == 4
    assert load_profile("x86-64-v4").vector_lanes("bfloat16") == 32
    with pytest.raises(TargetError, match="complex64"):
        load_profile("x86-64-v4").vector_lanes("complex64")


@pytest.mark.parametrize("name", FILES)
def test_registers_are_the_instruction_sets(name: str) -> None:
    assert load_profile(name).hardware.vector_registers == REGISTERS.get(name, 32)


def test_left_out_hardware_is_a_modest_machine(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(MINIMAL)
    found = load_profile(path)
    assert found.name == "board"
    assert found.tvm_config() == {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}
    assert msgspec.to_builtins(found.hardware) == {
        "cores": 1, "vector_bits": 128, "vector_registers": 16, "l1d_kib": 32, "l2_kib": 256, "features": (),
        "pages_in_turn": 1, "modelled_as": "", "microarchitecture": "",
    }  # fmt: skip


def test_a_name_may_have_its_architecture_in_front() -> None:
    assert load_profile("aarch64-cortex-a76") == load_profile("cortex-a76")
    assert load_profile("x86_64-znver4") == load_profile("znver4")
    for name in ("x86_64-cortex-a76", "aarch64-native", "cortex-a76-"):
        with pytest.raises(TargetError):
            load_profile(name)


@pytest.mark.parametrize(
    ("name", "near"),
    [("znver6", "znver5"), ("x86_64_v3", "x86-64-v3"), ("neoverse-v3", "neoverse-v"), ("qqq", "mhsa targets")],
)
def test_unknown_names_are_answered_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(TargetError, match=near) as refusal:
        load_profile(name)
    assert repr(name) in str(refusal.value)


BROKEN = {
    "unknown key": (MINIMAL.replace("[hardware]", "[hardware]\nl3_kib = 4"), "l3_kib"),
    "missing key": (MINIMAL.replace('kind = "llvm"', ""), "kind"),
    "wrong type": (MINIMAL.replace("[hardware]", '[hardware]\ncores = "8"'), "cores"),
    "zero": (MINIMAL.replace("[hardware]", "[hardware]\nvector_registers = 0"), "vector_registers"),
    "odd width": (MINIMAL.replace("[hardware]", "[hardware]\nvector_bits = 100"), "vector_bits"),
    "family": (MINIMAL.replace('"cpu"', '"gpu"'), "gpu"),
    "family and kind": (MINIMAL.replace('"cpu"', '"cuda"'), "tvm.kind"),
    "a CPU's facts of a GPU": (MINIMAL_GPU.replace("[hardware]", "[hardware]\nl1d_kib = 4"), "l1d_kib"),
    "a GPU's facts of a CPU": (MINIMAL.replace("[hardware]", "[hardware]\nmultiprocessors = 4"), "multiprocessors"),
    "no architecture": (MINIMAL_GPU.replace('arch = "sm_90a"', ""), "arch"),
    "no such architecture": (MINIMAL_GPU.replace("sm_90a", "sm_hopper"), "tvm.arch"),
    "no family": (MINIMAL.replace('family = "cpu"', ""), "family"),
    "a name of its own": ('name = "mine"\n' + MINIMAL, "name"),
    "not TOML": ("family = ", "Invalid value"),
    "not text": ("\xff", "utf-8"),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TargetError, match=r"broken\.toml") as refusal:
        load_profile(path)
    assert reason in str(refusal.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="No such file"):
        load_profile(tmp_path / "absent.toml")


def detected(monkeypatch: pytest.MonkeyPatch, root: Path, architecture: str, cpuinfo: str) -> TargetProfile:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(host, "architecture", lambda: architecture)
    return profile.detect(root)


@pytest.mark.parametrize(
    ("level", "mcpu", "bits", "registers"),
    [(profile._V4, "x86-64-v4", 512, 32), (profile._V3, "x86-64-v3", 256, 16), (profile._V2, "x86-64-v2", 128, 16),
     (frozenset(), "x86-64", 128, 16)],
)  # fmt: skip
def test_native_x86_takes_the_highest_level(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: frozenset[str], mcpu: str, bits: int, registers: int
) -> None:
    found = detected(monkeypatch, tmp_path, "x86_64", f"flags\t: fpu {' '.join(level)} hypervisor\n")
    assert (found.tvm.mcpu, found.hardware.vector_bits, found.hardware.vector_registers) == (mcpu, bits, registers)
    assert set(found.hardware.features) == level  # what the code needs, and nothing that other machines may lack
    assert (found.hardware.l1d_kib, found.hardware.l2_kib) == (32, 256)  # this /sys is empty


@pytest.mark.parametrize(
    ("level", "present", "mattr"),
    [(profile._V4, {"avx512_bf16", "avx512_vnni", "avx_vnni"}, ("+avx512bf16", "+avx512vnni")),
     (profile._V4, {"avx512_vnni", "amx_tile", "amx_int8"}, ("+amx-int8", "+amx-tile", "+avx512vnni")),
     (profile._V4, {"amx_bf16"}, ()), (profile._V3, {"amx_tile", "avx_vnni"}, ("+avxvnni",)),
     (profile._V2, {"avx_vnni"}, ())],
)  # fmt: skip
def test_native_x86_takes_the_dot_products_of_its_level(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, level: frozenset[str], present: set[str], mattr: tuple[str, ...]
) -> None:
    found = detected(monkeypatch, tmp_path, "x86_64", f"flags\t: {' '.join(sorted(level | present))}\n")
    assert found.tvm.mattr == mattr
    assert set(found.hardware.features) - level == {CPUINFO[flag[1:]] for flag in mattr}
    assert found.hardware.features == tuple(sorted(found.hardware.features))


@pytest.mark.parametrize("mcpu", profile._DOTS)
def test_llvm_needs_no_more_for_the_dot_products_than_is_stated(mcpu: str) -> None:
    tvm = pytest.importorskip("tvm")
    from tvm.target import codegen

    levels = {level[0]: ("x86_64", level[1]) for level in profile._X86_LEVELS}
    architecture, level = {**levels, "generic": ("aarch64", {"fp", "asimd"})}[mcpu]
    dots = profile._DOTS[mcpu]
    config = {"kind": "llvm", "mtriple": f"{architecture}-linux-gnu", "mcpu": mcpu, "mattr": list(dots.values())}
    with tvm.target.Target(config) as target:
        used = {CPUINFO[feature] for feature in map(str, codegen.llvm_get_cpu_features(target)) if feature in CPUINFO}
    assert used <= level | dots.keys()


def test_native_arm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = detected(monkeypatch, tmp_path, "aarch64", "Features\t: fp asimd aes\n")
    assert (found.tvm.mtriple, found.tvm.mcpu, found.link.triple) == (
        "aarch64-linux-gnu", "generic", "aarch64-linux-gnu.2.17",
    )  # fmt: skip
    assert (found.hardware.vector_bits, found.hardware.vector_registers) == (128, 32)
    assert found.hardware.features == ("asimd", "fp")


def test_what_makes_wrong_code_is_left_out() -> None:
    """tests/devices/test_arm_parity.py runs that code: int8-cross-no-bias on the cortex-a53."""
    assert load_profile("cortex-a53").tvm_config()["mattr"] == ["-balance-fp-ops"]
    assert "-balance-fp-ops" in load_profile("neoverse-v1").tvm_config()["mattr"]
    assert "mattr" not in load_profile("x86-64-v4").tvm_config()


def test_native_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = detected(monkeypatch, tmp_path, "riscv64", "")
    assert found.tvm_config() == {"kind": "llvm", "mtriple": "riscv64-linux-gnu"}


def test_native_runs_here() -> None:
    native = load_profile("native")
    assert set(native.hardware.features) <= host.usable_features()
    assert native.hardware.cores == host.allowed_cpus()


def test_a_profile_survives_the_manifest() -> None:
    for name in ("sapphirerapids", "cuda-sm90a"):
        original = load_profile(name)
        manifest: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(original)))
        assert msgspec.convert(manifest, TargetProfile) == original


def test_data_folders() -> None:
    assert (data_paths.targets_folder() / "README.md").is_file()
    assert (data_paths.schedules_folder() / "README.md").is_file()


def test_profiles_load_no_compiler() -> None:
    code = (
        "import sys; from mhsa_compile.hardware.profile import load_profile; load_profile('native'); "
        "sys.exit(any(name in sys.modules for name in ('tvm', 'torch', 'onnx', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

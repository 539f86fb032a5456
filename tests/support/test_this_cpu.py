"""What a CPU of another kind would run: /proc/cpuinfo is replaced, LLVM is asked as always."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fuzz.strategies import drawn

from mhsa_compile.hardware import host
from mhsa_compile.hardware.profile import CpuProfile, load_profile
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel
from mhsa_compile.kernels.interface.ops import LinearOp
from support import this_cpu
from support.kernel_runs import compiled, vector_machine

FEATURES = {name: set(load_profile(name).hardware.features) for name in ("x86-64-v3", "x86-64-v4", "sapphirerapids")}
V4, DOTS512 = vector_machine(512, 32, "x86-64-v4"), vector_machine(512, 32, "x86-64-v4", ("avx512_bf16", "avx512_vnni"))


@pytest.fixture(autouse=True)
def on_x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "architecture", lambda: "x86_64")


def cpu(folder: Path, features: set[str]) -> Path:
    """The root of a machine's files."""
    (folder / "proc").mkdir()
    (folder / "proc/cpuinfo").write_text(f"flags\t: fpu {' '.join(sorted(features))}\n")
    return folder


def test_a_cpu_without_avx512_says_what_it_lacks(tmp_path: Path) -> None:
    root = cpu(tmp_path, FEATURES["x86-64-v3"])
    v3, baseline = vector_machine(512, 32), vector_machine(512, 32, "x86-64")
    assert this_cpu.lacking(v3.tvm_config(), root) is this_cpu.lacking(baseline.tvm_config(), root) is None
    assert this_cpu.lacking(V4.tvm_config(), root) == "this CPU lacks avx512bw avx512cd avx512dq avx512f avx512vl"
    assert str(this_cpu.lacking(DOTS512.tvm_config(), root)).startswith("this CPU lacks avx512_bf16 avx512_vnni ")
    assert str(this_cpu.lacking(load_profile("neoverse-n1").tvm_config(), root)) == "this CPU is no aarch64"


def test_a_cpu_with_avx512_runs_what_it_has(tmp_path: Path) -> None:
    root = cpu(tmp_path, FEATURES["x86-64-v4"])
    assert this_cpu.lacking(V4.tvm_config(), root) is None
    assert this_cpu.lacking(DOTS512.tvm_config(), root) == "this CPU lacks avx512_bf16 avx512_vnni"
    assert "sse4a" in str(this_cpu.lacking(load_profile("znver4").tvm_config(), root))


@pytest.mark.parametrize(("name", "level"), [("x86-64-v3", "x86-64-v3"), ("sapphirerapids", "x86-64-v4")])
def test_wide_vectors_are_compiled_for_what_is_here(name: str, level: str, tmp_path: Path) -> None:
    root = cpu(tmp_path, FEATURES[name])
    assert this_cpu.level("x86-64-v4", root) == level
    assert this_cpu.level("x86-64-v3", root) == "x86-64-v3"
    assert this_cpu.level("x86-64", root) == "x86-64"


@pytest.mark.parametrize(
    ("name", "machines"),
    [
        ("x86-64-v3", ["native", "native", "avx2", "split512", "neon", "scalar"]),
        ("x86-64-v4", ["native", "native", "avx2", "avx512", "neon", "scalar"]),
        ("sapphirerapids", ["native", "native", "avx2", "avx512", "neon", "scalar", "dots512", "dots256", "tiles"]),
    ],
)
def test_cases_are_drawn_for_machines_that_run_here(name: str, machines: list[str], tmp_path: Path) -> None:
    assert drawn(cpu(tmp_path, FEATURES[name])) == machines


def pretend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(host, "cpu_features", lambda root=host.ROOT: frozenset(FEATURES[name]))


def test_a_kernel_that_would_kill_the_process_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "x86-64-v3")
    op, kernel = LinearOp(("B", "L"), 7, (5,), (True,), (False,)), CpuLinearKernel()

    def built(profile: CpuProfile) -> Any:
        return compiled(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)

    with pytest.raises(AssertionError, match="this CPU lacks avx512bw"):
        built(V4)
    assert built(vector_machine(512, 32))["run"]


def test_a_test_that_needs_more_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "x86-64-v3")
    with pytest.raises(pytest.skip.Exception, match="this CPU lacks avx512_bf16"):
        this_cpu.require(DOTS512.tvm_config())
    this_cpu.require(vector_machine(256, 16).tvm_config())

"""sanitize_gpu.py without a GPU: what it asks of compute-sanitizer, and what it makes of the answers."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from campaigns import sanitize_gpu
from support.cases import PARITY

from mhsa_compile.errors import DeviceError
from mhsa_compile.runtime import cuda_devices


@pytest.fixture(params=[0])
def sanitizer(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program of this name on the path that notes how it was called, and ends as the file `code` says. The parameter
    is what the run without it ends with."""
    alone = request.param
    program = tmp_path / "compute-sanitizer"
    program.write_text(
        f'#!/bin/sh\necho "$PYTORCH_NO_CUDA_MEMORY_CACHING $*" >> {tmp_path}/calls\n'
        f"echo $MHSA_KEEP_ARTIFACTS\nexit $(cat {tmp_path}/code)\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "code").write_text("0")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(cuda_devices, "driver", lambda: SimpleNamespace(count=1))
    monkeypatch.setattr(sanitize_gpu, "compiling", lambda expression: [sys.executable, "-c", f"exit({alone})"])
    return tmp_path


def test_every_tool_runs_over_the_same_tests(sanitizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize_gpu.main([]) == 0
    calls = (sanitizer / "calls").read_text().splitlines()
    assert sorted(call.split()[2] for call in calls) == sorted(sanitize_gpu.TOOLS)  # all at once
    assert all(call.startswith("1 --tool ") and "--error-exitcode 97" in call and "-m gpu" in call for call in calls)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-5:] == [f"{name}: clean" for name in ("no tool", *sanitize_gpu.TOOLS)]
    kept = {line for line in lines if "mhsa-sanitized-" in line}
    assert len(kept) == 1  # what one compiled, all find


def test_what_whoever_calls_keeps_is_used(
    sanitizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MHSA_KEEP_ARTIFACTS", "/of/the/caller")
    assert sanitize_gpu.main(["--tool", "memcheck"]) == 0
    assert "/of/the/caller" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("sanitizer", [1], indirect=True)
def test_what_fails_by_itself_is_looked_at_all_the_same(sanitizer: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize_gpu.main(["--tool", "memcheck"]) == 1
    assert capsys.readouterr().out.endswith("no tool: exit code 1\nmemcheck: clean\n")


@pytest.mark.parametrize(("code", "said"), [(97, "it found something"), (5, "no test was run"), (1, "exit code 1")])
def test_what_is_not_clean_is_said(sanitizer: Path, capsys: pytest.CaptureFixture[str], code: int, said: str) -> None:
    (sanitizer / "code").write_text(str(code))
    assert sanitize_gpu.main(["--tool", "memcheck"]) == 1
    assert f"memcheck: {said}" in capsys.readouterr().out


def test_without_it_or_without_a_gpu_that_is_said(
    sanitizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> Any:
        raise DeviceError("device", "an NVIDIA GPU", "none")

    monkeypatch.setattr(cuda_devices, "driver", refuse)
    assert sanitize_gpu.main([]) == 2
    monkeypatch.setattr(cuda_devices, "driver", lambda: SimpleNamespace(count=0))
    assert sanitize_gpu.main([]) == 2
    monkeypatch.setattr(sanitize_gpu, "PLACES", (str(sanitizer / "nowhere"),))
    monkeypatch.setenv("PATH", str(sanitizer / "nowhere"))
    assert sanitize_gpu.main([]) == 2
    said = capsys.readouterr().err.splitlines()
    assert ["an NVIDIA GPU, got none" in line for line in said[:2]] == [True, True]
    assert "compute-sanitizer: expected it on the path" in said[2]
    assert not (sanitizer / "calls").exists()


def test_its_tests_are_of_the_matrix() -> None:
    words = sanitize_gpu.CASES.split(" or ")
    chosen = {word: [case for case in PARITY if word in case.name and case.weights is None] for word in words}
    assert all(chosen.values()), chosen
    dtypes = {case.spec.dtype for cases in chosen.values() for case in cases}
    assert dtypes == {"float32", "bfloat16", "float16"}

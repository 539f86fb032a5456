"""How many threads the C++ program of a bundle takes: as many as Python's runtime takes in the same place."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.cpu_quotas import QUOTAS, machine

from mhsa_compile.hardware import host
from mhsa_compile.runtime.standalone import bundle

_PROGRAM = """
#include <cstdio>
#include "allowed_cpus.h"
int main(int count, char** roots) {
  std::printf("%d\\n", mhsa::allowed_cpus());
  for (int i = 1; i < count; ++i) std::printf("%d\\n", static_cast<int>(mhsa::CpuQuotas(roots[i]).least(8)));
}
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    path = tmp_path_factory.mktemp("cpus") / "cpus"
    words = [
        compiler,
        "-std=c++17",
        "-Wall",
        "-Werror",
        "-I",
        Path(bundle.__file__).parent / "program",
        "-x",
        "c++",
        "-",
    ]
    subprocess.run([*map(str, words), "-o", str(path)], input=_PROGRAM, text=True, check=True)
    return path


def answers(program: Path, *roots: Path) -> list[int]:
    done = subprocess.run([program, *roots], capture_output=True, text=True, check=True)
    return list(map(int, done.stdout.split()))


def test_quotas_are_read_as_in_python(program: Path, tmp_path: Path) -> None:
    roots = [machine(tmp_path / str(i), files) for i, (files, _) in enumerate(QUOTAS.values())]
    for root in roots:
        root.mkdir(exist_ok=True)
    least = answers(program, *roots)[1:]
    assert {name: max(1, cpus) for name, cpus in zip(QUOTAS, least, strict=True)} == {
        n: e for n, (_, e) in QUOTAS.items()
    }


def test_this_machine(program: Path) -> None:
    assert answers(program) == [host.allowed_cpus()]


def test_affinity_counts(program: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    done = subprocess.run([program], capture_output=True, text=True, preexec_fn=lambda: os.sched_setaffinity(0, {cpu}))
    assert done.stdout == "1\n"

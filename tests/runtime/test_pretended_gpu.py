"""Artifacts with real machine code, loaded and called through TVM's own runtime for CUDA, over a driver that is none.

pretended_gpu/ has it: two GPUs whose memory is the host's, and who note what is launched, where and on which stream
(scenarios.py), or compute it on the CPU from the CUDA C++ that a GPU would run (arithmetic.py). Not what a GPU would
say, but all that the host's side does, and what TVM's schedules compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.cuda import cuda_compiler
from support.pretended_gpu import arithmetic, libraries, scenarios

import mhsa_compile as mhsa

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda_compiler")]


def in_a_child(file: str, folder: Path, *words: str) -> None:
    """The tests of a file in a process of its own: a library once loaded stays."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations", "5", file, *words]
    environment = {**os.environ, libraries.FOLDER: str(folder)}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(child.stdout[-2000:])
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]


def test_scenarios(tmp_path: Path) -> None:
    libraries.build(tmp_path)
    for name, spec in scenarios.SPECS.items():
        torch.manual_seed(0)
        mhsa.compile(mhsa.MultiHeadAttention(spec).eval(), "cuda-sm90a").save(tmp_path / name)
    for name, spec in scenarios.CORES.items():
        mhsa.compile(mhsa.ScaledDotProductAttention(spec), "cuda-sm90a").save(tmp_path / name)
    in_a_child(scenarios.__file__, tmp_path)


@pytest.mark.thorough
def test_arithmetic(tmp_path: Path) -> None:
    cuda_compiler.require_nvrtc()  # whose headers the kernels need
    libraries.build(tmp_path)
    in_a_child(arithmetic.__file__, tmp_path)

"""How many blocks a multiprocessor holds, against CUDA's own calculator, which is a header in C."""

from __future__ import annotations

import subprocess
from itertools import product
from pathlib import Path

import pytest
from support.cuda.cuda_compiler import require_nvrtc

from mhsa_compile.compiler.codegen import cuda_compiler
from mhsa_compile.hardware import host, zig
from mhsa_compile.hardware.profile import CudaProfile, load_profile

SOURCE = Path(__file__).with_name("occupancy.c")
REGISTERS = (16, 24, 32, 40, 41, 64, 96, 128, 168, 169, 200, 240, 255)


@pytest.fixture(scope="module")
def calculator(tmp_path_factory):
    """A program of NVIDIA's header; see occupancy.c."""
    require_nvrtc()  # whose packages have the header
    include = cuda_compiler._package_folder() / "include"
    program = tmp_path_factory.mktemp("occupancy") / "occupancy"
    zig.run("cc", f"{host.architecture()}-linux-gnu", ["-O1", f"-I{include}", "-o", program, SOURCE], "a calculator")
    return program


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["cuda-sm80", "cuda-sm86", "cuda-sm90a"])
def test_blocks_at_once_are_those_of_cudas_own_calculator(calculator, name):
    stated = load_profile(name)
    assert isinstance(stated, CudaProfile)
    hardware, (major, minor) = stated.hardware, stated.tvm.arch.removeprefix("sm_").rstrip("a")
    sizes = (
        hardware.registers_per_multiprocessor,
        hardware.threads_per_multiprocessor,
        hardware.shared_kib_per_multiprocessor,
        hardware.shared_kib_per_block,
    )
    shared = range(0, 1024 * hardware.shared_kib_per_block + 1, 3968)
    blocks = list(product(range(32, 1025, 32), REGISTERS, shared))
    lines = "\n".join(f"{threads} {registers} {size}" for threads, registers, size in blocks)
    said = subprocess.run(
        [calculator, major, minor, *map(str, sizes)], input=lines, capture_output=True, text=True, check=True
    ).stdout
    theirs = dict(zip(blocks, map(int, said.split()), strict=True))
    wrong = {block: held for block, held in theirs.items() if stated.blocks_at_once(*block) != held}
    assert not wrong
    assert len(set(theirs.values())) > 8

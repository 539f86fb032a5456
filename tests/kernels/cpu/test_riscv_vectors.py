"""The target riscv64-v: a file of facts, and no code. Its inner loops, from assembly; `make test-arm` runs it."""

from __future__ import annotations

import re
import struct

import pytest
from support.kernel_runs import assembly

import mhsa_compile as mhsa
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.kernels.cpu.linear.kernel import CpuLinearKernel
from mhsa_compile.kernels.interface.ops import LinearOp

RISCV = 243  # e_machine of ELF


def inner_loops(text: str) -> list[list[str]]:
    """The bodies of loops, from a label to the branch back to it, with no label between."""
    lines = [line.strip() for line in text.splitlines()]
    begins = {line.rstrip(":"): i for i, line in enumerate(lines) if re.fullmatch(r"\.LBB\w+:", line)}
    loops = []
    for i, line in enumerate(lines):
        back = re.match(r"b\w+\s.*(\.LBB\w+)$", line)
        if back and begins.get(back[1], i) < i and not any(begins[back[1]] < other < i for other in begins.values()):
            loops.append(lines[begins[back[1]] + 1 : i])
    return loops


def linear_code(target: str) -> str:
    profile, kernel = load_profile(target), CpuLinearKernel()
    op = LinearOp(("B", "L"), 768, (768,), (True,), (False,))
    return assembly(kernel.emit(op, profile, kernel.default_config(op, profile)), profile)


def test_the_inner_loops_are_of_vectors() -> None:
    """Of tiles of 4 rows by 4 vectors, two steps of K a turn, and of 2 by 4, four steps: weights are loaded as vectors,
    elements of x multiply them from a scalar register, and the sums stay where they are."""
    loops = [loop for loop in inner_loops(linear_code("riscv64-v")) if any("vfmacc" in line for line in loop)]
    counted = []
    for loop in loops:
        assert not [line for line in loop if line.startswith("call") or re.match(r"vs\d?\w*\.v.*sp", line)]
        patterns = (r"vfm(acc|add)\.vf", r"flw", r"vle32\.v")
        counted.append(tuple(sum(bool(re.match(pattern, line)) for line in loop) for pattern in patterns))
    assert counted == [(4 * 4 * 2, 4 * 2, 4 * 2), (2 * 4 * 4, 2 * 4, 4 * 4)]


def test_without_vectors_there_are_none() -> None:
    assert not re.search(r"\sv[a-z]+\d*\.v", linear_code("riscv64-generic"))


@pytest.mark.thorough
def test_a_block_is_linked_and_asks_for_vectors(tmp_path) -> None:
    artifact = mhsa.compile(mhsa.AttentionSpec(embed_dim=32, num_heads=2, causal=True), target="riscv64-v")
    header = (artifact.path / "module.so").read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and struct.unpack_from("<H", header, 18) == (RISCV,)
    assert artifact.manifest.target.hardware.features == ("v",)
    with pytest.raises(mhsa.errors.ArtifactError, match="riscv64"):
        mhsa.load(artifact)

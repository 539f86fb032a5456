"""Libraries for ARM, RISC-V and WebAssembly, linked here by Zig: the same bytes every time, for C libraries of ten
years ago. `make test-arm` runs these."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mhsa_compile.hardware.profile import load_profile, profile_names

pytestmark = pytest.mark.arm

FOREIGN = [
    name for name in profile_names() if name != "native" and not load_profile(name).tvm.mtriple.startswith("x86_64")
]
BUILD = """
import sys, torch, mhsa_compile as mhsa
for target in sys.argv[2:]:
    torch.manual_seed(3)
    spec = mhsa.AttentionSpec(embed_dim=512, num_heads=8)
    mhsa.compile(spec, target).save(f"{sys.argv[1]}/{target}")
"""


EACH = sorted({load_profile(name).tvm.mtriple: name for name in FOREIGN}.values())
"""The last target of every architecture and system."""
OTHERS = sorted({*FOREIGN} - {*EACH})


def build(place: Path, targets: list[str]) -> None:
    """Artifacts of these targets, by a process with hashes and addresses of its own."""
    subprocess.run([sys.executable, "-c", BUILD, str(place), *targets], check=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build(place := tmp_path_factory.mktemp("one"), FOREIGN)
    return place


def hashes(artifact: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in artifact.iterdir()}


@pytest.mark.parametrize("targets", [EACH, pytest.param(OTHERS, marks=pytest.mark.thorough)], ids=["each", "others"])
def test_another_process_makes_the_same_bytes(built: Path, tmp_path: Path, targets: list[str]) -> None:
    build(tmp_path, targets[::-1])
    assert {target: hashes(built / target) for target in targets} == {t: hashes(tmp_path / t) for t in targets}
    assert all("module.so" in hashes(built / target) for target in targets)


@pytest.mark.parametrize("target", [name for name in FOREIGN if "gnu" in load_profile(name).link.triple])
def test_no_symbol_is_younger_than_the_profile_says(built: Path, target: str) -> None:
    """The dynamic symbols name versions of the C library: none of these is later than the profile's."""
    code = (built / target / "module.so").read_bytes()
    versions = {tuple(map(int, found)) for found in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", code)}
    promised = load_profile(target).link.triple.partition("gnu")[2].lstrip("eabihf.").split(".")
    assert versions or load_profile(target).tvm.mtriple.startswith("armv7")  # whose memset is another, and its own
    assert max(versions, default=(2, 0)) <= tuple(map(int, promised)) <= (2, 27)

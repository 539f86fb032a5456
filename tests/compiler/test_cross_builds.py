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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of artifacts by target, of two processes, each with hashes and addresses of its own."""
    places = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")
    for place, targets in zip(places, (FOREIGN, FOREIGN[::-1]), strict=True):
        subprocess.run([sys.executable, "-c", BUILD, str(place), *targets], check=True)
    return places


@pytest.mark.thorough_only("aarch64-generic")
@pytest.mark.parametrize("target", FOREIGN)
def test_another_process_makes_the_same_bytes(built: tuple[Path, Path], target: str) -> None:
    one, other = (
        {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in (place / target).iterdir()}
        for place in built
    )
    assert one == other
    assert "module.so" in one


@pytest.mark.parametrize("target", [name for name in FOREIGN if "gnu" in load_profile(name).link.triple])
def test_no_symbol_is_younger_than_the_profile_says(built: tuple[Path, Path], target: str) -> None:
    """The dynamic symbols name versions of the C library: none of these is later than the profile's."""
    code = (built[0] / target / "module.so").read_bytes()
    versions = {tuple(map(int, found)) for found in re.findall(rb"\0GLIBC_(\d+)\.(\d+)(?:\.\d+)?(?=\0)", code)}
    promised = load_profile(target).link.triple.partition("gnu")[2].lstrip("eabihf.").split(".")
    assert versions or load_profile(target).tvm.mtriple.startswith("armv7")  # whose memset is another, and its own
    assert max(versions, default=(2, 0)) <= tuple(map(int, promised)) <= (2, 27)

"""An artifact that was saved before the package was put in folders (2026-11-22) loads, and is as right as it was."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

import mhsa_compile as mhsa
from mhsa_compile.hardware import host

GOLDEN = Path(__file__).parents[1] / "support" / "golden" / "2026-11-causal-key-padding"
NEEDED = {"avx2", "fma"}


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not host.cpu_features() >= NEEDED, reason="it is for an x86-64 with AVX2"
)
def test_it_is_right() -> None:
    verdict = mhsa.verify(GOLDEN, cases=[{"L": 1}, {"L": 7}, {"L": 197}])
    assert verdict.ok, verdict.worst
    assert [op.kernel for op in mhsa.Artifact.open(GOLDEN).manifest.ops] == [
        "cpu.linear",
        "cpu.attention",
        "cpu.linear",
    ]


def test_it_opens_anywhere() -> None:
    spec = mhsa.Artifact.open(GOLDEN).manifest.spec
    assert spec == mhsa.AttentionSpec(embed_dim=8, num_heads=2, causal=True, mask="key_padding")

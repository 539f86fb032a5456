"""The wheel mhsa-runtime for aarch64, on the emulated machine: the bits are those of the whole package."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest
from support import light_runtime
from support.arm import machine

from release import wheels

BROUGHT = ("tvm", "apache_tvm-")
"""What the machine has and an empty environment with the light wheel has not: TVM's package."""


@pytest.mark.arm
@pytest.mark.thorough
def test_the_wheel_of_aarch64(tmp_path: Path) -> None:
    root = machine.require()
    artifact = light_runtime.small_artifact(tmp_path, "neoverse-n1")
    np.save(tmp_path / "x.npy", np.random.default_rng(3).standard_normal((2, 17, 24), np.float32))
    whole = ran(root, machine.environment(root), artifact, tmp_path / "whole.npy")
    wheel = wheels.runtime_wheel(light_runtime.whole(), light_runtime.tvm("aarch64"), tmp_path)
    site = light_runtime.unpacked(wheel, tmp_path / "site")
    packages = tmp_path / "packages"
    packages.mkdir()
    for entry in (root / "site").iterdir():
        if entry.name != BROUGHT[0] and not entry.name.startswith(BROUGHT[1]):
            (packages / entry.name).symlink_to(entry)
    variables = {**machine.environment(root), "PYTHONPATH": f"{site}:{packages}"}
    light = ran(root, variables, artifact, tmp_path / "light.npy")
    assert Path(light[0]).is_relative_to(site) and light[1] == ""
    assert whole[0] == str(light_runtime.REPOSITORY / "mhsa_compile/__init__.py")
    y = np.load(tmp_path / "light.npy")
    assert y.tobytes() == np.load(tmp_path / "whole.npy").tobytes() and y.any()


def ran(root: Path, variables: dict[str, str], artifact: Path, y: Path) -> list[str]:
    """The lines of `light_runtime.RUN` on the machine."""
    command = machine.command(root, "-c", light_runtime.RUN, artifact, y, y.parent / "x.npy")
    child = subprocess.run(command, env=variables, cwd=y.parent, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()

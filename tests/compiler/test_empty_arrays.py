"""empty_arrays.py: the host's code of kernels, run where no GPU is, up to the launch.

The tensors that it is given say that they lie on a GPU. A launch there fails, since nothing can run the kernel: what
comes back without an error has launched nothing.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "support" / "cuda" / "empty_grid_worker.py"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What each call came to, in a process of its own: it lets TVM believe that there is a GPU to choose."""
    child = subprocess.run([sys.executable, WORKER], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return dict(line.split(": ", 1) for line in child.stdout.splitlines())


@pytest.mark.thorough_only("0-5-launched")
@pytest.mark.parametrize("form", ["launched", "bound", "scheduled"])
@pytest.mark.parametrize(("rows", "columns"), [(0, 5), (4, 0), (0, 0)])
def test_nothing_is_launched_without_blocks(outcomes: dict[str, str], form: str, rows: int, columns: int) -> None:
    assert outcomes[f"{form}, {rows} x {columns}, guarded"] == "nothing launched"
    assert outcomes[f"{form}, {rows} x {columns}, as it was"] == "launched"  # so it is the guard that counts


@pytest.mark.parametrize("form", ["launched", "bound", "scheduled"])
def test_what_has_blocks_is_launched(outcomes: dict[str, str], form: str) -> None:
    assert outcomes[f"{form}, 4 x 5, guarded"] == "launched"


def test_a_fixed_grid_is_left_alone(outcomes: dict[str, str]) -> None:
    assert outcomes["fixed, guarded"] == "as it was"

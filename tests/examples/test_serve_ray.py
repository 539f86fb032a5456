"""The app on Ray Serve: its batches; Ray itself, started and loaded, in `make test-models` if it is installed."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from minilm.ragged import PADDED, of_about_one_length

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ([5], [[0]]),
        ([5, 5, 5], [[0, 1, 2]]),
        ([30, 4, 31, 5, 4], [[1, 4, 3], [0, 2]]),
        ([1, 100, 10], [[0], [2], [1]]),
    ],
)
def test_batches_of_about_one_length(lengths: list[int], batches: list[list[int]]) -> None:
    assert of_about_one_length(lengths) == batches
    for batch in batches:
        sizes = [lengths[i] for i in batch]
        assert max(sizes) * len(sizes) <= PADDED * sum(sizes)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not installed: ray (make bench-serve-ray)")
def test_one_and_two_replicas_answer_under_load(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--model", model, "--clients", "4", "--seconds", "2", "--json", figures]
    command = [sys.executable, "-m", "serve_ray.load", *map(str, options)]
    child = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=300, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
    assert re.findall(r"^(\d) replica.* 0 errors$", child.stdout, re.MULTILINE) == ["1", "2"]
    assert [found["errors"] for found in json.loads(figures.read_text())] == [0, 0]

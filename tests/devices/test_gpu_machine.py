"""gpu_machine.py and runs_noted.py: what the tests on a GPU take for granted, checked without one."""

from __future__ import annotations

import numpy as np
import pytest
from support import runs_noted
from support.cuda import gpu_machine


def test_the_last_lines_count_the_runs_of_each_machine() -> None:
    noted = [("a GPU", "this, L=7", 0.25), ("another", "that, L=7", 0.5), ("a GPU", "that, L=197", 1.5)]
    assert runs_noted.summary(noted) == [
        "a GPU: 1 of 2 runs within the error budget",
        "the largest error / budget: 1.500, that, L=197",
        "another: 1 of 1 runs within the error budget",
        "the largest error / budget: 0.500, that, L=7",
    ]
    assert runs_noted.summary([]) == []


def test_what_runs_calls_by_name_and_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_machine, "there", lambda array: array)
    monkeypatch.setattr(gpu_machine, "back", lambda tensor: tensor)
    run = gpu_machine.through(lambda x, y: (x + y, x - y))
    x, y = np.ones(3), np.arange(3)
    for found in (run({"x": x, "y": y}), run((x, y))):
        np.testing.assert_array_equal(found, [x + y, x - y])
    (alone,) = gpu_machine.through(lambda x: 2 * x)((x,))
    np.testing.assert_array_equal(alone, 2 * x)

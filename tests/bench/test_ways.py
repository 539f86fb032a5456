"""benchmarks/ways.py: results are held against the plain model's, ratios are of one plain model, programs are read."""

from __future__ import annotations

import math
import sys
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import ways
from processes import Turn


@pytest.mark.parametrize("plain", ways.PLAIN)
def test_a_result_that_is_not_the_plain_models_is_not_timed(plain: str, tmp_path: Path) -> None:
    model, sets = ways.plain_model(plain, ways.Size(32, 4, 48))
    expected = ways.by_pytorch(model, sets, tmp_path, 1)[0]().numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ways.SIZES, "tiny", ways.Size(32, 4, 48))
        np.save(tmp_path / ways.FIRST_RESULT, expected)
        with ways.opened(ways.PLAIN_WAY, plain, "tiny", tmp_path, 1) as calls:
            assert len(calls) == ways.SETS and np.array_equal(calls[0]().numpy(), expected)
        np.save(tmp_path / ways.FIRST_RESULT, expected * 1.01)
        with pytest.raises(ValueError, match="off by"), ways.opened(ways.PLAIN_WAY, plain, "tiny", tmp_path, 1):
            pass


def test_ratios_and_means() -> None:
    figures = ways.Figures("a CPU", {}, date(2026, 11, 27), 2)
    figures.seconds["256"] = {"plain, encoder": [2.0, 4.0, 3.0], "accelerate": [1.0, 1.5, 2.0], "plain, bert": [1.0]}
    assert ways.ratio(figures.seconds["256"], "accelerate") == 2.0
    assert math.isnan(ways.ratio(figures.seconds["256"], "ONNX file")) and math.isnan(ways.ratio({}, "spec"))
    console = Console(width=200, record=True)
    console.print(ways.table(figures))
    shown = console.export_text()
    assert "3e+03, 1.5e+03, 2.00" in shown and "geometric mean" in shown


def test_what_the_bundles_program_says_is_read(tmp_path: Path) -> None:
    program = tmp_path / ways.PROGRAM / "attention"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho 'y (1, 128, 256)'\necho '1.250 ms a call, the median of 50, 2 threads'\n")
    program.chmod(0o755)
    assert ways.program_turn(Turn("alone", 0.1), tmp_path, 2).calls == [1.25e-3]

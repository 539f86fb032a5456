"""What commands print while they work, and what they know of it afterwards."""

from __future__ import annotations

import time

import pytest

from mhsa_compile.cli.common import output


def test_stages_are_printed_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    seconds: dict[str, float] = {}
    with output.stages(seconds) as stage:
        stage("export")
        time.sleep(0.02)
        stage("build")
    assert list(seconds) == ["export", "build"] and seconds["export"] >= 0.02
    assert capsys.readouterr().err.splitlines() == ["export", "build"]

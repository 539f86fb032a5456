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


def test_warnings_of_ours_are_sentences_and_those_of_others_stay_as_they_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.warning(UserWarning("the model holds no attention"), UserWarning, output.__file__, 7)
    output.warning(UserWarning("theirs"), UserWarning, "/elsewhere/theirs.py", 7)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "Warning: The model holds no attention." and second == "/elsewhere/theirs.py:7: UserWarning: theirs"

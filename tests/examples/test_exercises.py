"""exercises/: solutions are right, unsolved files say their hint, every typical mistake has a message of its own."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from exercises import check

ROOT = Path(__file__).parents[2]
MISTAKES = [
    (name, message) for name in check.FILES for message in import_module(f"exercises.solutions.{name}").MISTAKES
]


def test_there_are_a_dozen_and_the_page_lists_them() -> None:
    assert [int(name[1:3]) for name in check.FILES] == list(range(1, len(check.FILES) + 1)) and len(check.FILES) >= 12
    listed = re.findall(
        r"^\| \[(\d+)\]\((e\d\d_\w+)\.py\) \|", (ROOT / "exercises" / "README.md").read_text(), re.MULTILINE
    )
    assert listed == [(str(int(name[1:3])), name) for name in check.FILES]
    assert {path.stem for path in (check.FOLDER / "solutions").glob("e*.py")} == set(check.FILES)


@pytest.mark.thorough
@pytest.mark.parametrize("name", check.FILES)
def test_the_solution_is_right_and_the_file_is_open(name: str) -> None:
    solved = check.check(name, check.answer_of(import_module(f"exercises.solutions.{name}")))
    assert solved == check.Verdict(True, "right")
    verdict = check.check(name, check.answer_of(import_module(f"exercises.{name}")))
    assert not verdict.solved and verdict.message.startswith("not solved yet. Hint: ") and len(verdict.message) > 50


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "message"), MISTAKES)
def test_a_typical_mistake_has_its_own_message(name: str, message: str) -> None:
    mistakes = import_module(f"exercises.solutions.{name}").MISTAKES
    assert check.check(name, mistakes[message]) == check.Verdict(False, message)


def test_other_mistakes_are_said_as_well() -> None:
    def message(answer: check.Answer) -> str:
        verdict = check.check("e13_variance_of_mean", answer)
        assert not verdict.solved
        return verdict.message

    assert message(lambda variance, r, h: 3 * variance) == "expected 0.5, got 12"
    assert message(lambda variance, r, h: np.nan) == "1 of 1 numbers are NaN"
    assert message(lambda variance, r, h: np.ones(3)) == "expected shape (), got (3,)"
    assert message(lambda variance, r, h: "much") == "expected numbers, got str"
    assert message(lambda variance, r: 0.0).startswith("TypeError: ")
    assert message(lambda variance, r, h: None).startswith("ValueError: it returns None")
    assert check.check("e13_variance_of_mean", lambda variance, r, h: variance * (r + (1 - r) / h)).solved


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["13", "--solution"]) == 0 and "e13_variance_of_mean: right" in capsys.readouterr().out
    assert check.main(["13"]) == 1 and "not solved yet. Hint: h variances" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=f"expected 1 to {len(check.FILES)}, got 99"):
        check.main(["99"])

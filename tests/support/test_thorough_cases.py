"""Marks that name cases leave out these, or all but these; what they name is there."""

from __future__ import annotations

from typing import Any, cast

import pytest

from support.thorough_cases import BUT, ONLY, mark_cases

CASES = ("bool-7", "bool-17", "additive-7")


class Case:
    """What marking asks of an item of pytest's."""

    def __init__(self, case: str, mark: pytest.Mark) -> None:
        self.case, self.nodeid, self.marks = case, f"tests/test_masks.py::test_masks[{case}]", {mark.name: mark}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = getattr(pytest.mark, name).mark


def marked(kind: str, *names: str, complete: bool = True) -> list[str]:
    """The cases that such a mark makes thorough."""
    cases = [Case(case, getattr(pytest.mark, kind)(*names).mark) for case in CASES]
    mark_cases(cast("Any", cases), complete=complete)
    return [case.case for case in cases if case.get_closest_marker("thorough")]


def test_cases_are_left_out() -> None:
    assert marked(ONLY, "bool-7") == ["bool-7"]
    assert marked(ONLY, "*-7") == ["bool-7", "additive-7"]
    assert marked(BUT, "bool-7") == ["bool-17", "additive-7"]
    assert marked(BUT, "bool-*") == ["additive-7"]


def test_a_name_that_is_no_case_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match="no case is named 'bool-8'"):
        marked(ONLY, "bool-7", "bool-8")
    assert marked(ONLY, "bool-7", "bool-8", complete=False) == ["bool-7"]  # as where single cases were asked for

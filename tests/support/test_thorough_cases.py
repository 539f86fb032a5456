"""Marks that name cases leave out these, or all but these; what they name is there."""

from __future__ import annotations

from typing import Any, cast

import pytest

from support.thorough_cases import BUT, ONLY, failing, mark_cases

CASES = ("bool-7", "bool-17", "additive-7")


class Case:
    """What marking asks of an item of pytest's."""

    def __init__(self, case: str, mark: pytest.Mark) -> None:
        self.case, self.nodeid, self.marks = case, f"tests/test_masks.py::test_masks[{case}]", {mark.name: mark}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)

    def add_marker(self, name: str) -> None:
        self.marks[name] = getattr(pytest.mark, name).mark


def marked(kind: str, *names: str) -> tuple[list[str], list[str]]:
    """(The cases that such a mark makes thorough, those of its names that are no case's)."""
    cases = [Case(case, getattr(pytest.mark, kind)(*names).mark) for case in CASES]
    absent = [name for _, names in mark_cases(cast("Any", cases)).values() for name in names]
    return [case.case for case in cases if case.get_closest_marker("thorough")], absent


def test_cases_are_left_out() -> None:
    assert marked(ONLY, "bool-7") == (["bool-7"], [])
    assert marked(ONLY, "*-7") == (["bool-7", "additive-7"], [])
    assert marked(BUT, "bool-7") == (["bool-17", "additive-7"], [])
    assert marked(BUT, "bool-*") == (["additive-7"], [])


def test_a_name_that_is_no_case_is_told() -> None:
    assert marked(ONLY, "bool-7", "bool-8", "float-*") == (["bool-7"], ["bool-8", "float-*"])


def test_such_a_name_fails(request: pytest.FixtureRequest) -> None:
    (item,) = failing({"test_masks": (request.node, ["bool-8"])})
    with pytest.raises(pytest.fail.Exception, match="test_such_a_name_fails has no case bool-8"):
        item.runtest()

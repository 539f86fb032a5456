"""The marks `thorough_but` and `thorough_only`, which divide the cases of one parametrized test.

`@pytest.mark.thorough` stands at a test of which `make test` runs nothing, or at a row (`pytest.param`) of its table.
Where tables are computed, or cross each other, these two name cases instead, as pytest does between the brackets of an
id: `thorough_but("bool-7")` leaves out all but these, `thorough_only("bool-7")` leaves out these. A `*` in a name is
anything.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import pytest

BUT, ONLY = "thorough_but", "thorough_only"


class AbsentCase(pytest.Item):
    """Fails, and says which name of a mark is no case's; a failing test is seen in every process of pytest-xdist."""

    def runtest(self) -> None:
        pytest.fail(self.name, pytrace=False)


def mark_cases(items: Iterable[pytest.Item]) -> dict[str, tuple[pytest.Item, list[str]]]:
    """Adds the mark `thorough` to the cases that either mark leaves out.

    Returns the names that are no case's: function -> (one of its cases, these names).
    """
    functions = defaultdict[str, dict[str, pytest.Item]](dict)
    for item in items:
        if any(item.get_closest_marker(kind) for kind in (BUT, ONLY)):
            function, _, case = item.nodeid.partition("[")
            functions[function][case.removesuffix("]")] = item
    absent = {}
    for function, cases in functions.items():
        first = next(iter(cases.values()))
        marks = {kind: mark.args for kind in (BUT, ONLY) if (mark := first.get_closest_marker(kind))}
        names = matches([name for args in marks.values() for name in args], cases)
        if unknown := [name for name, of_name in names.items() if not of_name]:
            absent[function] = first, unknown
        for case in left_out({kind: [names[name] for name in args] for kind, args in marks.items()}, cases):
            cases[case].add_marker("thorough")
    return absent


def failing(absent: Mapping[str, tuple[pytest.Item, list[str]]]) -> list[pytest.Item]:
    """A test for each function, which fails and says its names that are no case's."""
    return [
        AbsentCase.from_parent(item.parent, name=f"{item.name.partition('[')[0]} has no case {', '.join(names)}")
        for item, names in absent.values()
    ]


def matches(names: Iterable[str], cases: Collection[str]) -> dict[str, set[str]]:
    """The cases of each name."""
    patterns = {name: ".*".join(map(re.escape, name.split("*"))) for name in names}
    return {name: {case for case in cases if re.fullmatch(text, case, re.DOTALL)} for name, text in patterns.items()}


def left_out(marks: Mapping[str, Iterable[set[str]]], cases: Collection[str]) -> set[str]:
    """The cases that `make test` leaves out, by the cases that each mark names."""
    names = set().union(*marks.get(ONLY, ()))
    if BUT in marks:
        names |= set(cases) - set().union(*marks[BUT])
    return names

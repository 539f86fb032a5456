"""Docstrings of this project as reStructuredText, for the reference: they are plain text, with tables of arguments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

_ARGUMENT = re.compile(r"([A-Za-z_]\w*(?:, [A-Za-z_]\w*)*) {2,}(\S.*)")
_SPECIAL = re.compile(r"([*|_])")


def restructured(lines: Iterable[str]) -> list[str]:
    """The docstring with each table of arguments as a list of definitions, and no sign that means something there."""
    return [line for paragraph in _paragraphs(lines) for line in (*_rewritten(paragraph), "")]


def _paragraphs(lines: Iterable[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in (*lines, ""):
        if line.strip():
            paragraph.append(line.rstrip())
        elif paragraph:
            yield paragraph
            paragraph = []


def _rewritten(paragraph: list[str]) -> list[str]:
    if paragraph[0].startswith(">>>"):
        return paragraph
    if all(line.startswith("    ") for line in paragraph):  # a drawing or code
        return ["::", "", *paragraph]
    rewritten: list[str] = []
    for line in paragraph:
        if argument := _ARGUMENT.fullmatch(line):
            rewritten += ["", f"``{argument[1]}``", f"    {_escaped(argument[2])}"]
        elif line.startswith(" "):
            rewritten.append(f"    {_escaped(line.strip())}")
        else:
            if rewritten and rewritten[-1].startswith("    "):
                rewritten.append("")
            rewritten.append(_escaped(line))
    return rewritten


def _escaped(line: str) -> str:
    """Outside of `code`, which stays as it is."""
    words = line.split("`")
    words[::2] = [_SPECIAL.sub(r"\\\1", word) for word in words[::2]]
    return "``".join(words) if len(words) % 2 else line.replace("`", "\\`")

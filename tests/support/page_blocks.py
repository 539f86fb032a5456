"""The blocks of code on a page of Markdown, and running those of Python and of `mhsa` as a reader would type them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

FENCE = re.compile(r"^```(\w*|\{[\w-]+\})\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    line: int
    """The number of the first line of code in its page."""
    code: str
    page: Path


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        yield Block(match[1], text.count("\n", 0, match.start(2)) + 1, match[2], page)


def prose(page: Path) -> str:
    """The text of the page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def split_at(title: str, page: Path) -> tuple[list[Block], list[Block]]:
    """The blocks before and behind this heading, which must be there."""
    before, heading, _ = page.read_text(encoding="utf-8").partition(f"\n{title}\n")
    assert heading, f"{page} has no heading {title!r}"
    line, every = before.count("\n") + 2, list(blocks(page))
    return [block for block in every if block.line < line], [block for block in every if block.line > line]


def run_python(code: Iterable[Block], names: dict[str, Any]) -> dict[str, Any]:
    """The names that the blocks leave; they run in order, from those given on."""
    names["__name__"] = "page"
    for block in code:
        assert block.language == "python", f"{block.page}: line {block.line}"
        padding = "\n" * (block.line - 1)  # so that a traceback names the line of the page
        exec(compile(padding + block.code, str(block.page), "exec"), names)
    return names


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a shell block, comments left out."""
    for line in block.code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def run_mhsa(block: Block, hurry: Iterable[str] = ()) -> None:
    """Its commands `mhsa`; `hurry` are further words of `mhsa tune`."""
    from typer.testing import CliRunner

    from mhsa_compile.cli.app import app

    for words in commands(block):
        if words[0] == "mhsa":
            result = CliRunner().invoke(app, [*words[1:], *(hurry if words[1] == "tune" else ())])
            where = f"{block.page.name}, block at line {block.line}: {shlex.join(words)}"
            assert result.exit_code == 0, f"{where}\n{result.output}\n{result.exception!r}"


def run_page(page_blocks: Iterable[Block], **names: Any) -> dict[str, Any]:
    """The names that the blocks leave."""
    for block in page_blocks:
        if block.language == "python":
            run_python([block], names)
        else:
            run_mhsa(block)
    return names

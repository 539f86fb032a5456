"""The blocks of code on a page of Markdown, and running those of Python and of `mhsa` as a reader would type them."""

from __future__ import annotations

import ast
import re
import shlex
import symtable
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


def sections(page: Path) -> dict[str, list[Block]]:
    """The blocks below each heading of the second level, by its words."""
    lines = page.read_text(encoding="utf-8").splitlines()
    heads = [number for number, line in enumerate(lines, 1) if line.startswith("## ")]
    every = list(blocks(page))
    below = zip(heads, [*heads[1:], len(lines) + 1], strict=True)
    return {lines[i - 1][3:]: [block for block in every if i < block.line < j] for i, j in below}


def with_sources(chosen: Iterable[Block], every: list[Block]) -> list[Block]:
    """The chosen blocks of Python and, of those before them, each that binds a name which one of them reads."""
    sources, waiting = set(), [every.index(block) for block in chosen]
    names = [_names(block) for block in every]
    while waiting:
        sources.add(here := waiting.pop())
        for name in names[here][0]:
            makers = [i for i in range(here) if name in names[i][1]]
            waiting += [i for i in makers[-1:] if i not in sources]
    return [every[i] for i in sorted(sources)]


def _names(block: Block) -> tuple[set[str], set[str]]:
    """(read before the block binds them, bound): of its statements, one after another."""
    read: set[str] = set()
    in_functions: set[str] = set()  # which are called later, when the whole block has run
    bound: set[str] = set()
    for statement in ast.parse(block.code).body:
        table = symtable.symtable(ast.unparse(statement), str(block.page), "exec")
        stored = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
        loaded = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
        inner = _globals(table)
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            in_functions |= inner
        else:
            loaded |= inner
        read |= loaded - bound - (stored if isinstance(statement, ast.For | ast.With) else set())
        bound |= stored
    return read | (in_functions - bound), bound


def _globals(table: symtable.SymbolTable) -> set[str]:
    """The names of the module that scopes within this one read."""
    names = {
        symbol.get_name() for child in table.get_children() for symbol in child.get_symbols() if symbol.is_global()
    }
    return names.union(*map(_globals, table.get_children()))


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

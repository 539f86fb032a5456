"""The pages of the site: which there are, by the lists that readers of the repository see, too; and llms.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from posixpath import dirname, join, normpath
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FIRST, LIST, LAB = "README.md", "docs/README.md", "docs/lab/README.md"
PATTERNS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "{}/**/README.md")
FOLDERS = ("benchmarks", "examples", "exercises", "mhsa_compile", "schedules", "targets", "tests")
DAYS, FURTHER = "Lab pages", "Inside of the repository"
"""The sections of the lab's pages, and of those that no list names."""
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+\.md)(?:#[^)]*)?\)")
_SECTION = re.compile(r"^## (.+)$")


class Page(NamedTuple):
    path: str
    """From the repository's root on."""
    words: str
    """What is in it, as its list says, or as it begins."""

    @property
    def title(self) -> str:
        (title,) = re.findall(r"\A(?:\s|<!--.*-->)*# (.+)$", self.text, re.MULTILINE)
        return title.replace("`", "")

    @property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")


def paths() -> list[str]:
    """Every page, sorted."""
    patterns = [pattern.format(folder) for pattern in PATTERNS for folder in (FOLDERS if "{}" in pattern else ("",))]
    return sorted({path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)})


def sections() -> dict[str, list[Page]]:
    """All pages but the first and the list itself: those of the list by its headings, the lab's, and what is left."""
    of: dict[str, list[Page]] = {"": []}
    section = ""
    for line in (ROOT / LIST).read_text(encoding="utf-8").splitlines():
        if heading := _SECTION.match(line):
            section = heading[1]
            of[section] = []
        of[section] += _row(line, LIST)
    days = (ROOT / LAB).read_text(encoding="utf-8").splitlines()
    of[DAYS] = [page for line in days for page in _row(line, LAB)]
    listed = {page.path for pages in of.values() for page in pages} | {FIRST, LIST}
    of[FURTHER] = [Page(path, _beginning(path)) for path in paths() if path not in listed]
    return {heading: list(dict.fromkeys(pages)) for heading, pages in of.items() if pages}


def _row(line: str, page: str) -> Iterator[Page]:
    """The pages that the first cell of a table's row links to."""
    if line.startswith("| "):
        cells = line.strip("| ").split(" | ")
        for _, target in _LINK.findall(cells[0]):
            yield Page(normpath(join(dirname(page), target)), _plain(cells[-1]))


def _beginning(path: str) -> str:
    """The first sentence behind the title."""
    _, *paragraphs = (ROOT / path).read_text(encoding="utf-8").split("\n\n")
    sentence, _, _ = _plain(" ".join(paragraphs[0].split())).partition(". ")
    return sentence.removesuffix(".") + "."


def _plain(words: str) -> str:
    """Words without the links in them."""
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", words)


def llms_txt() -> str:
    """What https://llmstxt.org describes: the pages, as Markdown, where the site has them."""
    lines = [f"# {Page(FIRST, '').title}", "", f"> {_beginning(FIRST)}", "", "## Start", ""]
    lines += [_entry(Page(FIRST, "one command, one call, one figure")), _entry(Page(LIST, "every page, in one table"))]
    optional: list[Page] = []
    for heading, listed in sections().items():
        if heading in (DAYS, FURTHER):
            optional += listed
        else:
            lines += ["", f"## {heading}", "", *map(_entry, listed)]
    lines += ["", "## Optional", "", *map(_entry, optional)]
    return "\n".join(lines) + "\n"


def _entry(page: Page) -> str:
    return f"- [{page.title}](_sources/{page.path}): {page.words}"

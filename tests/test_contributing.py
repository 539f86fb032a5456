"""The Python blocks of CONTRIBUTING.md do what they say: they run in order, as someone who follows the page would type
them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.page_blocks import blocks, run_python

from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.spec import mask_patterns

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"


@pytest.mark.thorough
def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(KERNELS, "cpu", KERNELS["cpu"])  # a copy of what the blocks change: undone afterwards
    monkeypatch.setattr(mask_patterns, "KINDS", dict(mask_patterns.KINDS))
    code = [block for block in blocks(PAGE) if block.language == "python"]
    assert len(code) == 5
    run_python(code, {})


def test_the_files_that_it_names_are_there() -> None:
    """Paths as the page writes them: in the repository, or in the package."""
    named = re.findall(r"`((?:[\w-]+/)+(?:\w+\.(?:py|md))?|\w+\.(?:toml|txt|md))`", PAGE.read_text("utf-8"))
    made = {"small.toml"}
    assert len(named) > 40
    places = (ROOT, ROOT / "mhsa_compile")
    assert {name for name in named if not any((place / name).exists() for place in places)} <= made

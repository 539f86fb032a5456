"""The Python blocks of CONTRIBUTING.md do what they say: they run in order, as someone who follows the page would type
them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mhsa_compile.kernels.registry import KERNELS
from mhsa_compile.spec import mask_patterns

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(KERNELS, "cpu", KERNELS["cpu"])  # a copy of what the blocks change: undone afterwards
    monkeypatch.setattr(mask_patterns, "KINDS", dict(mask_patterns.KINDS))
    text, names = PAGE.read_text("utf-8"), dict[str, Any](__name__="contributing")
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == 4
    for block in blocks:
        padding = "\n" * text.count("\n", 0, block.start(1))  # so that a traceback names the line of the page
        exec(compile(padding + block[1], str(PAGE), "exec"), names)


def test_the_files_that_it_names_are_there() -> None:
    """Paths as the page writes them: in the repository, or in the package."""
    named = re.findall(r"`((?:[\w-]+/)+(?:\w+\.(?:py|md))?|\w+\.(?:toml|txt|md))`", PAGE.read_text("utf-8"))
    made = {"small.toml"}
    assert len(named) > 40
    places = (ROOT, ROOT / "mhsa_compile")
    assert {name for name in named if not any((place / name).exists() for place in places)} <= made

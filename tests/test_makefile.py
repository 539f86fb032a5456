"""`make` alone prints a line for every target, with the words that stand behind it in the Makefile."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which("make") is None, reason="not installed: make")
def test_help_has_a_line_for_every_target() -> None:
    printed = subprocess.run(["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = dict(re.fullmatch(r"(\S+) +(\S.*)", line).groups() for line in printed.stdout.splitlines())
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert targets is not None and sorted(lines) == sorted(targets[1].split())

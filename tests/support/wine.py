"""Programs for Windows, run here by Wine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_DEBIAN = "/usr/lib/wine/wine64"


def program() -> str:
    """Wine's loader of 64-bit programs; the test is skipped without one."""
    found = shutil.which("wine64") or (_DEBIAN if Path(_DEBIAN).exists() else shutil.which("wine"))
    if found is None:
        pytest.skip("no Wine on this machine: apt-get install wine64")
    return found


def run(place: Path, *words: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Runs a program for Windows in a folder, with a Windows of its own in `home`."""
    environment = {**os.environ, "WINEPREFIX": str(home), "WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml="}
    command = [program(), *map(str, words)]
    return subprocess.run(
        command, cwd=place, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240
    )

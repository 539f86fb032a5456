"""A headless Chromium, driven by Playwright: the one that the system has, or Playwright's own."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REQUIRED = "MHSA_REQUIRE_SYSTEM"
"""The environment variable that is 1 where a missing package is a failure, as in .ci/run."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def playwright() -> ModuleType:
    """Playwright's functions; the module that asks is skipped without it, and fails where it has to be there."""
    if importlib.util.find_spec("playwright") is None:
        missing("not installed: playwright (make browser)")
    from playwright import sync_api

    return sync_api


@contextmanager
def opened() -> Iterator[Any]:
    """A browser; the test is skipped without one, and fails where it has to be there."""
    with playwright().sync_playwright() as running:
        own = running.chromium.executable_path
        program = next(filter(None, map(shutil.which, NAMES)), own)
        if not Path(program).exists():
            missing("no Chromium on this machine: apt-get install chromium")
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # Chromium refuses to be root in one
        browser = running.chromium.launch(executable_path=program, args=sandbox)
        yield browser
        browser.close()


def missing(why: str) -> None:
    """Skips the test or module that asks, or fails it where what is missing has to be there."""
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(why)
    pytest.skip(why, allow_module_level=True)

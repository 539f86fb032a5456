"""files/patience.py: a line on a terminal, from two seconds on, and nowhere else."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

PROGRAM = """
import time
from mhsa_compile.files import patience

patience.SECONDS = {patience}
with patience.shown_stages("mhsa.compile") as tell, patience.shown_stages("another") as other:
    tell("export")
    other("unseen")
    time.sleep(0.5)
    tell("build")
    time.sleep({seconds})
"""


def words_of(patience: float, seconds: float, *, terminal: bool = True) -> str:
    """What a process that waits writes to its stderr."""
    words = [sys.executable, "-c", PROGRAM.format(patience=patience, seconds=seconds)]
    if not terminal:
        return subprocess.run(words, stderr=subprocess.PIPE, text=True, check=True, timeout=60).stderr
    master, slave = pty.openpty()
    subprocess.run(words, stderr=slave, check=True, timeout=60, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    os.set_blocking(master, False)
    written = b""
    try:
        while part := os.read(master, 65536):
            written += part
    except (BlockingIOError, OSError):
        pass
    os.close(master)
    return written.decode()


def test_whoever_waits_on_a_terminal_reads_what_for() -> None:
    written = words_of(0.1, 0.4)
    assert "mhsa.compile: export" in written and "mhsa.compile: build" in written
    assert "another" not in written, "a terminal has one such line"
    assert written.rstrip().endswith("\x1b[2K") or written.endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the line is gone"


@pytest.mark.parametrize(("patience", "terminal"), [(30.0, True), (0.1, False)])
def test_what_is_short_and_what_has_no_terminal_is_silent(patience: float, terminal: bool) -> None:
    assert words_of(patience, 0.1, terminal=terminal) == ""

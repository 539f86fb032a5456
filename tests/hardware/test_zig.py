"""Zig's compiler as a neighbour that may hang, find no room, or lack its cache folder."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mhsa_compile.errors import BuildError, OutputError
from mhsa_compile.hardware import zig


def pretended(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """A package `ziglang` that runs `program` instead, in Python, as one without a program of its own does."""
    (folder / "ziglang").mkdir()
    (folder / "ziglang" / "__main__.py").write_text(program)
    (folder / "ziglang" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import subprocess; subprocess.run(['sleep', '600'])"
    pretended(tmp_path, monkeypatch, program)
    monkeypatch.setitem(zig.SECONDS, "cc", 0.5)
    begin = time.monotonic()
    with pytest.raises(BuildError, match="no end of it"):
        zig.run("cc", "x86_64-linux-gnu", ["-o", str(tmp_path / "x.so")], "a library")
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize("program", ["raise SystemExit('error: NoSpaceLeft')", "import os; os.kill(os.getpid(), 7)"])
def test_one_without_room_says_where(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(tmp_path, monkeypatch, program)
    with pytest.raises(OutputError, match=str(tmp_path)):
        zig.run("cc", "x86_64-linux-gnu", ["-o", str(tmp_path / "x.so")], "a library")


def test_other_failures_keep_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended(tmp_path, monkeypatch, "raise SystemExit('error: undefined symbol')")
    with pytest.raises(BuildError, match="undefined symbol"):
        zig.run("cc", "x86_64-linux-gnu", [], "a library")


def test_a_cache_that_cannot_be_written_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(zig.CACHE, str(tmp_path / "file" / "zig"))
    assert zig.cache_folder() != zig.first_cache()
    monkeypatch.setenv(zig.CACHE, str(tmp_path / "zig"))
    assert zig.cache_folder() == zig.first_cache() == tmp_path / "zig"

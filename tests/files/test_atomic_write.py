"""What is written whole or not at all, and what dead processes leave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mhsa_compile.errors import OutputError
from mhsa_compile.files import atomic_write, system
from mhsa_compile.files.atomic_write import Unfinished, atomic_file, atomic_folder

MAKER = """
import sys
from pathlib import Path
from mhsa_compile.files.atomic_write import Unfinished
made = Unfinished(Path(sys.argv[1]), "a.mhsa")
(made.path / "half").touch()
print(made.path.name, flush=True)
sys.stdin.read()
"""


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_else(tmp_path: Path) -> None:
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    left, alive = (maker.stdout.readline().strip() for maker in makers)
    kept = {alive, ".a.mhsa.01234567", ".b.mhsa.01234567.unfinished", ".a.mhsa.0123456.unfinished", "notes"}
    for name in kept - {alive}:
        (tmp_path / name).mkdir()
    makers[0].send_signal(signal.SIGKILL)
    makers[0].communicate()
    assert names(tmp_path) == kept | {left}
    with atomic_folder(tmp_path / "a.mhsa", force=False, mark="mark"):
        assert left not in names(tmp_path) and alive in names(tmp_path)
    assert names(tmp_path) == kept | {"a.mhsa"}
    makers[1].communicate()  # it ends, and leaves its folder, too
    with atomic_folder(tmp_path / "a.mhsa", force=True, mark="mark"):
        assert alive not in names(tmp_path)


def test_what_was_set_aside_is_kept_while_it_is_the_only_one(tmp_path: Path) -> None:
    """Where folders cannot be exchanged, a process may die between moving the old one away and the new one there."""
    aside = tmp_path / ".a.mhsa.01234567.unfinished.old"
    aside.mkdir()
    with Unfinished(tmp_path, "a.mhsa"):
        assert aside.exists()
    (tmp_path / "a.mhsa").mkdir()
    with Unfinished(tmp_path, "a.mhsa"):
        assert not aside.exists()


def test_a_folder_that_was_swept_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, swept = system.lock, []

    def late(handle: int, **how: bool) -> None:
        if not swept:
            swept.append(next(tmp_path.iterdir()))
            swept[0].rmdir()
        locked(handle, **how)

    monkeypatch.setattr(system, "lock", late)
    with Unfinished(tmp_path, "a.mhsa") as folder:
        assert folder.is_dir() and folder != swept[0]


def test_temporary_folders_are_private_and_no_longer_than_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with atomic_write.temporary() as one, atomic_write.temporary() as two:
        assert one.parent == two.parent == tmp_path and one != two
        assert one.stat().st_mode & 0o777 == 0o700
    assert not names(tmp_path)


def test_a_file_is_written_whole_and_replaces_only_files(tmp_path: Path) -> None:
    place = tmp_path / "y.npz"
    with atomic_file(place, "-o") as file:
        file.write(b"old")
    with pytest.raises(OutputError, match="No space left"), atomic_file(place, "-o"):
        Path("/dev/full").write_bytes(b"new")
    assert place.read_bytes() == b"old" and names(tmp_path) == {"y.npz"}
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null"), Path("")):
        with pytest.raises(OutputError, match="-o: expected a place for a file, got"), atomic_file(path, "-o"):
            raise AssertionError("it must not come to this")
    with pytest.raises(OutputError, match="a file in a folder that exists"), atomic_file(tmp_path / "no" / "y", "-o"):
        raise AssertionError("it must not come to this")

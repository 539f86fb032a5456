"""Writers that are killed at their work, by SIGKILL: whoever next writes there clears what they left, and of the dead
alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import tiny_artifact

from mhsa_compile.compiler.cache import artifact_store
from mhsa_compile.files.atomic_write import Unfinished, atomic_file
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.standalone.bundle import bundle

KEY = "5" * 64
# Each stops for ever in the middle of a file, and says so before.
WRITER = """
import os, shutil, sys, time
from pathlib import Path
from mhsa_compile.runtime.artifact.artifact import Artifact

def stop(*_, **__):
    print("half", flush=True)
    time.sleep(600)

def half(source, target, *_):
    target.write(source.read(10))
    target.flush()
    stop()

kind, source, place = sys.argv[1], Artifact.open(sys.argv[2]), Path(sys.argv[3])
if kind != "file":
    shutil.copyfileobj = half
if kind == "save":
    source.save(place / "a.mhsa", force=True)
elif kind == "bundle":
    from mhsa_compile.runtime.standalone.bundle import bundle
    bundle(source, place / "a.mhsa", force=True)
elif kind == "entry":
    from mhsa_compile.compiler.cache import artifact_store
    artifact_store.keep("5" * 64, source)
elif kind == "turn":
    from mhsa_compile.compiler.cache import artifact_store
    artifact_store.turn("5" * 64).take()
    stop()
elif kind == "dropped":
    from mhsa_compile.compiler.cache import artifact_store
    shutil.rmtree = stop
    artifact_store.drop(artifact_store.data_paths.artifact_cache() / ("5" * 64))
elif kind == "file":
    from mhsa_compile.files.atomic_write import atomic_file
    with atomic_file(place / "a.mhsa", "-o") as file:
        file.write(b"half")
        file.flush()
        stop()
"""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny_artifact.make(tmp_path_factory.mktemp("made") / "tiny")


@contextmanager
def writer(kind: str, artifact: Artifact, place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that is in the middle of its work."""
    words = [sys.executable, "-c", WRITER, kind, str(artifact.path), str(place)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout.readline() == "half\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def write(kind: str, artifact: Artifact, place: Path) -> None:
    if kind == "save":
        artifact.save(place / "a.mhsa", force=True)
    elif kind == "bundle":
        bundle(artifact, place / "a.mhsa", force=True)
    else:
        with atomic_file(place / "a.mhsa", "-o") as file:
            file.write(b"whole")


@pytest.mark.thorough_but("file")
@pytest.mark.parametrize("kind", ["save", "bundle", "file"])
def test_what_the_dead_left_goes_and_what_the_living_make_stays(kind: str, artifact: Artifact, tmp_path: Path) -> None:
    with writer(kind, artifact, tmp_path) as dead, writer(kind, artifact, tmp_path):
        before = names(tmp_path)
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        assert names(tmp_path) == before and len(before) == 2
        write(kind, artifact, tmp_path)
        after = names(tmp_path)
        assert "a.mhsa" in after
        assert len(after & before) == 1
        write(kind, artifact, tmp_path)
        assert names(tmp_path) == after  # the living one's is there as long as it lives
    write(kind, artifact, tmp_path)
    assert names(tmp_path) == {"a.mhsa"}
    if kind == "save":
        assert Artifact.open(tmp_path / "a.mhsa").manifest == artifact.manifest


def test_a_kill_leaves_what_was_there(artifact: Artifact, tmp_path: Path) -> None:
    saved = artifact.save(tmp_path / "a.mhsa")
    with writer("save", artifact, tmp_path) as process:
        process.kill()
        process.wait()
        assert Artifact.open(saved.path).manifest == artifact.manifest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return artifact_store.data_paths.artifact_cache()


@pytest.mark.thorough_but("turn")
@pytest.mark.parametrize("kind", ["entry", "turn", "dropped"])
def test_the_cache_is_cleared_of_the_dead_as_anything_is_kept(kind: str, artifact: Artifact, cache: Path) -> None:
    if kind == "dropped":
        artifact_store.keep(KEY, artifact)
    with writer(kind, artifact, cache) as process:
        (left,) = names(cache)
        assert left.startswith(".")
        artifact_store.keep("6" * 64, artifact)
        assert names(cache) == {left, "6" * 64}
        process.kill()
        process.wait()
        artifact_store.keep("7" * 64, artifact)
        assert names(cache) == {"6" * 64, "7" * 64}


def test_a_name_that_looks_like_one_of_ours_is_nobody_elses(tmp_path: Path) -> None:
    """Links and pipes are not followed nor waited for, nor removed."""
    (tmp_path / "precious").write_text("kept")
    (tmp_path / ".a.mhsa.00000000.unfinished").symlink_to(tmp_path / "precious")
    os.mkfifo(tmp_path / ".a.mhsa.00000001.unfinished")
    before = names(tmp_path)
    with Unfinished(tmp_path, "a.mhsa"):
        assert before < names(tmp_path)
    assert names(tmp_path) == before
    assert (tmp_path / "precious").read_text() == "kept"

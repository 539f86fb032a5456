"""Paths that no file system can have, or that lie where nothing can: each is refused by an error of ours."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import mhsa_compile as mhsa
from mhsa_compile.cli.app import app
from mhsa_compile.errors import MhsaError, OutputError
from mhsa_compile.files import atomic_write, places

SPEC = mhsa.AttentionSpec(embed_dim=16, num_heads=2)
ODD = ("x" * 300, "file/below", "loop", "a\0b", "a/" * 3000, "pipe", "\ud800")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("places")
    (folder / "file").write_text("text")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize(
    "use",
    [
        mhsa.load,
        mhsa.Artifact.open,
        mhsa.verify,
        mhsa.compile,
        lambda path: mhsa.compile(SPEC, target=f"{path}.toml"),
        lambda path: mhsa.compile(SPEC, records=path),
        lambda path: mhsa.compile(SPEC, dump=path),
    ],
    ids=range(7),
)
def test_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[str], object], odd: str) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(MhsaError):
        use(odd)


COMMANDS = (
    "run @", "inspect @", "verify @", "heads @", "profile @", "bundle @ -o b", "measure @ -o r", "bench @", "tune @",
    "compile @ -o a", "compile @.onnx -o a", "compile --embed-dim 8 --num-heads 2 -o @/a", "records check @",
    "records list @", "compile --embed-dim 8 --num-heads 2 -o a --target @.toml", "targets native -o @.toml",
)  # fmt: skip


@pytest.mark.thorough_only(
    "compile --embed-dim 8 --num-heads 2 -o @/a",
    "compile --embed-dim 8 --num-heads 2 -o a --target @.toml",
    "compile @ -o a",
    "compile @.onnx -o a",
    "tune @",
    "verify @",
)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_it_in_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.chdir(folder)
    for odd in ("x" * 300, "file/below"):
        outcome = CliRunner().invoke(app, [word.replace("@", odd) for word in command.split()])
        assert isinstance(outcome.exception, SystemExit), (odd, outcome.exception)
        assert outcome.exit_code == 2
        assert "Error: " in outcome.output


def test_what_is_written(folder: Path) -> None:
    for odd in ("x" * 300, "file/below", "a\0b"):
        with pytest.raises(OutputError), atomic_write.atomic_file(folder / odd, "-o"):
            pass
        with pytest.raises(OutputError), atomic_write.atomic_folder(folder / odd, False, "manifest.json"):
            pass
        with pytest.raises(OutputError):
            places.make_folder(folder / odd, OutputError, "dump")

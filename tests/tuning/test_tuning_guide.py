"""docs/tuning.md does what it says, on a machine that nobody has seen: its commands run in order, in one folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import msgspec
import pytest
from support.command import mhsa
from typer.testing import CliRunner

from mhsa_compile.cli.app import app
from mhsa_compile.hardware import data_paths, profile
from mhsa_compile.hardware.profile import TargetProfile, load_profile
from mhsa_compile.records import record_files
from mhsa_compile.records.record import isa_of

GUIDE = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def commands(language: str) -> list[list[str]]:
    """The words of each command in the guide's blocks: those of sh blocks are for this machine, those of console blocks
    for several."""
    return [shlex.split(line) for block in blocks(language) for line in block.splitlines() if line]


def unseen(native: TargetProfile) -> TargetProfile:
    """A machine with vectors half as wide, few registers, small odd caches; this one can run its code."""
    hardware = msgspec.structs.replace(
        native.hardware, vector_bits=max(128, native.hardware.vector_bits // 2), vector_registers=16, cores=1,
        l1d_kib=24, l2_kib=192,
    )  # fmt: skip
    return msgspec.structs.replace(native, hardware=hardware)


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a checkout of their own, on a machine that is detected as `unseen`."""
    linker = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    monkeypatch.setenv("XDG_CACHE_HOME", linker)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.chdir(tmp_path)
    for name in ("FIRST", "LAST"):  # how fast it is is not looked at
        monkeypatch.setattr(f"mhsa_compile.tuning.search.search.{name}", 0.02)
    found = unseen(profile.detect())
    monkeypatch.setattr(profile, "detect", lambda: found)
    for name in ("targets", "schedules"):
        (tmp_path / name).mkdir()
        monkeypatch.setattr(data_paths, f"{name}_folder", lambda folder=tmp_path / name: folder)
    return tmp_path


@pytest.mark.thorough
def test_the_guide_leads_from_an_unseen_machine_to_records(newcomer: Path) -> None:
    (newcomer / "layer.toml").write_text(*blocks("toml"))
    for words in commands("sh"):
        if "before.mhsa" in words:
            continue  # the same as after.mhsa, which comes later
        program, *arguments = [os.path.expanduser(word) for word in words]
        if program == "cp":
            shutil.copy(*arguments)
            continue
        assert program == "mhsa"
        hurry = ["--seconds", 1, "--trials", 1, "--against", ""] if arguments[0] == "tune" else []
        result = mhsa(*arguments, *hurry)
        # A busy machine's records are refused by `promote`, as are those of a checkout that is being worked on.
        assert result.exit_code in ((0, 1) if "promote" in words else (0,)), f"{shlex.join(words)}\n{result.output}"
    target = load_profile("mine.toml")
    assert target.hardware == profile.detect().hardware
    tuned = record_files.read(target.own_records()).records
    assert {record.op for record in tuned} == {"linear", "attention"}
    assert {record.isa for record in tuned} == {isa_of(target)}
    manifest = json.loads((newcomer / "after.mhsa" / "manifest.json").read_text())
    assert {op["source"] for op in manifest["ops"]} == {"record"}
    assert all("times as fast as the default" in op["tuning"] for op in manifest["ops"])
    shipped = newcomer / "schedules" / "mine.jsonl"
    assert not shipped.exists() or all(record in tuned for record in record_files.read(shipped).records)


@pytest.mark.thorough_but("mhsa measure work.zip -o results.json")
@pytest.mark.parametrize("words", commands("console"), ids=shlex.join)
def test_commands_for_other_machines_have_these_options(words: list[str]) -> None:
    shown = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    assert all(re.search(rf"(?<![\w-]){word}\b", shown.stdout) for word in words if word.startswith("-"))

"""`mhsa targets`, of the machine that the suite runs on."""

from __future__ import annotations

import tomllib
from pathlib import Path

from support.command import mhsa, printed_json, refused

from mhsa_compile.hardware import host, profile


def test_native_is_printed_as_a_file_to_save(tmp_path: Path) -> None:
    text = mhsa("targets", "native").stdout
    assert tomllib.loads(text)["hardware"]["cores"] == host.allowed_cpus()
    saved = tmp_path / "mine.toml"
    saved.write_text(text)
    assert printed_json("targets", saved)["name"] == "mine"


def test_this_machine_is_detected_and_written(tmp_path: Path) -> None:
    saved = tmp_path / "mine.toml"
    text = mhsa("targets", "--detect", "-o", saved).stdout
    assert saved.read_text() == text == mhsa("targets", "native").stdout
    assert host.cpu_model() in text.splitlines()[0]
    written, found = profile.load_profile(saved), profile.detect()
    assert (written.tvm, written.hardware, written.link) == (found.tvm, found.hardware, found.link)
    assert "not there yet" in refused(mhsa("targets", "--detect", "-o", saved))
    assert "named .toml" in refused(mhsa("targets", "znver4", "-o", tmp_path / "mine"))
    assert "Leave one of them out" in refused(mhsa("targets", "znver4", "--detect"))
    assert "--detect" in refused(mhsa("targets", "-o", tmp_path / "other.toml"))
    assert list(tmp_path.iterdir()) == [saved]

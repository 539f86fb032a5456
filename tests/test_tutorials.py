"""docs/tutorials/: each page is short, its blocks run in order in one folder, and give what it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.page_blocks import Block, blocks, run_mhsa, run_page

from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.records import record_files

ROOT = Path(__file__).parents[1]
TUTORIALS = {path.stem: path for path in (ROOT / "docs" / "tutorials").glob("*.md")}
MOST_LINES = 80


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names_of(stem: str) -> dict[str, Any]:
    return run_page(blocks(TUTORIALS[stem]))


@pytest.mark.parametrize("stem", sorted(TUTORIALS))
def test_a_tutorial_is_short(stem: str) -> None:
    assert len(TUTORIALS[stem].read_text(encoding="utf-8").splitlines()) < MOST_LINES


def test_each_tutorial_is_run_by_a_test_of_this_file() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    run = {stem for stem in TUTORIALS if f'names_of("{stem}")' in text or f'TUTORIALS["{stem}"]' in text}
    assert run == set(TUTORIALS)


@pytest.mark.thorough
def test_a_first_model_finds_the_mark() -> None:
    names = names_of("first-model")
    assert names["loss"] < 0.01 and names["verdict"].ok
    assert np.abs(names["result"].y - names["wanted"]).max() < 1
    assert (names["result"].weights[0, :, 0].argmax(axis=1) == names["tokens"][0, :, 0].argmax()).all()
    assert names["looked_at"].tolist() == [17, 17, 17]


@pytest.mark.thorough
def test_a_model_of_transformers_is_accelerated_and_restored() -> None:
    names = names_of("transformers")
    assert len(names["report"].replaced) == 1 and len(names["report"].linears) == 13
    assert 0 < names["difference"] < 1e-5 and not names["report"].calls
    assert "forward" not in vars(names["rival"].encoder.layer[0].output.dense)
    assert bool((names["again"] == names["plain"]).all())


@pytest.mark.thorough
def test_a_decoder_generates_the_same_with_a_cache() -> None:
    names = names_of("decoder")
    assert names["tokens"] == names["text"][0].tolist() and len(names["tokens"]) == 16
    assert names["chosen"](names["y"])[0] == names["tokens"][11]
    assert names["cache"].length.tolist() == [0]


@pytest.mark.thorough
def test_a_bundle_gives_what_python_gives() -> None:
    names = names_of("cpp")
    assert np.array_equal(names["load_file"]("out.safetensors")["y"], names["expected"])
    assert names["expected"].shape == (2, 30, 64) and np.abs(names["expected"]).max() > 0


@pytest.mark.thorough
def test_a_profile_has_what_the_page_reads() -> None:
    profile = names_of("profile")["profile"]
    assert [op.kind for op in profile.ops] == ["linear", "attention", "linear"]
    assert Path("call.json").stat().st_size > 0


@pytest.fixture
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without records."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache"))  # the linker
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "data"))
    return folder


@pytest.mark.thorough
def test_a_new_machine_is_tuned(home: Path) -> None:
    shell: list[Block] = []
    for block in blocks(TUTORIALS["new-machine"]):
        if block.language == "toml":
            (home / "layer.toml").write_text(block.code)
        else:
            shell.append(block)
    for block in shell:
        run_mhsa(block, hurry=("--seconds", "1", "--trials", "2", "--against", ""))
    assert (home / "after.mhsa").is_dir() and load_profile("mine.toml").name == "mine"
    assert record_files.read(load_profile("mine.toml").own_records()).records

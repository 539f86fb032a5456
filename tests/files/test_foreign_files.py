"""Files of other tools, in place of an ONNX model."""

from __future__ import annotations

from pathlib import Path

import pytest

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.files.foreign_files import hint_of


@pytest.mark.parametrize(
    ("name", "head", "hint"),
    [
        ("model.onnx", b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        ("model.onnx", b"\n <!DOCTYPE html><html>", "web page"),
        ("weights", b"GGUF\3\0\0\0", "read_checkpoint"),
        ("model.PTH", b"PK\3\4", "mhsa.compile(module, example_inputs=...)"),
        ("model.safetensors", b"", "the model they are of"),
        ("model", b"\x1c\0\0\0TFL3", "tf2onnx"),
        ("model.onnx.data", b"\0" * 9, "external data"),
        ("model.onnx_data", b"\0" * 9, "external data"),
        ("model.xml", b"<net>", "Another tool"),
        ("spec.json", b"{}", "TOML"),
        ("notes.txt", b"hello", ""),
    ],
)
def test_what_a_file_probably_is(tmp_path: Path, name: str, head: bytes, hint: str) -> None:
    (tmp_path / name).write_bytes(head)
    outcome = hint_of(tmp_path / name)
    assert hint in outcome and bool(outcome) == bool(hint)


def test_folders_and_names_that_are_none(tmp_path: Path) -> None:
    assert hint_of(tmp_path) == ""
    (tmp_path / "config.json").write_text("{}")
    assert "optimum-cli export onnx" in hint_of(tmp_path)
    (tmp_path / "b.onnx").touch()
    assert hint_of(tmp_path) == f"In this folder lies {str(tmp_path / 'b.onnx')!r}."
    assert "optimum-cli" in hint_of("google-bert/bert-base-uncased")
    assert hint_of("https:/huggingface.co/model.onnx") == "Download the file first."
    assert hint_of("./nowhere") == hint_of("") == ""


def test_a_source_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match=r"does not parse.*git lfs pull"):
        mhsa.compile(tmp_path / "model.onnx")

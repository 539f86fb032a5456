"""What the C++ program of a bundle refuses, under AddressSanitizer: a slice of fuzz_files_cpp, and old findings."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import struct
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from fuzz import file_mutations, files_cpp
from fuzz.file_mutations import Case
from safetensors.numpy import load_file, save_file
from support import refused_tiles, tiny_artifact
from support.hostile_tensors import HOSTILE
from support.this_cpu import with_tiles

from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import FORMAT_VERSION, MANIFEST, MODULE, WEIGHTS
from mhsa_compile.runtime.standalone import bundle

X, M = np.ones((3, 5, 8), np.float32), np.ones((3, 5), bool)


class Program:
    """The program in its harness, and an artifact for it."""

    def __init__(self, folder: Path) -> None:
        self.harness = files_cpp.build(folder, quick=True)
        self.artifact = tiny_artifact.make(folder / "tiny")

    def said(self, *many: tuple[str | Path, ...]) -> list[str]:
        """What it said to each of several command lines; nothing where the call was made. Crashes fail the test."""
        cases = [Case("", ("--repeat", "1", "--threads", "2", *map(str, words))) for words in many]
        ends = files_cpp.ends(self.harness, cases, self.harness.parent)
        for case, (status, said) in zip(cases, ends, strict=True):
            assert files_cpp.judged(case, status, said) in ("accepted", "refused"), (status, said)
        return [said for _, said in ends]

    def changed(self, folder: Path, **files: bytes) -> Path:
        """A copy of the artifact in a new folder, with the bytes of some files replaced."""
        folder.mkdir()
        for name in (MANIFEST, MODULE, WEIGHTS):
            (folder / name).write_bytes(files.get(name.split(".")[0]) or (self.artifact.path / name).read_bytes())
        return folder


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    try:
        files_cpp.compiler()
    except files_cpp.NoCompiler as error:
        pytest.skip(str(error))
    return Program(tmp_path_factory.mktemp("program"))


@pytest.mark.thorough
def test_a_slice_of_the_campaign(program: Program) -> None:
    outcome = files_cpp.batch(program.harness, [program.artifact], "slice", 120)
    assert sum(outcome.counts.values()) == 120
    assert not outcome.bad


def test_the_campaign_knows_bad_ends() -> None:
    good = "Error: a: expected b, got c. Do d. "
    for status, said, must, end in (
        *(
            ("exit 2", good, "", "refused"),
            ("exit 0", "", "", "accepted"),
            ("exit 0", "", "refuse", "accepted wrongly"),
        ),
        *(("exit 2", good, "accept", "refused wrongly"), ("exit 2", "Error: no", "", "message without four parts")),
        *(("signal 11", "", "", "crash"), ("signal 14", "", "", "hang"), ("exit 99", "", "", "sanitizer report")),
    ):
        assert files_cpp.judged(Case("", (), must=must), status, said) == end


def header(shape: list[int], offsets: list[int], data: bytes = b"", dtype: str = "F32") -> bytes:
    text = json.dumps({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}).encode()
    return struct.pack("<Q", len(text)) + text + data


def twice(*names: str) -> bytes:
    entry = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    text = "{" + ",".join(f"{name}:{entry}" for name in names) + "}"
    return struct.pack("<Q", len(text)) + text.encode() + bytes(4)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (header([2**57, 1, 32], [0, 0]), "product"),
        (header([0, 2**62, 8], [0, 0]), "product"),
        (header([-1, 5, 8], [0, 0]), "from 0 on, got -1"),
        (header([2**30, 5, 8], [0, 2**30 * 160]), "bytes of 0 for 'x'"),
        (header([1], [0, 4], bytes(8)), "got a gap or an overlap at byte 4 of 8"),
        (header([2], [0, 2], b"\1\2", "BOOL"), "expected safetensors with 0 or 1 in each byte of 'x', got 2"),
        (struct.pack("<Q", 10**5) + b"[" * 10**5, "got brackets more than 64 deep"),
        (struct.pack("<Q", 2**64 - 1) + b"{}", "a header of 18446744073709551615 bytes"),
        (struct.pack("<Q", 3) + b'"\xff"', "no UTF-8"),
        (twice('"x"', '"x"'), 'objects name each entry once, got "x" twice'),
        (twice('"x"', r'"\u0078"'), "objects name each entry once"),
        (twice('"x"', r'"y\\\"x"'), "an overlap at byte"),
        (b"\x93NUMPY\1\0", "expected safetensors"),
        (b"", "expected safetensors"),
    ],
)
def test_inputs_that_are_no_sound_safetensors(program: Program, tmp_path: Path, raw: bytes, expected: str) -> None:
    (tmp_path / "in").write_bytes(raw)
    (said,) = program.said(("--artifact", program.artifact.path, "--inputs", tmp_path / "in"))
    assert expected in said


@pytest.mark.thorough
def test_no_hostile_header_is_taken(program: Program, tmp_path: Path) -> None:
    """As inputs, and some as the weights of an artifact whose manifest has their hash: refused, and nothing beyond the
    file is read or asked for."""
    cases = {}
    for i, (name, raw) in enumerate(HOSTILE.items()):
        (tmp_path / str(i)).write_bytes(raw)
        cases[f"{name}, --inputs '"] = ("--artifact", program.artifact.path, "--inputs", tmp_path / str(i))
        if i % 5 == 0:
            folder = program.changed(tmp_path / f"sealed{i}")
            (folder / WEIGHTS).write_bytes(raw)
            (folder / MANIFEST).unlink()
            (folder / "model.onnx").touch()
            cases[f"{name}, artifact file '"] = (
                "--artifact",
                Artifact.assemble(folder, program.artifact.manifest).path,
            )
    for name, said in zip(cases, program.said(*cases.values()), strict=True):
        assert said.startswith(f"Error: {name.rpartition(', ')[2]}"), (name, said)


def test_what_is_no_file(program: Program, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    kinds = {tmp_path / "fifo": "a FIFO", Path("/dev/zero"): "a device", tmp_path: "a folder"}
    options = [(option, path) for path in kinds for option in ("--inputs", "--weights", "--outputs")]
    for (option, path), said in zip(
        options, program.said(*(("--artifact", program.artifact.path, *words) for words in options)), strict=True
    ):
        assert re.match(rf"Error: {option} '.*': expected a file.*, got {kinds[path]}\. ", said), said


def test_outputs_are_written_whole_or_not_at_all(program: Program, tmp_path: Path) -> None:
    save_file({"x": X, "mask": M}, tmp_path / "in")
    words = ("--artifact", program.artifact.path, "--inputs", tmp_path / "in", "--outputs")
    said = program.said((*words, tmp_path / "out"), (*words, tmp_path / "none/out"), (*words, "/dev/full"))
    tiny_artifact.assert_right(load_file(tmp_path / "out")["y"], X, M)
    assert [bool(line) for line in said] == [False, True, True]
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out"}


def test_every_flipped_bit_is_found(program: Program, tmp_path: Path) -> None:
    rng = random.Random(0)
    cases = []
    for name in (MANIFEST, MODULE, WEIGHTS):
        for i in range(8):
            raw = bytearray((program.artifact.path / name).read_bytes())
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
            changed = program.changed(tmp_path / f"{name}{i}", **{name.split(".")[0]: bytes(raw)})
            cases.append(("--artifact", changed))
    assert all(program.said(*cases))


@pytest.mark.thorough
def test_hashes_are_those_of_sha256(program: Program, tmp_path: Path) -> None:
    """What the hash lets through is no library, and the dynamic linker says so."""
    cases = []
    for size in (55, 56, 64, 100_000):
        folder = program.changed(tmp_path / str(size), module=random.Random(size).randbytes(size))
        (folder / MANIFEST).unlink()
        (folder / "model.onnx").touch()
        Artifact.assemble(folder, program.artifact.manifest)
        cases.append(("--artifact", folder))
    assert all("Failed to load dynamic shared library" in said for said in program.said(*cases))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tree: tree.update(format_version=FORMAT_VERSION + 1), f"format version {FORMAT_VERSION}, got format"),
        (lambda tree: tree.update(in_place={"y": "nothing"}), "an input, for an output, got 'nothing' for 'y'"),
        (lambda tree: tree.update(in_place={"y": "mask"}), "of the dtype and dims of 'y', got 'mask'"),
        (lambda tree: tree.pop("weights"), "expected a member weights, got none"),
        (lambda tree: tree["inputs"][0].update(dims=["B", -1, 8]), "'inputs[0].dims[1]': expected a whole number"),
        (lambda tree: tree["inputs"][0].update(dtype="float33"), "'inputs[0].dtype': expected a dtype"),
        (lambda tree: tree["inputs"][1].update(name="x"), "expected a name of its own, got 'x'"),
        (lambda tree: tree["outputs"][0].update(dims=["B", "L", 9]), "output 'y': expected float32 of shape (B, L, 9)"),
        (lambda tree: tree["files"].update({MODULE: "0" * 64}), f"module.so': expected sha256 {'0' * 64}, got "),
        (lambda tree: tree["target"]["hardware"].update(features=["a\0\x1b[2J"]), r"got one without a\x00\x1b[2J."),
        (lambda tree: tree["target"].update(family="cuda"), "expected one compiled for a CPU, got one for 'cuda'"),
    ],
)
def test_manifests_are_read_into_types(
    program: Program, tmp_path: Path, change: Callable[[dict[str, object]], object], expected: str
) -> None:
    tree = msgspec.to_builtins(program.artifact.manifest)
    change(tree)
    folder = program.changed(tmp_path / "changed", manifest=file_mutations.resealed(tree))
    (said,) = program.said(("--artifact", folder))
    assert expected in said


def test_code_for_another_cpu_behind_a_manifest_that_hides_it(program: Program, tmp_path: Path) -> None:
    artifact = tiny_artifact.make(tmp_path / "tiny", hidden=("telepathy",))
    (said,) = program.said(("--artifact", artifact.path))
    assert "as it was compiled for one" not in said and "got one without telepathy. Compile it for this machine" in said


@pytest.mark.thorough_but("False")
@with_tiles
@pytest.mark.parametrize("hidden", [False, True])
def test_refused_tiles_have_their_reason(program: Program, tmp_path: Path, hidden: bool) -> None:
    """Also behind a manifest that hides them: the code itself says so."""
    refused_tiles.require()
    folder = program.artifact.path
    if hidden:
        tree = msgspec.to_builtins(program.artifact.manifest)
        features = tree["target"]["hardware"]["features"]
        tree["target"]["hardware"]["features"] = [word for word in features if not word.startswith("amx")]
        folder = program.changed(tmp_path / "changed", manifest=file_mutations.resealed(tree))
    case = Case("", ("--artifact", str(folder), "--repeat", "1", "--threads", "2"))
    assert files_cpp.ends(program.harness, [case], tmp_path) == [("exit 0", "")]
    harness = tmp_path / "harness"
    harness.write_text(f'#!/bin/sh\nexec {shlex.join(refused_tiles.command("EPERM", program.harness))} "$@"\n')
    harness.chmod(0o755)
    ((status, said),) = files_cpp.ends(harness, [case], tmp_path)
    assert status == "exit 2" and "got one that may not: a sandbox keeps" in said and "--target x86-64-v4" in said


def test_masks_are_held_against_the_call_as_in_python(program: Program, tmp_path: Path) -> None:
    shapes = {(3, 5): True, (1, 5): True, (5,): True, (3, 1): True, (1,): True, (): True}
    shapes |= {(2, 5): False, (3, 4): False, (1, 3, 5): False, (5, 3): False}
    cases = []
    for shape in shapes:
        mask = np.asarray(np.random.default_rng(0).random(shape) < 0.7)
        save_file({"x": X, "mask": mask}, tmp_path / f"in{shape}")
        words = ("--artifact", program.artifact.path, "--inputs", tmp_path / f"in{shape}")
        cases.append((*words, "--outputs", tmp_path / f"out{shape}"))
    said = program.said(*cases)
    assert [not line for line in said] == list(shapes.values())
    assert "input 'mask': expected bool of shape (1 or B, 1 or L), B = 3 as in 'x', L = 5 as in 'x', got" in said[-1]
    for shape in (shape for shape, fits in shapes.items() if fits):
        mask = load_file(tmp_path / f"in{shape}")["mask"]
        tiny_artifact.assert_right(load_file(tmp_path / f"out{shape}")["y"], X, mask)


def test_names_never_reach_the_terminal_raw(program: Program, tmp_path: Path) -> None:
    save_file({"\x1b]0;owned\x07": X}, tmp_path / "in")
    said = program.said(
        ("--artifact", program.artifact.path, "--inputs", tmp_path / "in"),
        ("--artifact", program.artifact.path, "--dim", "L=1000000000"),
        ("--artifact", program.artifact.path, "--dim", "L=999999999", "--dim", "B=999999999"),
        ("--artifact", program.artifact.path, "--threads", "20000"),
    )
    assert r"got \x1b]0;owned\x07" in said[0]
    assert "a number from 1 to 999999999" in said[1]
    assert "bytes" in said[2] or "MiB" in said[2]
    assert "threads: expected a number from 1 to 1024" in said[3]


def test_the_format_is_that_of_artifacts() -> None:
    text = Path(bundle.__file__).with_name("program").joinpath("manifest.h").read_text()
    assert f"kFormat = {FORMAT_VERSION};" in text

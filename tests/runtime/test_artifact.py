"""The artifact's folder: whole or refused, written whole or not at all."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
from msgspec.structs import replace

from mhsa_compile.errors import ArtifactError, OutputError
from mhsa_compile.files import atomic_write
from mhsa_compile.files.opened_once import OpenFolder
from mhsa_compile.hardware import host, tile_permission
from mhsa_compile.hardware.profile import CpuProfile, Hardware, Link, TargetProfile, TvmTarget, load_profile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.load_checks import check_cpu, check_features, check_loops
from mhsa_compile.runtime.artifact.manifest import FORMAT_VERSION, Manifest, OpReport, TensorInfo
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.semantics import Semantics
from mhsa_compile.spec.window import WindowSpec

FILES = {"model.onnx": b"a graph", "module.so": b"\x7fELF code", "weights.safetensors": bytes(range(256))}
TARGET = CpuProfile(
    name="here",
    tvm=TvmTarget(kind="llvm", mtriple=f"{host.architecture()}-linux-gnu"),
    hardware=Hardware(features=tuple(sorted(host.cpu_features())[:3])),
    link=Link(triple=f"{host.architecture()}-linux-gnu"),
)
MEANING = Semantics(
    op="op_1", operator="ONNX Attention-25", num_heads=2, num_kv_heads=2, head_dim=4, v_head_dim=4, scale=0.125,
    dtype="float32", causal=None, band=WindowSpec(None, 3, "top_left"), static_mask=None, softcap=None, lengths=None,
    sinks=False, alibi=False, mask=None, bool_mask="True takes part", fully_masked_row="zeros", softmax="float32",
)  # fmt: skip


def manifest(**fields: object) -> Manifest:
    values = {
        "mhsa_version": "0.1.0",
        "inputs": (TensorInfo("x", "float32", ("B", "L", 8)), TensorInfo("mask", "bool", ("m",), broadcast=("L",))),
        "outputs": (TensorInfo("y", "float32", ("B", "L", 8)),),
        "weights": (TensorInfo("w", "float32", (8, 8)),),
        "semantics": (MEANING,),
        "spec": AttentionSpec(embed_dim=8, num_heads=2),
        "target": TARGET,
        "versions": {"onnx": "1", "apache-tvm": "2"},
        "ops": (OpReport("op_0", "linear", "cpu.linear", {"rows": 6, "columns": 4}, "default"),),
        "files": {},
    }
    return Manifest(**{**values, **fields})


def assemble(folder: Path, **fields: object) -> Artifact:
    folder.mkdir()
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return Artifact.assemble(folder, manifest(**fields))


@pytest.fixture
def saved(tmp_path: Path) -> Artifact:
    return assemble(tmp_path / "attention.mhsa")


def rewrite(path: Path, change: dict[str, object], *, drop: tuple[str, ...] = ()) -> None:
    """Changes fields of a manifest and seals it again, as a tool of another version would."""
    fields = {**json.loads(path.read_bytes()), **change, "sha256": "0" * 64}
    text = json.dumps({key: value for key, value in fields.items() if key not in drop})
    path.write_text(text.replace("0" * 64, hashlib.sha256(text.encode()).hexdigest()))


def test_open_returns_what_was_assembled(saved: Artifact) -> None:
    opened = Artifact.open(str(saved.path))
    assert opened.path == saved.path
    assert opened.manifest == saved.manifest
    assert opened.manifest.files == {name: hashlib.sha256(data).hexdigest() for name, data in FILES.items()}
    assert opened.manifest.inputs[1].broadcast == ("L",)
    assert "Manifest" not in repr(opened)


def test_the_same_content_gives_the_same_bytes(saved: Artifact, tmp_path: Path) -> None:
    again = assemble(tmp_path / "again", versions={"apache-tvm": "2", "onnx": "1"})
    assert (again.path / "manifest.json").read_bytes() == (saved.path / "manifest.json").read_bytes()


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_byte_is_found(saved: Artifact, name: str) -> None:
    path = saved.path / name
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ArtifactError, match=f"{name}.*expected sha256 [0-9a-f]{{64}}, got [0-9a-f]{{64}}"):
        Artifact.open(saved.path)


@pytest.mark.thorough
@pytest.mark.parametrize("bit", [0x01, 0x20])
def test_a_flipped_byte_anywhere_in_the_manifest_is_found(saved: Artifact, bit: int) -> None:
    path = saved.path / "manifest.json"
    good = path.read_bytes()
    for i in range(len(good)):
        path.write_bytes(good[:i] + bytes([good[i] ^ bit]) + good[i + 1 :])
        with pytest.raises(ArtifactError, match=r"manifest\.json"):
            Artifact.open(saved.path)


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_a_missing_file_is_named(saved: Artifact, name: str) -> None:
    (saved.path / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name}.*no such file"):
        Artifact.open(saved.path)


def test_what_is_no_artifact_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, got in {"absent": "nothing", "file": "a file", ".": "no such file"}.items():
        with pytest.raises(ArtifactError, match=got):
            Artifact.open(tmp_path / name)


@pytest.mark.parametrize(("version", "advice"), [(FORMAT_VERSION + 1, "Update"), (0, "Compile it again")])
def test_another_format_is_refused_before_anything_else_is_read(saved: Artifact, version: int, advice: str) -> None:
    path = saved.path / "manifest.json"
    rewrite(path, {"format_version": version, "inputs": "stored elsewhere"}, drop=("sha256", "files"))
    message = f"expected format version {FORMAT_VERSION}, got format version {version}. {advice}"
    with pytest.raises(ArtifactError, match=message):
        Artifact.open(saved.path)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ""])
def test_only_plain_file_names_are_read(saved: Artifact, name: str) -> None:
    rewrite(saved.path / "manifest.json", {"files": {name: "0" * 63 + "1", **saved.manifest.files}})
    with pytest.raises(ArtifactError, match="a plain file name"):
        Artifact.open(saved.path)


def test_every_file_of_the_format_must_be_listed(saved: Artifact) -> None:
    rewrite(saved.path / "manifest.json", {"files": {}})
    with pytest.raises(ArtifactError, match=r"none of model\.onnx, module\.so, weights\.safetensors"):
        Artifact.open(saved.path)


def test_what_the_manifest_does_not_list_is_ignored(saved: Artifact, tmp_path: Path) -> None:
    (saved.path / "notes.txt").write_text("measured on Tuesday")
    copy = Artifact.open(saved.path).save(tmp_path / "copy")
    assert {entry.name for entry in copy.path.iterdir()} == {*FILES, "manifest.json"}


def test_save_writes_a_copy_that_others_may_read(saved: Artifact, tmp_path: Path) -> None:
    copy = saved.save(tmp_path / "copy")
    assert Artifact.open(copy.path).manifest == saved.manifest
    (tmp_path / "plain").mkdir()
    assert copy.path.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_save_refuses_what_exists_and_force_replaces_it(saved: Artifact, tmp_path: Path) -> None:
    other = assemble(tmp_path / "other", mhsa_version="9")
    with pytest.raises(OutputError, match=r"one that does not exist yet.*--force"):
        other.save(saved.path)
    assert Artifact.open(saved.path).manifest == saved.manifest
    other.save(saved.path, force=True)
    assert Artifact.open(saved.path).manifest.mhsa_version == "9"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["attention.mhsa", "other"]


def test_force_works_where_folders_cannot_be_exchanged(
    saved: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = assemble(tmp_path / "other", mhsa_version="9")
    monkeypatch.setattr(atomic_write, "_exchange", lambda one, other: False)
    other.save(saved.path, force=True)
    assert Artifact.open(saved.path).manifest.mhsa_version == "9"
    assert len(list(tmp_path.iterdir())) == 2

    def fail(self: Path, target: Path) -> Path:
        if Path(target) == saved.path and not self.name.endswith(".old"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OutputError, match="Input/output error"):
        assemble(tmp_path / "third").save(saved.path, force=True)
    assert Artifact.open(saved.path).manifest.mhsa_version == "9"
    assert len(list(tmp_path.iterdir())) == 3


def test_force_deletes_nothing_but_artifacts(saved: Artifact, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    saved.save(project, force=True)  # it was empty
    (project / "manifest.json").unlink()
    (tmp_path / "file").touch()
    for place in (project, tmp_path / "file"):
        with pytest.raises(OutputError, match="an artifact to replace"):
            saved.save(place, force=True)
    assert (project / "module.so").exists()


def test_force_can_repair_a_damaged_artifact_and_follows_links(saved: Artifact, tmp_path: Path) -> None:
    damaged = saved.save(tmp_path / "v1")
    (damaged.path / "module.so").write_bytes(b"")
    (tmp_path / "current").symlink_to("v1")
    saved.save(tmp_path / "current", force=True)
    assert (tmp_path / "current").is_symlink()
    Artifact.open(tmp_path / "v1")


@pytest.mark.thorough
def test_readers_beside_a_writer_find_it_whole(saved: Artifact, tmp_path: Path) -> None:
    one, other = saved, assemble(tmp_path / "other", mhsa_version="9")
    place, done = saved.save(tmp_path / "shared").path, threading.Event()

    def write() -> None:
        try:
            for i in range(200):
                (one, other)[i % 2].save(place, force=True)
        finally:
            done.set()

    def read() -> int:
        count = 0
        while not done.is_set():
            assert Artifact.open(place).manifest in (one.manifest, other.manifest)
            count += 1
        return count

    with ThreadPoolExecutor(3) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        pool.submit(write).result()
    assert all(found.result() for found in reading)


def test_a_reader_that_comes_between_opens_the_new_one(
    saved: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is replaced, and its old files are deleted, while it is being opened: as often as that happens."""
    other = assemble(tmp_path / "other", mhsa_version="9")
    opened, replacements = OpenFolder.open, iter(range(5))

    def interrupted(self: OpenFolder, name: str) -> object:
        if name == "model.onnx" and next(replacements, None) is not None:
            other.save(saved.path, force=True)
        return opened(self, name)

    monkeypatch.setattr(OpenFolder, "open", interrupted)
    assert Artifact.open(saved.path).manifest == other.manifest
    assert next(replacements, None) is None


def test_a_pipe_is_no_file_to_wait_for(saved: Artifact) -> None:
    for name in ("model.onnx", "manifest.json"):
        (saved.path / name).unlink()
        os.mkfifo(saved.path / name)
        with pytest.raises(ArtifactError, match=rf"{name}.*no such file"):
            Artifact.open(saved.path)


def test_contents_are_those_that_were_opened(saved: Artifact, tmp_path: Path) -> None:
    assert saved.contents(*FILES) == FILES
    assert saved.contents("model.onnx") == {"model.onnx": FILES["model.onnx"]}
    assemble(tmp_path / "other", mhsa_version="9").save(saved.path, force=True)
    with pytest.raises(ArtifactError, match="expected the one that was opened, got another, saved in its place"):
        saved.contents("model.onnx")


def test_what_was_damaged_since_it_was_opened_is_not_saved(saved: Artifact, tmp_path: Path) -> None:
    (saved.path / "module.so").write_bytes(b"\x7fELF c0de")
    with pytest.raises(ArtifactError, match=r"module\.so.*expected sha256"):
        saved.save(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_save_needs_a_folder_to_write_in(saved: Artifact, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="a place in a folder that exists"):
        saved.save(tmp_path / "absent" / "attention.mhsa")


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_leaves_nothing_behind(
    saved: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    place = saved.save(tmp_path / "old").path if force else tmp_path / "new"
    before = sorted(tmp_path.iterdir())

    def copy_half(source: BinaryIO, target: BinaryIO, _: int) -> None:
        target.write(source.read() if not target.name.endswith("weights.safetensors") else source.read(3))
        if target.name.endswith("weights.safetensors"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", copy_half)
    with pytest.raises(OutputError, match="No space left on device"):
        saved.save(place, force=force)
    assert sorted(tmp_path.iterdir()) == before
    if force:
        Artifact.open(place)


def test_a_full_disk_while_assembling_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "module.so").touch()
    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OutputError, match="No space left on device"):
        Artifact.assemble(tmp_path, manifest())


def test_a_temporary_folder_lives_as_long_as_its_artifact() -> None:
    owner = atomic_write.temporary()
    folder = owner.path
    held = Artifact.assemble(folder, manifest(), owner=owner)
    del owner
    gc.collect()
    assert folder.exists()
    del held
    gc.collect()
    assert not folder.exists()


def test_check_cpu_accepts_this_machine(saved: Artifact) -> None:
    check_cpu(saved.manifest)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (load_profile("cuda-sm90a"), "one compiled for a CPU, got one for cuda"),
        (
            replace(TARGET, tvm=replace(TARGET.tvm, mtriple="vax-dec-ultrix")),
            f"a CPU of vax.*, got {host.architecture()}",
        ),
        (
            replace(TARGET, hardware=Hardware(features=("fpu", "time_travel"))),
            "a CPU with fpu time_travel.* without .*time_travel",
        ),
    ],
)
def test_check_cpu_says_what_does_not_fit(saved: Artifact, target: TargetProfile, message: str) -> None:
    other = replace(saved.manifest, target=target)
    with pytest.raises(ArtifactError, match=message):
        check_cpu(other)


@pytest.fixture
def for_tiles(saved: Artifact, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    """A manifest whose code has tiles, on a machine of its own."""
    target = load_profile("sapphirerapids")
    monkeypatch.setattr(host, "architecture", lambda: "x86_64")
    monkeypatch.setattr(host, "cpu_features", lambda root=host.ROOT: frozenset(target.hardware.features))
    return replace(saved.manifest, target=target)


def test_tiles_are_asked_for_before_code_with_them_runs(for_tiles: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(tile_permission, "refusal", lambda: asked.append(1) or "")
    check_cpu(for_tiles)
    assert asked == [1]
    check_features({"avx2"})
    assert asked == [1]


def test_refused_tiles_have_their_reason_and_another_target(
    for_tiles: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_permission, "refusal", lambda: "a sandbox forbids it")
    expected = (
        r"artifact: expected a process that may use matrix tiles \(amx_tile\), as it was compiled for them, got one "
        r"that may not: a sandbox forbids it\. Or compile it without them: --target x86-64-v4, or native"
    )
    with pytest.raises(ArtifactError, match=expected):
        check_cpu(for_tiles)


def test_a_cpu_without_tiles_is_not_asked_for_the_permission(
    for_tiles: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    v4 = frozenset(load_profile("x86-64-v4").hardware.features)
    monkeypatch.setattr(host, "cpu_features", lambda root=host.ROOT: v4)
    monkeypatch.setattr(tile_permission, "refusal", lambda: pytest.fail("asked"))
    with pytest.raises(ArtifactError, match=r"without amx_bf16 amx_int8 amx_tile .*Compile it for this machine"):
        check_cpu(for_tiles)


BY_TVM = OpReport("fallback_0", "softmax", "tvm", {}, "fallback", "no kernel claims it")


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({"format_version": 3, "ops": (BY_TVM,)}, True),
        ({"format_version": 3, "spec": None}, True),  # what branches of a model held was not listed then
        ({"format_version": 3}, False),
        ({"ops": (BY_TVM,), "spec": None}, False),
    ],
)
def test_code_in_which_threads_may_disturb_each_other_is_not_run(fields: dict[str, object], is_refused: bool) -> None:
    spec = AttentionSpec(embed_dim=8, num_heads=2)
    aged = manifest(**{"spec": spec, "ops": (), **fields})
    if not is_refused:
        return check_loops(aged, Path("old.mhsa"))
    with pytest.raises(ArtifactError, match=r"Compile it again: mhsa compile old.mhsa/model.onnx --target here -o NEW"):
        check_loops(aged, Path("old.mhsa"))


@pytest.mark.parametrize(("fields", "wants"), [({"format_version": 4}, True), ({}, False)])
def test_code_of_tvms_own_from_before_format_5_gets_arrays_on_cache_lines(
    fields: dict[str, object], wants: bool
) -> None:
    assert manifest(ops=(BY_TVM,), **fields).wants_cache_lines is wants
    assert not manifest(ops=(), **fields).wants_cache_lines


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("m.onnx", "Compile it first: `mhsa compile` writes such a folder."),
        ("a.mhsa/manifest.json", "Did you mean the folder that it lies in, 'a.mhsa'?"),
        ("a.zip", "Unpack it: an artifact's code is mapped from a folder."),
        ("notes.txt", ""),
        ("notes.tx", ""),  # a file is no folder, however near its name is
    ],
)
def test_a_file_in_place_of_an_artifact_is_never_what_was_meant(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / "a.mhsa").mkdir()
    for file in ("m.onnx", "a.mhsa/manifest.json", "a.zip", "notes.txt"):
        (tmp_path / file).touch()
    with pytest.raises(ArtifactError) as caught:
        Artifact.open(tmp_path / name)
    assert caught.value.next_step == hint


def test_what_is_no_path_and_a_working_folder_that_is_gone_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ArtifactError, match="or an Artifact, got NoneType"):
        Artifact.open(None)  # type: ignore[arg-type]
    with pytest.raises(ArtifactError, match="nothing at"):
        Artifact.open(os.fsencode(tmp_path / "none"))  # type: ignore[arg-type]
    (tmp_path / "attention.mhsa").mkdir()
    for name, hint in (("atention.mhsa", "Did you mean 'attention.mhsa'?"), ("other.mhsa", "")):
        with pytest.raises(ArtifactError) as caught:
            Artifact.open(tmp_path / name)
        assert caught.value.next_step == hint
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ArtifactError, match=r"'a\.mhsa', from a working folder that is gone"):
        Artifact.open("a.mhsa")

"""One tree of errors: what machines, files and callers do wrong is said in four parts, and nothing hangs."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
from fuzz import file_kinds
from fuzz import files as fuzz_files
from onnx import TensorProto, helper
from support import tiny_artifact
from typer.testing import CliRunner

import mhsa_compile as mhsa
from mhsa_compile.cli import app
from mhsa_compile.cli.common import arrays, sources
from mhsa_compile.errors import (
    ArtifactError,
    BundleError,
    InputError,
    MhsaError,
    ModelError,
    OutputError,
    RecordsError,
    ResourceError,
    SpecError,
    TargetError,
    printable,
)
from mhsa_compile.files import input_files as files
from mhsa_compile.files import room
from mhsa_compile.files.foreign_errors import entry_point, reading
from mhsa_compile.frontend.export.source import read_onnx, read_source
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.records import record_files
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.compiled_attention import load
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.tuning.measure import work_results
from mhsa_compile.tuning.measure.work_bundle import WorkBundle
from mhsa_compile.tuning.search.study_storage import open_storage

DEEP = "[" * 100_000
PACKAGE = Path(mhsa.__file__).parent


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny_artifact.make(tmp_path_factory.mktemp("tiny") / "tiny.mhsa")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> file_kinds.Files:
    """With one artifact, which is what most kinds read."""
    folder = tmp_path_factory.mktemp("good")
    file_kinds.make(folder, ["block.mhsa"])
    return file_kinds.Files(folder, tmp_path_factory.mktemp("own"))


@pytest.fixture(scope="module")
def with_all_artifacts(tmp_path_factory: pytest.TempPathFactory) -> file_kinds.Files:
    folder = tmp_path_factory.mktemp("good")
    file_kinds.make(folder)
    return file_kinds.Files(folder, tmp_path_factory.mktemp("own"))


@pytest.mark.thorough_only("artifact", "resealed manifest", "safetensors", "target")
@pytest.mark.parametrize("kind", file_kinds.KINDS)
@pytest.mark.filterwarnings("ignore")
def test_a_slice_of_make_fuzz_files(request: pytest.FixtureRequest, kind: str) -> None:
    good = request.getfixturevalue("with_all_artifacts" if kind in file_kinds.OF_ARTIFACTS else "good")
    found = Counter(fuzz_files.outcome(good, 7, kind, number) for number in range(5 if kind == "onnx" else 40))
    assert {what for what, _ in found} <= {"accepted", "refused"}, found


def test_a_defect_shows_as_a_traceback(good: file_kinds.Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A campaign that sees no traceback could not fail."""

    def broken(files: object, draw: object) -> file_kinds.Case:
        return lambda: {}["nothing"]

    monkeypatch.setitem(file_kinds.KINDS, "npy", (broken, 1))
    assert fuzz_files.outcome(good, 0, "npy", 0)[0] == "traceback"


# Files.

READERS = {
    "npy": lambda path: arrays.read([f"x={path}"]),
    "spec": lambda path: sources.resolve(path.with_suffix(".toml"), {}),
    "onnx": read_onnx,
    "target": lambda path: load_profile(path.with_suffix(".toml")),
    "bundle": lambda path: WorkBundle.opened(path).__enter__(),
    "results": work_results.read,
    "records": record_files.examine,
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, read: object) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "pipe.toml")
    with pytest.raises(MhsaError, match="it is a pipe"):
        read(tmp_path / "pipe")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_a_path_with_a_nul_is_refused(read: object) -> None:
    with pytest.raises(MhsaError, match="null byte"):
        read(Path("a\0b"))


def test_devices_and_folders_are_no_files(tmp_path: Path) -> None:
    for path, what in (("/dev/zero", "a device"), (tmp_path, "a folder")):
        with pytest.raises(InputError, match=f"it is {what}"):
            files.open_file(path, InputError, "weights", "a file")


@pytest.mark.thorough
def test_weights_that_are_a_pipe(artifact: Artifact, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="it is a pipe"):
        load(artifact, weights=tmp_path / "pipe")


def test_a_small_zip_that_unfolds_to_much(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr("manifest.json", b"\0" * (8 << 20))
    with pytest.raises(BundleError, match="at most 100 times"), WorkBundle.opened(tmp_path / "bomb.zip"):
        pass


# Values.


def test_weights_by_names_of_any_type(artifact: Artifact) -> None:
    with pytest.raises(InputError, match="also 1, b"):
        load(artifact, weights={"w": tiny_artifact.W, 1: 0, "b": 0})
    with pytest.raises(InputError, match=r"arrays by name.*got int"):
        load(artifact, weights=5)


class Raising:
    """What DLPack gets from an object that is broken."""

    def __dlpack__(self, **_: object) -> object:
        raise KeyError("gone")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def test_dlpack_that_raises(artifact: Artifact) -> None:
    with pytest.raises(InputError, match="input 'x': expected DLPack memory"):
        load(artifact)(Raising(), tiny_artifact.draw()[1])


@pytest.mark.parametrize("names", [("cache", "stream"), ("self", "stream")])
def test_inputs_of_names_that_calls_have(artifact: Artifact, tmp_path: Path, names: tuple[str, str]) -> None:
    renamed = {info.name: name for info, name in zip(artifact.manifest.inputs, names, strict=True)}
    loaded = load(resealed(artifact, tmp_path, lambda m: [i.update(name=renamed[i["name"]]) for i in m["inputs"]]))
    x, mask = tiny_artifact.draw()
    tiny_artifact.assert_right(loaded(**dict(zip(names, (x, mask), strict=True))), x, mask)
    tiny_artifact.assert_right(loaded(x, mask), x, mask)


def resealed(artifact: Artifact, folder: Path, change: object) -> Path:
    """A copy of another manifest, under a seal that fits."""
    saved = artifact.save(folder / "resealed.mhsa").path
    manifest = json.loads((saved / "manifest.json").read_bytes())
    change(manifest)
    raw = json.dumps({**manifest, "sha256": "0" * 64}).encode()
    (saved / "manifest.json").write_bytes(raw.replace(b"0" * 64, hashlib.sha256(raw).hexdigest().encode(), 1))
    return saved


CHANGES = {
    "a target of no family": (lambda m: m["target"].pop("family"), "target"),
    "a feature that is no text": (lambda m: m["target"]["hardware"].update(features=[1]), "features"),
    "a negative dim": (lambda m: m["inputs"][0].update(dims=[-1, 8]), "dims"),
    "a dtype that is none": (lambda m: m["inputs"][0].update(dtype="float31"), "dtype"),
    "two inputs of a name": (lambda m: m["inputs"][0].update(name="mask"), "of one name"),
    "a pair of what is not there": (lambda m: m.update(in_place={"y": "nothing"}), "in_place"),
    "a mask of two ranks": (lambda m: m["inputs"][1].update(broadcast=["B"]), "broadcasts to 1"),
    "a spec that is none": (lambda m: m.update(spec={"embed_dim": 7, "num_heads": 2}), "embed_dim"),
    "a weight of any size": (lambda m: m["weights"][0].update(dims=["N", 8]), "size is not known"),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES.keys())
def test_a_manifest_is_typed_behind_its_seal(artifact: Artifact, tmp_path: Path, change: object, said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        load(resealed(artifact, tmp_path, change))


def test_code_for_another_cpu_behind_a_manifest_that_hides_it(tmp_path: Path) -> None:
    saved = tiny_artifact.make(tmp_path / "a.mhsa", hidden=("telepathy",))
    with pytest.raises(
        ArtifactError, match=r"a CPU with .*telepathy.*, got .* without telepathy, as .* says\. Compile it for this"
    ):
        load(saved)


@pytest.mark.parametrize("library", [b"no library", b"\x7fELF" + bytes(60)])
def test_a_library_that_does_not_load(artifact: Artifact, tmp_path: Path, library: bytes) -> None:
    saved = artifact.save(tmp_path / "a.mhsa").path
    (saved / "module.so").write_bytes(library)
    with pytest.raises(ArtifactError, match=r"a library that this machine loads.*noexec"):
        load(Artifact.assemble(saved, artifact.manifest))


def test_another_module_than_the_manifest_says(artifact: Artifact, tmp_path: Path) -> None:
    loaded = load(resealed(artifact, tmp_path, lambda m: m["inputs"][0].update(dims=["B", "L", 9])))
    with pytest.raises(ArtifactError, match="code that fits its manifest"):
        loaded(np.ones((2, 3, 9), np.float32), np.ones((2, 3), bool))


@pytest.mark.parametrize("text", [DEEP, "1", "\0"])
def test_text_that_is_no_spec(text: str) -> None:
    for parse in (AttentionSpec.from_json, AttentionSpec.from_toml):
        with pytest.raises(SpecError):
            parse(text if parse == AttentionSpec.from_json else f"a = {text}")


def test_fields_of_any_type() -> None:
    with pytest.raises(SpecError, match="unknown field 1"):
        AttentionSpec.from_dict({"embed_dim": 8, "num_heads": 2, 1: 2})
    with pytest.raises(SpecError, match="a kind among"):
        AttentionSpec(embed_dim=8, num_heads=2, static_mask={"kind": [1]})
    with pytest.raises(SpecError, match="at most 2147483647"):
        AttentionSpec(embed_dim=10**30, num_heads=2)


def test_files_that_are_nested(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text(f"a = {DEEP}")
    with pytest.raises(TargetError, match="nested too deeply"):
        load_profile(path)
    path.write_text(f'{{"format": 1, "key": {DEEP}\n')
    with pytest.raises(RecordsError):
        record_files.read(path)


# Memory.


def test_what_is_known_to_be_too_large_is_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available_memory", lambda: 1 << 20)
    with pytest.raises(ResourceError, match=r"0\.0 GiB are free"):
        mhsa.MultiHeadAttention(AttentionSpec(embed_dim=512, num_heads=4))


def test_memory_that_cannot_be_had_is_said_by_entry_points() -> None:
    for error in (
        MemoryError("no"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        RecursionError("deep"),
    ):

        def entry(error: Exception = error) -> None:
            raise error

        with pytest.raises(ResourceError):
            entry_point(entry)()
    with pytest.raises(OutputError, match="No space"):
        entry_point(lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))()
    with pytest.raises(ZeroDivisionError):  # a defect stays one
        entry_point(lambda: 1 / 0)()


def test_what_a_machine_has(tmp_path: Path) -> None:
    assert room.available_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 8 kB\n")
    assert room.available_memory(tmp_path) == 8192
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("5000\n")
    (tmp_path / "sys/fs/cgroup/memory.current").write_text("1000\n")
    assert room.available_memory(tmp_path) == 4000


def test_a_reader_keeps_errors_of_ours() -> None:
    with pytest.raises(SpecError), reading(InputError, "x", "y"):
        raise SpecError("a", "b", "c")
    with pytest.raises(InputError, match="KeyError: 'z'"), reading(InputError, "x", "y"):
        raise KeyError("z")


# Models.


def attention(batch: object = "B", *, name: str = "q") -> onnx.ModelProto:
    dims = [batch, 2, "L", 8]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, dims) for n in (name, "k", "v")]
    node = helper.make_node("Attention", [name, "k", "v"], ["y"])
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, dims)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


@pytest.mark.parametrize(
    ("symbol", "read"),
    [("c/d", "c_d"), ("a+b", "a_b"), ("-x", "x"), ("5", "dim_5"), ("L//0", "L_0"), ("L", "L"), ("L + 1", "L + 1"),
     ("L + 2*L", "L_2_L"), ("\x1b[31m", "dim_31m"), ("batch-size", "batch_size")],
)  # fmt: skip
def test_symbols_are_names_to_every_stage(symbol: str, read: str) -> None:
    model = read_source(attention(symbol), None, None).model
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == read


@pytest.mark.parametrize("size", [-1, 2**40])
def test_dims_that_are_no_sizes(size: int) -> None:
    with pytest.raises(ModelError, match=r"input 'q', axis 0: expected a size from 0"):
        read_source(attention(size), None, None)


@pytest.mark.parametrize("size", [0, -1, 10**30, 1.5, True, "3"])
def test_sizes_that_are_none(size: object) -> None:
    with pytest.raises(InputError, match="dims\\['B'\\]"):
        read_source(attention(), {"B": size}, None)


def test_a_model_in_memory_is_checked_as_a_file_is() -> None:
    with pytest.raises(ModelError, match="input 'k': expected one input of that name, got two"):
        read_source(attention(name="k"), None, None)
    away = attention()
    away.graph.initializer.add(name="w", dims=[2], data_type=1, data_location=1).external_data.add(key="location")
    with pytest.raises(ModelError, match="its weights in it, got 'w' in a file beside it"):
        read_source(away, None, None)


def test_weights_beside_a_file_are_read_from_its_folder_alone(tmp_path: Path) -> None:
    model = attention()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(2, dtype="f4"), "w"))
    path = tmp_path / "folder" / "model.onnx"
    path.parent.mkdir()
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    assert onnx.numpy_helper.to_array(read_source(path, None, None).model.graph.initializer[0]).tolist() == [0, 1]
    (path.parent / "w.bin").rename(tmp_path / "w.bin")
    with pytest.raises(ModelError, match="external data 'w\\.bin' beside it"):
        read_source(path, None, None)


@pytest.mark.parametrize("number", [0, 99])
def test_a_weight_of_no_dtype_is_named(number: int, tmp_path: Path) -> None:
    model = attention()
    model.graph.initializer.add(name="w", dims=[2], data_type=number, raw_data=bytes(8))
    with pytest.raises(ModelError, match=f"weight 'w' of a dtype of ONNX's, got number {number}"):
        read_source(model, None, None)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match=f"weight 'w' of a dtype of ONNX's, got number {number}"):
        read_source(tmp_path / "model.onnx", None, None)


def held_elsewhere(place: str, location: str) -> onnx.ModelProto:
    """A model with a tensor of external data in a node, in a branch or in a function."""
    held = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21, "own" : 1]> g (float[2] x, bool c) => (float[2] y) {
            a = Constant<value = float[2] {1, 2}>() b = Add(x, a)
            d = If(c)<then_branch = t () => (float[2] p) <float[2] w = {1, 2}> { p = Add(b, w) },
                      else_branch = e () => (float[2] q) { q = Identity(b) }>
            y = own.Plus(d) }
        <domain: "own", opset_import: ["" : 21]> Plus (u) => (v) {
            f = Constant<value = float[2] {1, 2}>() v = Add(u, f) }"""
    )
    branch = held.graph.node[2].attribute[0].g
    tensor = {
        "node": held.graph.node[0].attribute[0].t,
        "branch": branch.initializer[0],
        "function": held.functions[0].node[0].attribute[0].t,
    }[place]
    tensor.CopyFrom(onnx.TensorProto(name=tensor.name, dims=[2], data_type=1, data_location=1))
    tensor.external_data.add(key="location", value=location)
    return held


@pytest.mark.parametrize("place", ["node", "branch", "function"])
def test_external_data_is_looked_after_wherever_a_model_holds_it(place: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"its weights in it, got .* in a file beside it\. Load it with"):
        read_source(held_elsewhere(place, "w.bin"), None, None)
    (tmp_path / "outside.bin").write_bytes(np.float32([1, 2]).tobytes())
    path = tmp_path / "folder" / "model.onnx"
    path.parent.mkdir()
    for location, message in (("../outside.bin", "the model's own folder"), ("w.bin", "no such file. Copy the file")):
        path.write_bytes(held_elsewhere(place, location).SerializeToString())
        with pytest.raises(ModelError, match=message):
            read_source(path, None, None)
    (path.parent / "w.bin").write_bytes(np.float32([1, 2]).tobytes())
    read_source(path, None, None)


@pytest.mark.thorough_only("postgresql+psycopg://u:secret@h:z/q")
@pytest.mark.parametrize(
    "url", ["postgresql+psycopg://u:secret@h:z/q", "sqlite:///a\0b", "postgresql+psycopg://u@[::1/q"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(InputError, match="a database that SQLAlchemy knows") as refused:
        open_storage(url)
    assert "secret" not in str(refused.value)


# The terminal.


def test_what_names_could_do_to_a_terminal_is_spelled() -> None:
    assert printable("a\x1b[31mb\u202ec\x9bd\te\n") == "a\\u001b[31mb\\u202ec\\u009bd\te\n"
    assert "\x1b" not in str(InputError("input '\x1b[2J'", "x", "y"))


def test_a_table_of_foreign_names(artifact: Artifact, tmp_path: Path) -> None:
    def rename(manifest: dict[str, object]) -> None:
        manifest["versions"] = {"\x1b[2J": "\u202e"}

    for flags in ([], ["--json"]):
        folder = tmp_path / f"copy{len(flags)}"
        folder.mkdir()
        told = CliRunner().invoke(app.app, ["inspect", str(resealed(artifact, folder, rename)), *flags])
        assert told.exit_code == 0
        assert "\\u001b[2J" in told.output
        assert not {"\x1b", "\u202e"} & set(told.output)


def test_one_place_prints() -> None:
    for path in sorted((PACKAGE / "cli").rglob("*.py")):
        if path.name != "output.py":
            assert "typer.echo(" not in path.read_text(encoding="utf-8"), path.name


@pytest.mark.parametrize(
    "words",
    [["--seed", "-1"], ["--batch", "1" + "0" * 30], ["--length", "2000000000"], ["--input", "x=/dev/zero"]],
    ids=lambda words: " ".join(words)[:20],
)
def test_bad_flags_end_with_2_and_no_traceback(artifact: Artifact, tmp_path: Path, words: list[str]) -> None:
    told = CliRunner().invoke(app.app, ["run", str(artifact.path), "-o", str(tmp_path / "y.npz"), *words])
    assert told.exit_code == 2
    assert "Traceback" not in told.output
    assert not list(tmp_path.iterdir())


def test_the_campaign_sees_what_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    process = fuzz_files.Process(SimpleNamespace(pid=os.getpid()), None, [("npy", 0), ("npy", 1)])
    process.begin(("npy", 0))
    assert process.left == [("npy", 1)]
    assert not process.hangs()
    monkeypatch.setattr(fuzz_files, "HANG_CPU", -1.0)
    assert process.hangs()

"""The command `mhsa`."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import onnx
import onnx.parser
import pytest
import typer.main
from onnx import helper
from safetensors.numpy import load_file, save_file
from support.command import mhsa, printed, printed_json, refused
from support.cuda.made_up_gpus import B200, H200, MadeUp
from support.onnx_models import model_of
from support.records_made import made
from typer.testing import CliRunner

from mhsa_compile import __version__
from mhsa_compile.cli.app import app
from mhsa_compile.cli.commands import cache, compile, doctor
from mhsa_compile.cli.common import arrays
from mhsa_compile.cli.common.options import SpecFlags
from mhsa_compile.compiler.cache import artifact_store
from mhsa_compile.compiler.cache.artifact_store import CacheEntry
from mhsa_compile.errors import InstallationError
from mhsa_compile.hardware import environment, host, profile
from mhsa_compile.records import record_files
from mhsa_compile.runtime import cuda_devices
from mhsa_compile.runtime.artifact.manifest import WEIGHTS, Manifest, OpReport, TensorInfo
from mhsa_compile.spec import checks
from mhsa_compile.spec.attention_spec import MASKS, AttentionSpec
from mhsa_compile.spec.cache_format import CACHE_DTYPES


def names_below(group: Any, *before: str) -> Iterator[str]:
    """The words of every command of the group that a user can type."""
    for name, command in group.commands.items():
        is_group = hasattr(command, "commands")
        if is_group:
            yield from names_below(command, *before, name)
        if not is_group or command.invoke_without_command:
            yield " ".join((*before, name))


COMMANDS = tuple(names_below(typer.main.get_command(app)))


def test_help_lists_every_command() -> None:
    text = mhsa("--help").stdout
    assert all(command.split()[0] in text for command in COMMANDS)


@pytest.mark.thorough_only("compile")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_and_speaks_json(command: str) -> None:
    result = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_every_field_of_a_spec_has_a_flag_that_knows_its_choices() -> None:
    functions = {"mask_mod", "score_mod"}  # Python's: no words of a command line are one
    forms = {"kv_cache_dtype"}
    assert {flag.name for flag in fields(SpecFlags)} == set(AttentionSpec.__struct_fields__) - functions | forms
    types = get_type_hints(SpecFlags)
    choices = {name: get_args(get_args(types[name])[0]) for name in ("causal", "mask", "dtype", *forms)}
    assert choices == {
        "causal": ("true", *checks.ALIGNMENTS),
        "mask": tuple(MASKS),
        "dtype": checks.DTYPES,
        "kv_cache_dtype": CACHE_DTYPES,
    }
    assert SpecFlags(kv_cache_dtype="int8").spec_fields() == {"kv_cache": {"dtype": "int8"}}


def test_flags_become_what_a_spec_takes() -> None:
    flags = SpecFlags(embed_dim=64, bias=False, causal="true", window="5,-1", rope="theta=500", outputs="y,top_k:5")
    stated = flags.spec_fields()
    assert stated.pop("rope").theta == 500
    assert stated == {
        "embed_dim": 64,
        "bias": False,
        "causal": True,
        "window": [5, -1],
        "outputs": ["y", "top_k:5"],
    }
    assert SpecFlags(window="").spec_fields() == {"window": ""}


def test_the_module_is_the_command() -> None:
    child = subprocess.run(
        [sys.executable, "-m", "mhsa_compile", "--version"], capture_output=True, text=True, check=True
    )
    assert child.stdout.strip() == f"mhsa {__version__}"


def test_targets_are_listed() -> None:
    listed = printed_json("targets")
    assert [target["name"] for target in listed] == list(profile.profile_names())
    table = mhsa("targets").stdout
    assert all(name in table for name in profile.profile_names())


def test_an_unknown_target_gets_near_names() -> None:
    message = refused(mhsa("targets", "znver6"))
    assert "'znver6'" in message
    assert "Did you mean 'znver" in message


@pytest.mark.thorough
def test_doctor_finds_this_machine_well() -> None:
    result = mhsa("doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == 0
    assert findings["TVM pair"]["status"] == findings["TVM loads"]["status"] == "ok"
    assert findings["CPUs"]["found"].startswith(str(host.allowed_cpus()))
    assert all(finding["advice"] for finding in findings.values() if finding["status"] != "ok")


def test_doctor_shows_a_table_and_fails_where_something_must_be_repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_CHECKS", {"disk": lambda: [doctor.Finding("disk", "fail", "full", "Free some.")]})
    result = mhsa("doctor")
    assert result.exit_code == 1
    assert "Free some." in result.stdout


DRIVERS: dict[str, tuple[MadeUp | None, dict[str, tuple[str, str]]]] = {
    "none": (None, {"GPU": ("ok", "none: no library")}),
    "one": (MadeUp([H200]), {"NVIDIA driver": ("ok", "CUDA 13.0"),
                             "cuda:3": ("ok", "compute capability 9.0: compile with --target cuda-sm90a")}),
    "an older one": (MadeUp([H200], cuda=(12, 8)), {"NVIDIA driver": ("warn", "CUDA 12.8")}),
    "of a GPU without a target": (MadeUp([B200]), {"cuda:4": ("ok", "10.0: no target is for it")}),
}  # fmt: skip


@pytest.mark.parametrize(("driver", "expected"), DRIVERS.values(), ids=DRIVERS.keys())
def test_doctor_says_what_gpus_there_are(
    monkeypatch: pytest.MonkeyPatch, driver: MadeUp | None, expected: dict[str, tuple[str, str]]
) -> None:
    def answer() -> MadeUp:
        if driver is None:
            raise InstallationError("NVIDIA driver", "libcuda.so.1", "no library")
        return driver

    monkeypatch.setattr(cuda_devices, "driver", answer)
    findings = {finding.check: finding for finding in doctor._gpus()}
    assert findings.keys() >= expected.keys()
    for check, (status, found) in expected.items():
        assert findings[check].status == status and found in findings[check].found


def test_doctor_refuses_the_wrong_pair_before_importing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.15"}
    monkeypatch.setattr(environment, "stated_version", versions.get)
    result = mhsa("doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(result.stdout)}
    assert result.exit_code == 1
    assert findings["TVM pair"]["status"] == "fail"
    assert "pip install" in findings["TVM pair"]["advice"]
    assert "TVM loads" not in findings


def test_doctor_sees_a_cache_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "zig").write_text("a file in its place")
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(tmp_path / "zig"))
    monkeypatch.setattr(doctor, "_CHECKS", {"folders": doctor._CHECKS["folders"]})
    findings = {finding["check"]: finding for finding in json.loads(mhsa("doctor", "--json").stdout)}
    assert findings["cache folder"]["status"] == "warn"  # another takes its place
    assert str(tmp_path / "zig") in findings["cache folder"]["found"]


SPEC = ("--embed-dim", 64, "--num-heads", 8)
BAD_COMPILES = {
    "no source": ([], "an .onnx file, a spec .toml, or --embed-dim and --num-heads"),
    "half a spec": (["--embed-dim", 64], "only --embed-dim"),
    "source and flags": (["m.onnx", "--embed-dim", 64], "Leave one of them out"),
    "source of another kind": (["model.pt"], "'model.pt'"),
    "source that is not there": (["absent.onnx"], "'absent.onnx'"),
    "D not divisible by H": (["--embed-dim", 64, "--num-heads", 5], "embed_dim"),
    "H not divisible by G": ([*SPEC, "--num-kv-heads", 3], "num_kv_heads"),
    "unknown target": ([*SPEC, "--target", "znver6"], "znver5"),
    "causal without lengths": ([*SPEC, "--kv-embed-dim", 32, "--causal", "true"], "bottom_right"),
    "flag out of its choices": ([*SPEC, "--causal", "left"], "top_left"),
    "dtype": ([*SPEC, "--dtype", "float64"], "'bfloat16'"),
    "window of one side": ([*SPEC, "--window", "256"], "(left, right)"),
    "window of words": ([*SPEC, "--window", "256,none"], "LEFT,RIGHT, such as 256,0"),
    "negative window": ([*SPEC, "--window", "-2,0"], "-1 for unbounded"),
    "unknown pattern": ([*SPEC, "--static-mask", "bigbrd"], "Did you mean 'bigbird'"),
    "pattern out of range": (
        [*SPEC, "--static-mask", "longformer:window=3"],
        "longformer.window: expected an even number",
    ),
    "softcap": ([*SPEC, "--softcap", "-1"], "softcap: expected a positive finite"),
    "rope of words": ([*SPEC, "--rope", "theta=big"], "FIELD=VALUE"),
    "unknown field of rope": ([*SPEC, "--rope", "thta=1"], "Did you mean 'theta'"),
    "cache of another dtype without causality": ([*SPEC, "--kv-cache-dtype", "int8"], "--causal true"),
    "cache of wide rows": (
        [*SPEC, "--causal", "true", "--dtype", "bfloat16", "--kv-cache-dtype", "float32"],
        "fewer bits",
    ),
    "cache without causality": ([*SPEC, "--kv-cache"], "--causal true"),
    "positions beyond rope's": (
        [*SPEC, "--rope", "max_length=32", "--length", 33],
        "L of at most the spec's rope.max_length = 32",
    ),
    "two masks": ([*SPEC, "--static-mask", "strided:stride=4", "--mask", "bool"], "one mask, constant or of the call"),
    "static mask of free lengths": (
        [*SPEC, "--static-mask", "strided:stride=4"],
        "expected fixed lengths, as the spec's static_mask is laid out at compile time, got L left symbolic",
    ),
    "weights": ([*SPEC, "--weights", "int2"], '"int8"'),
    "length below one": ([*SPEC, "--length", 0], "--length"),
}


@pytest.mark.thorough_only("positions beyond rope's")
@pytest.mark.parametrize(("arguments", "reason"), BAD_COMPILES.values(), ids=BAD_COMPILES.keys())
def test_bad_compiles_are_refused(tmp_path: Path, arguments: list[object], reason: str) -> None:
    out = tmp_path / "out"
    assert reason in refused(mhsa("compile", *arguments, "-o", out))
    assert list(tmp_path.iterdir()) == []


BAD_VALUES = {
    "word": (
        ["compile", "--causal", "top-left"],
        "--causal: expected one of 'true', 'top_left', 'bottom_right', got 'top-left'. Did you mean 'top_left'?",
    ),
    "another tool's word": (
        ["compile", "--dtype", "fp16"],
        "--dtype: expected one of 'float32', 'bfloat16', 'float16', got 'fp16'. Did you mean 'float16'?",
    ),
    "below": (["compile", "--batch", "0"], f"--batch: expected a whole number from 1 to {checks.LARGEST}, got '0'."),
    "beyond": (
        ["compile", "--length", "9" * 5000],
        f"--length: expected a whole number from 1 to {checks.LARGEST}, got '{'9' * 60}'.",
    ),
    "no integer": (["compile", "--embed-dim", "3e2"], "--embed-dim: expected a whole number, got '3e2'."),
    "no number": (["compile", "--softcap", "much"], "--softcap: expected a number, got 'much'."),
    "no largest": (["run", "a.mhsa", "--threads", "-1"], "--threads: expected a whole number of 1 or more, got '-1'."),
    "NaN": (["bench", "--seconds", "nan"], "--seconds: expected a number of 0.1 or more, got 'nan'."),
}


@pytest.mark.parametrize(("arguments", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_values_that_options_cannot_take_are_refused_in_our_words(arguments: list[str], message: str) -> None:
    assert refused(mhsa(*arguments, *(["-o", "out"] if arguments[0] == "compile" else []))) == f"Error: {message}\n"


def test_a_broken_spec_file_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text("embed_dim = 64\nnum_heads = 8\nheads = 3\n")
    assert "heads" in refused(mhsa("compile", spec, "-o", tmp_path / "out"))


def test_an_artifact_as_a_source_is_told_where_its_model_is(tmp_path: Path) -> None:
    folder = tmp_path / "a.mhsa"
    folder.mkdir()
    (folder / "model.onnx").touch()
    assert repr(str(folder / "model.onnx")) in refused(mhsa("compile", folder, "-o", tmp_path / "out"))


def test_an_existing_output_is_refused_before_the_work(tmp_path: Path) -> None:
    message = refused(mhsa("compile", "--embed-dim", 64, "--num-heads", 8, "-o", tmp_path))
    assert "--force" in message


def test_a_full_disk_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/somewhere/y.npz")

    monkeypatch.setattr(profile, "profile_names", full)
    message = refused(mhsa("targets"))
    assert "/somewhere/y.npz" in message
    assert "No space left on device" in message


def test_other_errors_of_ours_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "profile_names", lambda: 1 // 0)
    assert isinstance(mhsa("targets").exception, ZeroDivisionError)


@pytest.mark.parametrize("command", ["run", "verify", "inspect"])
def test_what_is_no_artifact_is_refused(command: str, tmp_path: Path) -> None:
    assert str(tmp_path) in refused(mhsa(command, tmp_path / "absent.mhsa"))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--against", "torch,magic"], "'magic'"),
        (["--against", "torch,opnvino"], "Did you mean 'openvino'?"),
        (["--workload", "base129", "--against", ""], "base128"),
        (["--workload", "base128", "--length", 7], "A workload brings its own"),
    ],
)
def test_bad_benches_are_refused(arguments: list[object], reason: str) -> None:
    assert reason in refused(mhsa("bench", *arguments))


TUNED = {"rows": 2, "columns": 1, "block": 8, "depth": 16, "group": 2}
SMALL = ["--embed-dim", 32, "--num-heads", 4, "--causal", "true", "--mask", "bool"]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli") / "small.mhsa"
    tuned = folder.with_name("tuned.jsonl")
    key = {
        "rows": "any",
        "in_features": 32,
        "out_features": 32,
        "padding": 0,
        "dtype": "float32",
        "int8_weights": False,
    }
    record_files.append(tuned, made("native", key=key, kernel="cpu.linear", config=TUNED))
    tuned.write_bytes(tuned.read_bytes() + b'{"format"')
    result = mhsa("compile", *SMALL, "--records", tuned, "-o", folder, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[0].startswith("Warning: ") and "torn" in result.stderr
    described = json.loads(result.stdout)
    assert described["artifact"] == str(folder)
    assert described["target"] == "native"
    assert described["ops"]
    assert described["fused"] == len(described["attention"]) == 1
    return folder


def test_blocks_that_are_not_fused_are_named(tmp_path: Path) -> None:
    """Softmax over scores that were multiplied by a mask: attention, but not in a form that the operator has."""
    inputs = {"q": ["B", 2, "L", 8], "k": ["B", 2, 8, "L"], "v": ["B", 2, "L", 8], "m": ["B", 2, "L", "L"]}
    nodes = [
        helper.make_node("MatMul", ["q", "k"], ["scores"]),
        helper.make_node("Mul", ["scores", "m"], ["gated"], name="gate"),
        helper.make_node("Softmax", ["gated"], ["weights"], name="weigh"),
        helper.make_node("MatMul", ["weights", "v"], ["y"]),
    ]
    onnx.save(model_of(nodes, inputs, {"y": inputs["q"]}, opset=17), tmp_path / "m.onnx")
    result = printed("compile", tmp_path / "m.onnx", "-o", tmp_path / "m.mhsa")
    assert "0 of 1 attention blocks fused" in result
    assert "weigh (decomposed), not fused: Mul 'gate' scales by something that is not one constant" in result


def test_a_report_of_many_operations_fits_on_a_screen() -> None:
    """Operations that are alike are one row; the ones that take the longest come first."""
    linears = [OpReport(f"op_{i}", "linear", "cpu.linear", {}, "default", f"64 -> {64 << i % 3}") for i in range(30)]
    others = [OpReport(f"fallback_{i}", f"kind_{i}", "tvm", {}, "fallback", f"{i}") for i in range(25)]
    inputs = (TensorInfo("x", "float32", ("B", "L", 64)),)
    nothing = {"outputs": (), "weights": (), "semantics": (), "versions": {}, "files": {}, "spec": None}
    target = profile.load_profile("x86-64-v3")
    manifest = Manifest(mhsa_version="", inputs=inputs, target=target, ops=(*linears, *others), **nothing)
    rows = compile.rows(manifest, verbose=False)
    assert len(rows) == 15
    assert [row[:4] for row in rows[:3]] == [
        ("10: op_2 ... op_29", "linear", "cpu.linear", "57%"),
        ("10: op_1 ... op_28", "linear", "cpu.linear", "29%"),
        ("10: op_0 ... op_27", "linear", "cpu.linear", "14%"),
    ]
    assert rows[-1][0] == "14 others"
    assert len(compile.rows(manifest, verbose=True)) == 55


@pytest.mark.thorough
def test_an_artifact_is_profiled(compiled: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    arguments = ("profile", compiled, "--dim", "B=2", "--length", 7, "--seconds", 0.01)
    described = printed_json(*arguments, "--trace", trace)
    ops = {op["name"] for op in printed_json("inspect", compiled)["manifest"]["ops"]}
    assert {op["name"] for op in described["ops"]} == ops
    assert all(op["share_of_limit"] > 0 for op in described["ops"])
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == ops
    for flags in ((), ("--verbose",)):
        table = mhsa(*arguments, *flags)
        assert table.exit_code == 0, table.output
        assert "cpu.attention" in table.stdout and "A call takes" in table.stdout
        assert ("key_tile" in table.stdout) == bool(flags)
    assert "--trace" in refused(mhsa(*arguments, "--trace", tmp_path / "no" / "t.json"))
    assert "'M'" in refused(mhsa("profile", compiled, "--dim", "M=3"))


def test_an_artifact_is_inspected(compiled: Path) -> None:
    described = printed_json("inspect", compiled)
    assert described["hashes_ok"]
    assert {info["name"] for info in described["manifest"]["inputs"]} == {"x", "mask"}
    assert described["bytes"].keys() == described["manifest"]["files"].keys()
    table = mhsa("inspect", compiled).stdout
    assert all(name in table for name in ("q_proj.weight", "module.so", "native"))
    tuned, *others = sorted(described["manifest"]["ops"], key=lambda op: op["source"] != "record")
    assert tuned["config"] == TUNED and all(op["source"] == "default" for op in others)
    for reason in ("1.25 times as fast as the default (a CPU", "no record of this operation at these lengths"):
        assert reason in table
        assert any(reason in op["tuning"] for op in (tuned, *others))


def test_the_cache_tells_its_entries_apart(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "other.mhsa"
    assert mhsa("compile", *SMALL[:4], "--float32-products", "ieee", "-o", other).exit_code == 0
    what, options, target = cache._words(compiled)
    assert what.startswith("embed_dim=32 num_heads=4 causal=top_left mask=bool; takes x (B, L, 32) float32, mask ")
    assert "tuned operations" in options and target == "native"
    assert cache._words(other) == (
        "embed_dim=32 num_heads=4; takes x (B, L, 32) float32", "float32_products=ieee", "native"
    )  # fmt: skip
    assert cache._words(tmp_path)[0] == "damaged; it is compiled again when it is asked for"
    entries = [CacheEntry(compiled, 3 << 20, time.time()), CacheEntry(other, 5 << 20, time.time() - 7200)]
    monkeypatch.setattr(artifact_store, "entries", lambda: entries)
    table = printed("cache")
    for words in ("3.0 MiB", "5.0 MiB", "2 hours ago", "native", "embed_dim=32", "causal=top_left"):
        assert words in table


def test_an_artifact_is_verified(compiled: Path) -> None:
    assert printed_json("verify", compiled)["ok"]


def test_an_artifact_runs_on_random_and_on_given_inputs(compiled: Path, tmp_path: Path) -> None:
    out = tmp_path / "y.npz"
    described = printed_json("run", compiled, "--batch", 2, "--length", 1, "-o", out)["outputs"][0]
    with np.load(out) as outputs:
        y = outputs["y"]
    assert described["dims"] == [2, 1, 32] and (described["min"], described["max"]) == (y.min(), y.max())
    np.save(tmp_path / "x.npy", np.zeros((3, 5, 32), np.float32))
    assert mhsa("run", compiled, "--input", f"x={tmp_path / 'x.npy'}", "-o", out, "--threads", 1).exit_code == 0
    with np.load(out) as outputs:
        assert outputs["y"].shape == (3, 5, 32)  # the mask took its size from x
    assert {path.name for path in tmp_path.iterdir()} == {"x.npy", "y.npz"}


def test_an_npy_is_the_one_output_itself(compiled: Path, tmp_path: Path) -> None:
    for name in ("y.npy", "y.npz"):
        assert mhsa("run", compiled, "--length", 3, "-o", tmp_path / name).exit_code == 0
    y = np.load(tmp_path / "y.npy")
    assert y.shape == (1, 3, 32) and y.any()
    with np.load(tmp_path / "y.npz") as outputs:
        np.testing.assert_array_equal(outputs["y"], y)


@pytest.mark.thorough
def test_keys_and_values_of_two_inputs_from_flags_to_a_run(tmp_path: Path) -> None:
    folder, out = tmp_path / "apart.mhsa", tmp_path / "y.npz"
    flags = ["--embed-dim", 32, "--num-heads", 4, "--kv-embed-dim", 13, "--v-embed-dim", 7, "--mask", "key_padding"]
    result = mhsa("compile", *flags, "-o", folder)
    assert result.exit_code == 0, result.output
    described = printed_json("inspect", folder)["manifest"]
    assert {info["name"]: info["dims"] for info in described["inputs"]} == {
        "x": ["B", "L", 32], "key": ["B", "S", 13], "value": ["B", "S", 7], "mask": ["B", "S"],
    }  # fmt: skip
    assert (described["spec"]["kv_embed_dim"], described["spec"]["v_embed_dim"]) == (13, 7)
    assert mhsa("inspect", folder).exit_code == 0
    rows = np.random.default_rng(0).standard_normal((2, 11, 13), np.float32)
    np.save(tmp_path / "key.npy", rows)
    given = ["--input", f"key={tmp_path / 'key.npy'}"]
    result = mhsa("run", folder, *given, "--length", 5, "-o", out, "--json")
    assert result.exit_code == 0, result.output
    assert np.load(out)["y"].shape == (2, 5, 32)
    message = refused(mhsa("run", folder, *given, "--input", f"value={tmp_path / 'key.npy'}", "-o", out))
    assert "'value'" in message and "(B, S, 7)" in message
    assert printed_json("verify", folder)["ok"]
    message = refused(mhsa("compile", *flags[:4], "--v-embed-dim", 7, "-o", tmp_path / "other"))
    assert "v_embed_dim: expected None without kv_embed_dim" in message


def test_an_artifact_runs_with_other_weights(compiled: Path, tmp_path: Path) -> None:
    other, x, out = tmp_path / "other.safetensors", tmp_path / "x.npy", tmp_path / "y.npz"
    np.save(x, np.ones((1, 5, 32), np.float32))
    save_file({name: np.zeros_like(array) for name, array in load_file(compiled / WEIGHTS).items()}, other)
    assert mhsa("run", compiled, "--weights", other, "--input", f"x={x}", "-o", out).exit_code == 0
    assert not np.load(out)["y"].any()
    assert "weights" in refused(mhsa("run", compiled, "--weights", x))


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--input", "x"], "NAME=FILE.npy"),
        (["--input", "x=absent.npy"], "absent.npy"),
        (["--input", f"x={__file__}"], f"an .npy file, got {__file__}, a file of another kind"),
        (["--length", 7, "-o", "/absent/folder/y.npz"], "/absent/folder"),
        (["-o", "y.txt"], "a file named .npy, of one output, or .npz, got 'y.txt'"),
        (["-o", ""], "a place for a file, got the folder '.'"),
        (["-o", "/dev"], "a place for a file, got the folder '/dev'"),
        (["-o", "/dev/null"], "a place for a file, got '/dev/null', which is none"),
        (["--threads", 20_000], "threads: expected at most"),
    ],
)
def test_bad_runs_are_refused(compiled: Path, arguments: list[object], reason: str) -> None:
    assert reason in refused(mhsa("run", compiled, *arguments))


def test_files_that_hold_no_numbers_are_refused_in_our_words(compiled: Path, tmp_path: Path) -> None:
    """NumPy's advice there is to unpickle them, which runs whatever code they hold."""
    objects, twice = tmp_path / "objects.npy", tmp_path / "x.npy"
    np.save(objects, np.array([{}], dtype=object), allow_pickle=True)
    np.save(twice, np.zeros((1, 5, 32), np.float32))
    message = refused(mhsa("run", compiled, "--input", f"x={objects}"))
    assert "expected an array of numbers" in message and "pickle" not in message
    assert "one file for an input, got two" in refused(
        mhsa("run", compiled, "--input", f"x={twice}", "--input", f"x={twice}")
    )


def test_a_bench_of_too_many_threads_is_refused_before_the_work() -> None:
    assert "threads: expected at most" in refused(mhsa("bench", "--threads", 20_000))


def test_a_run_writes_through_a_link(compiled: Path, tmp_path: Path) -> None:
    (tmp_path / "y.npz").symlink_to("kept.npz")
    assert mhsa("run", compiled, "-o", tmp_path / "y.npz").exit_code == 0
    assert (tmp_path / "y.npz").is_symlink() and np.load(tmp_path / "kept.npz")["y"].size


STOPPED = """
import os, signal
from pathlib import Path
from mhsa_compile.cli import app as cli
from mhsa_compile.files import atomic_write

@cli.app.command("stop")
def stop(place: Path, wrapped: bool = False) -> None:
    with atomic_write.atomic_folder(place, False, "mark") as folder:
        (folder / "half").touch()
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except SystemExit as error:
            raise RuntimeError(error) if wrapped else error

cli.main()
"""


@pytest.mark.parametrize("how", [[], pytest.param(["--wrapped"], marks=pytest.mark.thorough)])
def test_a_signal_that_ends_a_command_leaves_nothing_behind(tmp_path: Path, how: list[str]) -> None:
    """The signal may come at any time: also inside a function that TVM calls, which makes a RuntimeError of whatever is
    raised."""
    command = [sys.executable, "-c", STOPPED, "stop", tmp_path / "new", *how]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")
    assert not list(tmp_path.iterdir())


def test_a_wrong_input_is_refused(compiled: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((1, 5, 33), np.float32))
    assert "x" in refused(mhsa("run", compiled, "--input", f"x={tmp_path / 'x.npy'}", "-o", tmp_path / "y.npz"))
    assert not (tmp_path / "y.npz").exists()


@pytest.mark.thorough
def test_force_replaces_an_artifact(compiled: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy.mhsa"
    shutil.copytree(compiled, folder)
    (folder / "stray").touch()
    assert mhsa("compile", *SMALL, "-o", folder, "--force").exit_code == 0
    assert not (folder / "stray").exists()
    assert mhsa("inspect", folder).exit_code == 0


@pytest.mark.thorough
def test_a_bench_reports_every_peer(compiled: Path) -> None:
    (report,) = printed_json("bench", compiled, "--against", "torch", "--length", 16, "--seconds", 0.1).values()
    assert len(report["rows"]) == 2


@pytest.mark.thorough
def test_a_bench_shows_a_table(compiled: Path) -> None:
    result = printed("bench", compiled, "--against", "torch,openvino", "--length", 16, "--seconds", 0.1, "--dim", "B=2")
    assert "B=2" in result and "GFLOP/s" in result and "mhsa_compile" in result


@pytest.mark.thorough
def test_symbols_of_other_names_have_their_sizes_by_dim(tmp_path: Path) -> None:
    """An ONNX model made elsewhere: its inputs are not called x, and its symbols not B and L."""
    folder, dims = tmp_path / "m.mhsa", ["batch", 2, "seq", 8]
    node = helper.make_node("Attention", ["query", "key", "key"], ["y"])
    onnx.save(model_of([node], {"query": dims, "key": dims}, {"y": dims}, opset=23), tmp_path / "m.onnx")
    assert "such as seq=128, got 'seq=0'" in refused(
        mhsa("compile", tmp_path / "m.onnx", "--dim", "seq=0", "-o", folder)
    )
    assert mhsa("compile", tmp_path / "m.onnx", "--dim", "batch=1", "-o", folder).exit_code == 0
    assert "State it: --dim seq=N" in refused(mhsa("run", folder))
    assert "a symbol of the inputs: seq, got 'batch'" in refused(mhsa("run", folder, "--dim", "batch=1"))
    ran = printed_json("run", folder, "--dim", "seq=7")
    assert ran["outputs"][0]["dims"] == [1, 2, 7, 8]
    assert "expected sizes for seq, got none" in mhsa("bench", folder).stderr
    assert "expected sizes for batch, seq, got none" in refused(mhsa("bench", tmp_path / "m.onnx"))
    (report,) = printed_json("bench", folder, "--dim", "seq=7", "--against", "onnxruntime", "--seconds", 0.1).values()
    assert (report["dims"], report["dtype"], report["floor"]) == ({"seq": 7}, "float32", None)


def test_files_of_bfloat16_are_float32(tmp_path: Path) -> None:
    """An .npy file has no word for it: float32 comes in and is rounded, and goes out as it is."""
    infos = (TensorInfo("x", "bfloat16", ("B", 3)), TensorInfo("z", "bfloat16", ("B", 3)))
    given = np.array([[1, 2.5, 3.1415927]], np.float32)
    np.save(tmp_path / "x.npy", given)
    values = arrays.complete(arrays.read([f"x={tmp_path / 'x.npy'}"]), infos, {}, seed=0)
    assert {str(array.dtype) for array in values.values()} == {"bfloat16"}
    assert np.array_equal(values["x"], given.astype("bfloat16"))
    arrays.write(tmp_path / "y.npz", values)
    with np.load(tmp_path / "y.npz") as saved:
        assert saved["x"].dtype == np.float32
        assert np.array_equal(saved["x"].astype("bfloat16"), values["x"])


@pytest.mark.thorough
def test_outputs_of_the_layers_of_a_file(tmp_path: Path) -> None:
    core = (
        '<ir_version: 10, opset_import: ["": 23]> core (float[B,2,L,4] q) => (float[B,2,L,4] y) {y = Attention (q,q,q)}'
    )
    file, out, spec = tmp_path / "core.onnx", tmp_path / "core.mhsa", tmp_path / "spec.toml"
    file.write_bytes(onnx.parser.parse_model(core).SerializeToString())
    spec.write_text("embed_dim = 8\nnum_heads = 2\n")
    for words, expected in (("entropy@1", "a layer from 0 to 0"), ("entropi", "Did you mean"), ("", "some of")):
        assert expected in refused(mhsa("compile", file, "--outputs", words, "-o", out))
    assert "Leave one of them out" in refused(mhsa("compile", file, "--outputs", "lse", "--embed-dim", 8, "-o", out))
    assert "'lse@0'" in refused(mhsa("compile", spec, "--outputs", "y,lse@0", "-o", out))
    assert mhsa("compile", file, "--outputs", "entropy,weights@0", "-o", out).exit_code == 0
    held = printed_json("inspect", out)["manifest"]
    assert [info["name"] for info in held["outputs"]] == ["y", "layer0_entropy", "layer0_weights"]
    assert [block["name"] for block in held["attention"]] == ["y"] and "layer" in mhsa("inspect", out).stdout
    assert mhsa("run", out, "--dim", "B=2", "--dim", "L=5", "-o", tmp_path / "all.npz").exit_code == 0
    with np.load(tmp_path / "all.npz") as arrays:
        assert {name: arrays[name].shape for name in arrays} == {
            "y": (2, 2, 5, 4), "layer0_entropy": (2, 2, 5), "layer0_weights": (2, 2, 5, 5),
        }  # fmt: skip

"""The cache of what was compiled before: it gives the bytes of a compilation, or nothing."""

from __future__ import annotations

import copy
import json
import os
import random
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import mhsa_compile as mhsa
from mhsa_compile.cli.app import app
from mhsa_compile.compiler import pipeline
from mhsa_compile.compiler.cache import artifact_store, lookup
from mhsa_compile.compiler.cache.lookup import CacheRequest
from mhsa_compile.compiler.codegen import build
from mhsa_compile.errors import InputError
from mhsa_compile.frontend.export.export import export
from mhsa_compile.frontend.export.module_state import state_of
from mhsa_compile.hardware import data_paths
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention
from mhsa_compile.records import record_files
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.artifact.manifest import MANIFEST, MODEL, MODULE, WEIGHTS, Manifest
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.position_encoding import Rope

SPEC = AttentionSpec(embed_dim=12, num_heads=2, causal=True, rope=Rope(max_length=64), sinks=True)
FILES = (MANIFEST, MODULE, WEIGHTS, MODEL)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", os.environ.get("ZIG_GLOBAL_CACHE_DIR") or f"{home}/zig")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(artifact_store.SWITCH, "1")


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A code generator that writes no code, and how many times it was asked."""
    asked: list[int] = []

    def write(scheduled: Any, profile: Any, library: Path) -> None:
        asked.append(len(asked))
        library.write_bytes(b"code")

    monkeypatch.setattr(build, "build", write)
    return asked


def contents(artifact: Artifact) -> dict[str, bytes]:
    return {name: (artifact.path / name).read_bytes() for name in FILES}


def made(folder: Path, code: bytes = b"code") -> Artifact:
    """An artifact of no meaning."""
    folder.mkdir()
    for name in (MODULE, WEIGHTS, MODEL):
        (folder / name).write_bytes(code)
    nothing: dict[str, Any] = {"inputs": (), "outputs": (), "weights": (), "semantics": (), "versions": {}, "ops": ()}
    manifest = Manifest(mhsa_version="0", spec=None, target=load_profile("x86-64-v3"), files={}, **nothing)
    return Artifact.assemble(folder, manifest)


def key_number(number: int) -> str:
    return f"{number:064x}"


def asked(**changes: Any) -> CacheRequest:
    return CacheRequest(**{"profile": load_profile("x86-64-v3"), "weights": None, "records": (), **changes})


@pytest.mark.thorough
def test_what_it_gives_is_what_compiling_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another layer of the same spec: its own weights, and the code of the first, byte for byte as if compiled."""
    first, second = MultiHeadAttention(SPEC).eval(), MultiHeadAttention(SPEC).eval()
    compiled = mhsa.compile(first)
    expected = contents(mhsa.compile(second, cache=False))
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("it was compiled again"))
    found = mhsa.compile(second)
    assert contents(found) == expected
    assert contents(found)[WEIGHTS] != contents(compiled)[WEIGHTS]
    assert contents(mhsa.compile(first)) == contents(compiled)
    x = torch.randn(2, 5, 12)
    with torch.no_grad():
        np.testing.assert_allclose(mhsa.load(found)(x).numpy(), second(x).numpy(), rtol=0, atol=2e-6)


@pytest.mark.thorough
def test_a_spec_is_compiled_once_and_its_weights_are_new(builds: list[int]) -> None:
    one, other = mhsa.compile(SPEC), mhsa.compile(SPEC)
    assert len(builds) == 1
    assert contents(one)[WEIGHTS] != contents(other)[WEIGHTS]
    mhsa.compile(SPEC, dims={"B": 1})
    assert len(builds) == 2
    mhsa.compile(SPEC, dims={"B": 1})
    assert len(builds) == 2


def test_a_model_is_known_by_its_bytes(builds: list[int], tmp_path: Path) -> None:
    model = export(MultiHeadAttention(SPEC))
    for _ in range(2):
        mhsa.compile(model)
    assert len(builds) == 1
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    mhsa.compile(path)
    assert len(builds) == 1
    weight = next(tensor for tensor in model.graph.initializer if tensor.name == "q_proj.weight")
    weight.raw_data = weight.raw_data[:-1] + bytes([weight.raw_data[-1] ^ 1])
    mhsa.compile(model)
    assert len(builds) == 2
    mhsa.compile(model, dims={"L": 7})
    assert len(builds) == 3


@pytest.mark.thorough
def test_any_other_module_is_known_by_what_it_exports_to(builds: list[int]) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.factor = nn.Linear(12, 12), 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.linear(x * self.factor).view(x.shape[0], x.shape[1], 2, 6).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(q, q, q)

    block, x = Block().eval(), torch.zeros(2, 5, 12)
    for _ in range(2):
        mhsa.compile(block, example_inputs=[x])
    assert len(builds) == 1
    block.factor = 2.0  # in no parameter and no buffer
    mhsa.compile(block, example_inputs=[x])
    assert len(builds) == 2


@pytest.mark.thorough
def test_off_nothing_is_read_or_kept(builds: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mhsa.compile(SPEC, cache=False)
    mhsa.compile(SPEC, dump=tmp_path / "stages")
    monkeypatch.setenv(artifact_store.SWITCH, "0")
    mhsa.compile(SPEC)
    assert len(builds) == 3
    assert not data_paths.artifact_cache().exists()
    monkeypatch.setenv(artifact_store.SWITCH, "off")
    with pytest.raises(InputError, match="MHSA_CACHE"):
        mhsa.compile(SPEC)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_entry_is_compiled_again_and_replaced(name: str, builds: list[int]) -> None:
    model = export(MultiHeadAttention(SPEC))
    expected = contents(mhsa.compile(model))
    (entry,) = artifact_store.entries()
    data = (entry.path / name).read_bytes()
    (entry.path / name).write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert contents(mhsa.compile(model)) == expected
    assert len(builds) == 2
    (entry.path / name).unlink()
    assert contents(mhsa.compile(model)) == expected
    assert len(builds) == 3
    assert contents(mhsa.compile(model)) == expected
    assert len(builds) == 3


def with_subclass(module: MultiHeadAttention) -> nn.Module:
    class Derived(MultiHeadAttention):
        pass

    return Derived(SPEC)


def with_hook(module: MultiHeadAttention) -> nn.Module:
    module.out_proj.register_forward_hook(lambda layer, inputs, output: output + 1)
    return module


def with_own_forward(module: MultiHeadAttention) -> nn.Module:
    module.q_proj.forward = lambda x: x  # type: ignore[method-assign]
    return module


def with_shared_memory(module: MultiHeadAttention) -> nn.Module:
    module.k_proj.weight = module.q_proj.weight
    return module


def with_other_layer(module: MultiHeadAttention) -> nn.Module:
    module.q_proj = nn.Sequential(module.q_proj, nn.Identity())  # type: ignore[assignment]
    return module


def with_other_dtype(module: MultiHeadAttention) -> nn.Module:
    return module.to(torch.float64)


def with_other_shape(module: MultiHeadAttention) -> nn.Module:
    module.q_proj.weight = nn.Parameter(torch.zeros(6, 12))
    return module


def with_strides(module: MultiHeadAttention) -> nn.Module:
    module.q_proj.weight = nn.Parameter(module.q_proj.weight.detach().t())
    return module


def with_parametrization(module: MultiHeadAttention) -> nn.Module:
    nn.utils.parametrizations.weight_norm(module.q_proj)
    return module


def with_other_spec(module: MultiHeadAttention) -> nn.Module:
    module.spec = msgspec.structs.replace(SPEC, bias=False)
    return module


CHANGED = [with_subclass, with_hook, with_own_forward, with_shared_memory, with_other_layer, with_other_dtype,
           with_other_shape, with_strides, with_parametrization, with_other_spec]  # fmt: skip


@pytest.mark.parametrize("change", CHANGED, ids=lambda change: change.__name__)
def test_a_module_that_is_not_as_its_class_makes_it_must_be_exported(change: Any) -> None:
    assert state_of(MultiHeadAttention(SPEC)) is not None
    assert state_of(change(MultiHeadAttention(SPEC))) is None


def test_other_sources_have_no_state() -> None:
    assert state_of(nn.Linear(3, 3)) is None
    assert state_of(SPEC) is None
    assert state_of("model.onnx") is None
    assert state_of(ScaledDotProductAttention(AttentionSpec(embed_dim=12, num_heads=2, alibi=True))) is not None


@pytest.mark.thorough
@pytest.mark.parametrize("width", [1, 12])
def test_nothing_but_the_weights_hangs_on_their_values(width: int) -> None:
    """Else layers of a spec could not share their code."""
    module = MultiHeadAttention(AttentionSpec(embed_dim=width, num_heads=1))
    seen = set()
    for value in (None, 0.0, 1.0, float("nan")):
        for parameter in module.parameters():
            if value is not None:
                nn.init.constant_(parameter, value)
        found = pipeline.import_source(module)
        seen.add((found.module.script(), repr(sorted(found.ops.items()))))
    assert len(seen) == 1


def test_the_key_holds_what_the_bytes_hang_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module = MultiHeadAttention(SPEC)

    def key(module: nn.Module = module, dims: dict[str, int] | None = None, **changes: Any) -> str:
        state = state_of(module)
        assert state is not None
        return asked(**changes).key_of_module(module, state, dims)

    turned = copy.deepcopy(module)
    turned.rope_cos += 1
    records = tuple(record_files.gather([data_paths.shipped_records("x86-64-v3")])[0])
    keys = [
        key(),
        key(dims={"B": 1}),
        key(dims={"L": 1}),
        key(weights="int8"),
        key(profile=load_profile("x86-64-v4")),
        key(records=records),
        key(records=records[:-1]),
        key(turned),
        key(MultiHeadAttention(msgspec.structs.replace(SPEC, scale=0.5))),
        key(MultiHeadAttention(AttentionSpec(embed_dim=12, num_heads=2))),
        key(ScaledDotProductAttention(AttentionSpec(embed_dim=12, num_heads=2))),
    ]
    assert len(set(keys)) == len(keys)
    assert key() == key(MultiHeadAttention(SPEC)) == key(dims={})
    monkeypatch.setattr(lookup, "_sources", lambda: b"another checkout")
    assert key() not in keys
    monkeypatch.undo()
    monkeypatch.setattr(lookup.environment, "installed_version", lambda name: "9.9")
    assert key() not in keys


def test_the_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    artifact = made(tmp_path / "one", b"x" * 1000)
    artifact_store.keep(key_number(0), artifact)
    (entry,) = artifact_store.entries()
    monkeypatch.setattr(artifact_store, "LIMIT", 3 * entry.size)
    for number in (1, 2):
        artifact_store.keep(key_number(number), artifact)
    for number in range(3):
        os.utime(data_paths.artifact_cache() / key_number(number), (number, number))
    assert artifact_store.find(key_number(0)) is not None  # and is used now
    artifact_store.keep(key_number(3), artifact)
    assert {entry.path.name for entry in artifact_store.entries()} == {key_number(n) for n in (0, 2, 3)}
    monkeypatch.setattr(artifact_store, "LIMIT", entry.size - 1)
    artifact_store.keep(key_number(4), artifact)
    assert key_number(4) not in {entry.path.name for entry in artifact_store.entries()}


def test_code_is_not_taken_from_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    artifact = made(tmp_path / "one")
    artifact_store.keep(key_number(0), artifact)
    root = data_paths.artifact_cache()
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o777)
    assert artifact_store.find(key_number(0)) is None
    artifact_store.keep(key_number(1), artifact)
    assert len(artifact_store.entries()) == 1


@pytest.mark.thorough
def test_a_folder_that_cannot_be_made_costs_nothing(
    builds: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        assert contents(mhsa.compile(SPEC))[MODULE] == b"code"
    assert len(builds) == 2
    assert artifact_store.entries() == []
    assert artifact_store.clear() == []


def churn(folder: Path, seed: int, rounds: int) -> None:
    """Keeps, finds and drops three entries at random; what is found is whole and what belongs there."""
    draw = random.Random(seed)
    artifacts = [made(folder / f"{seed}_{number}", bytes([number]) * 70_000) for number in range(3)]
    for _ in range(rounds):
        number = draw.randrange(3)
        act = draw.choice(("keep", "find", "find", "drop"))
        if act == "keep":
            artifact_store.keep(key_number(number), artifacts[number])
        elif act == "drop":
            artifact_store.drop(data_paths.artifact_cache() / key_number(number))
        elif (found := artifact_store.find(key_number(number))) is not None:
            assert contents(found) == contents(artifacts[number])


CHILD = "import sys; from pathlib import Path; from compiler_cache_churn import churn; churn(Path(sys.argv[1]), 9, 50)"


@pytest.mark.thorough
def test_several_threads_and_processes_share_it(tmp_path: Path) -> None:
    (tmp_path / "compiler_cache_churn.py").write_bytes(Path(__file__).read_bytes())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"], *sys.path])}
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], env=environment, stderr=subprocess.PIPE)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda seed: churn(tmp_path, seed, 50), range(3)))
    _, said = child.communicate(timeout=120)
    assert child.returncode == 0, said.decode()
    artifact_store.keep(key_number(7), made(tmp_path / "last"))  # sweeps what is left of others, if anything is
    assert not [entry.name for entry in data_paths.artifact_cache().iterdir() if entry.name.startswith(".")]


def test_the_command_shows_and_clears_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = CliRunner().invoke
    assert json.loads(run(app, ["cache", "--json"]).stdout)["entries"] == []
    for number in range(2):
        artifact_store.keep(key_number(number), made(tmp_path / str(number)))
    said = json.loads(run(app, ["cache", "--json"]).stdout)
    assert (said["folder"], said["on"]) == (str(data_paths.artifact_cache()), True)
    assert said["bytes"] == sum(entry["size"] for entry in said["entries"]) > 0
    (data_paths.artifact_cache() / key_number(1) / MANIFEST).write_text("{}")
    shown = run(app, ["cache"])
    assert shown.exit_code == 0
    assert "2 artifacts" in shown.stdout and "damaged" in shown.stdout
    monkeypatch.setenv(artifact_store.SWITCH, "0")
    assert "It is off: MHSA_CACHE=0" in run(app, ["cache"]).stdout
    assert json.loads(run(app, ["cache", "clear", "--json"]).stdout)["deleted"] == 2
    assert artifact_store.entries() == []

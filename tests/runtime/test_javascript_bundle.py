"""Bundles of JavaScript: artifacts for WebAssembly, called in Node, against the float64 oracle."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from search_page.server import server
from support import browser
from support.javascript import node

import mhsa_compile as mhsa
from mhsa_compile.compiler.codegen import build, webassembly
from mhsa_compile.errors import ArtifactError, BuildError, InputError, OutputError, TargetError
from mhsa_compile.hardware.profile import load_profile
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.standalone import javascript_bundle
from mhsa_compile.runtime.standalone.bundle import bundle
from mhsa_compile.verification.verify import verify_run

JAVASCRIPT = Path(javascript_bundle.__file__).with_name("javascript")
LENGTHS = [{"B": 2, "L": 1}, {"B": 1, "L": 7}, {"B": 1, "L": 197}]
BLOCK = mhsa.AttentionSpec(embed_dim=36, num_heads=6, num_kv_heads=2, causal=True, mask="key_padding")
SPECS = {"causal, a mask": (BLOCK, LENGTHS)}
MORE_SPECS = {
    "a block": (mhsa.AttentionSpec(embed_dim=44, num_heads=4), LENGTHS),
    "a mask of pairs": (
        mhsa.AttentionSpec(embed_dim=24, num_heads=3, mask="bool"),
        [{"B": 2, "L": 37, "mask_B": 2, "mask_H": 1, "mask_L": 37, "mask_S": 37}],
    ),
    "a window, rotary, capped": (
        mhsa.AttentionSpec(embed_dim=40, num_heads=5, causal=True, rope=True, softcap=20.0, window=(13, 0)),
        [{"B": 2, "L": 41}],
    ),
    "cross-attention": (
        mhsa.AttentionSpec(embed_dim=24, num_heads=3, kv_embed_dim=17, mask="key_padding"),
        [{"B": 2, "L": 5, "S": 37}],
    ),
    "float16": (mhsa.AttentionSpec(embed_dim=48, num_heads=4, dtype="float16"), [{"B": 1, "L": 23}]),
    "bfloat16": (mhsa.AttentionSpec(embed_dim=48, num_heads=4, dtype="bfloat16"), [{"B": 1, "L": 23}]),
    "a cache": (
        mhsa.AttentionSpec(embed_dim=32, num_heads=4, num_kv_heads=2, causal=True, kv_cache=True),
        [{"B": 3, "L": 1, "C": 29}],
    ),
    "what a softmax is like": (
        mhsa.AttentionSpec(embed_dim=24, num_heads=3, outputs=("y", "lse", "top_k:2")),
        [{"B": 2, "L": 19}],
    ),
}
Made = Callable[[str], tuple[Artifact, Path]]
CALL = """async (arrays) => {
    const { load } = await import("./attention.js");
    const attention = await load();
    const kinds = { float32: Float32Array, bool: Uint8Array };
    const inputs = attention.inputs.map(({ name, dtype }) => {
        const [data, dims] = arrays[name];
        return [name, { data: kinds[dtype].from(data, Number), dims }];
    });
    const { y } = attention.run(Object.fromEntries(inputs));
    return [Array.from(y.data), y.dims];
}"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The artifact and the bundle of a spec by its name."""
    folder = tmp_path_factory.mktemp("bundles")
    artifacts: dict[str, Artifact] = {}

    def get(name: str) -> tuple[Artifact, Path]:
        place = folder / name.replace(" ", "-")
        if name not in artifacts:
            artifacts[name] = mhsa.compile((SPECS | MORE_SPECS)[name][0], target="wasm32")
            bundle(artifacts[name], place)
        return artifacts[name], place

    return get


def check_against_oracle(artifact: Artifact, place: Path, folder: Path, cases: list[dict[str, int]]) -> None:
    """Asserts that the bundle in `place` does what `artifact` is to do, by the error budget."""
    order = [info.name for info in artifact.manifest.outputs]
    with node.calls(place, folder) as call:

        def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
            outputs = call(inputs)
            return [outputs[name] for name in order]

        verdict = verify_run(artifact, run, cases=cases, self_checks=False)
    assert verdict.ok, verdict.worst


@pytest.mark.parametrize("name", SPECS)
def test_node_agrees_with_the_oracle(made: Made, name: str, tmp_path: Path) -> None:
    artifact, place = made(name)
    check_against_oracle(artifact, place, tmp_path, (SPECS | MORE_SPECS)[name][1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE_SPECS)
def test_node_agrees_with_the_oracle_on_more(made: Made, name: str, tmp_path: Path) -> None:
    artifact, place = made(name)
    check_against_oracle(artifact, place, tmp_path, MORE_SPECS[name][1])


@pytest.mark.thorough
def test_relaxed_code_agrees_with_the_oracle(tmp_path: Path) -> None:
    """Fused multiply-adds, as the CPU has them; Node 20 has to be asked for the instructions."""
    artifact = mhsa.compile(BLOCK, target="wasm32-relaxed")
    bundle(artifact, tmp_path / "bundle")
    check_against_oracle(artifact, tmp_path / "bundle", tmp_path, SPECS["causal, a mask"][1])


@pytest.mark.thorough
def test_other_weights_are_over_the_budget(made: Made, tmp_path: Path) -> None:
    """A control: what is judged are the bundle's own numbers."""
    artifact, place = made("causal, a mask")
    case = SPECS["causal, a mask"][1][1:2]
    other = tmp_path / "other"
    bundle(mhsa.compile(mhsa.MultiHeadAttention(BLOCK), target="wasm32"), other)
    with pytest.raises(AssertionError, match="error"):
        check_against_oracle(artifact, other, tmp_path, case)
    check_against_oracle(artifact, place, tmp_path, case)


def test_calls_are_refused_by_name_and_keep_no_memory(made: Made, tmp_path: Path) -> None:
    place = made("causal, a mask")[1]
    right = {"x": np.ones((1, 7, 36), np.float32), "mask": np.ones((1, 7), bool)}
    wrong = {
        "inputs: expected x,mask, got none of mask": {"x": right["x"]},
        "inputs: expected x,mask, got also z": {**right, "z": right["x"]},
        "input x: expected { data: Float32Array, dims } (float32), got Float64Array": {
            **right,
            "x": right["x"].astype(np.float64),
        },
        "input x: expected dims B,L,36, got 7,36": {**right, "x": right["x"][0]},
        "input x: expected B,L,36 with 36 = 36, got 1,7,35": {**right, "x": np.ones((1, 7, 35), np.float32)},
        "input x: expected sizes of 1 and more, got 1,0,36": {**right, "x": np.ones((1, 0, 36), np.float32)},
    }
    with node.calls(place, tmp_path) as call:
        call(right)
        first = call.answer
        for words, inputs in wrong.items():
            assert call.refusal(inputs) == words
        for _ in range(50):
            call(right)
        assert call.answer == first


def test_a_bundle_is_held_against_its_hashes(made: Made, tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    shutil.copytree(made("causal, a mask")[1], place)
    weights = bytearray((place / "weights.safetensors").read_bytes())
    weights[-1] ^= 1
    (place / "weights.safetensors").write_bytes(weights)
    with node.calls(place, tmp_path) as call:
        assert call.answer.startswith("weights.safetensors: expected sha256")


def test_what_the_interpreter_has_is_what_is_promised() -> None:
    """A builtin that is compiled for, and that JavaScript lacks, would be an error where somebody loads the bundle."""
    code = (JAVASCRIPT / "machine.js").read_text()
    methods = set(re.findall(r"^  ([a-z_]+)\(", code, re.MULTILINE))
    assert {name.removeprefix("vm.builtin.") for name in webassembly.BUILTINS} <= methods


@pytest.mark.thorough
def test_what_the_interpreter_lacks_is_refused_when_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webassembly, "BUILTINS", webassembly.BUILTINS - {"vm.builtin.match_shape"})
    with pytest.raises(BuildError, match=r"calls of vm\.builtin\.match_shape, which TVM's runtime has not"):
        mhsa.compile(BLOCK, target="wasm32")


def test_what_a_file_asks_of_its_loader_is_named(made: Made) -> None:
    """The code of a bundle asks for nothing; a file that does, here env.hello, is refused by that name."""
    code = (made("causal, a mask")[1] / "attention.wasm").read_bytes()
    assert webassembly._imports(code) == []
    section = b"\x01\x03env\x05hello\x00\x00"
    assert webassembly._imports(code[:8] + bytes([2, len(section)]) + section + code[8:]) == ["env", "hello"]


def test_tuning_refuses_what_no_process_maps() -> None:
    with pytest.raises(TargetError, match="got WebAssembly"):
        build.library({}, load_profile("wasm32"))


def test_a_bundle_says_what_it_is(made: Made, tmp_path: Path) -> None:
    artifact, place = made("causal, a mask")
    types = (place / "attention.d.ts").read_text()
    assert '"x": Tensor<Float32Array>;' in types
    assert '"mask": Tensor<Uint8Array>;' in types
    assert "simd128" in (place / "README.md").read_text()
    code = sum(file.stat().st_size for file in place.iterdir() if file.suffix in (".js", ".wasm"))
    assert code < 1_000_000
    with pytest.raises(InputError, match="one for WebAssembly and --build"):
        bundle(artifact, tmp_path / "other", build=True)
    with pytest.raises(OutputError, match="one that does not exist yet"):
        bundle(artifact, place)
    bundle(artifact, place, force=True)
    with pytest.raises(ArtifactError, match="a CPU of wasm32"):
        mhsa.load(artifact)


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["wasm32", "wasm32-relaxed"])
def test_chromium_agrees_with_the_oracle(target: str, tmp_path: Path) -> None:
    artifact = mhsa.compile(BLOCK, target=target)
    bundle(artifact, tmp_path / "bundle")
    (tmp_path / "bundle/index.html").write_text("<!doctype html><title>A call</title>")
    with server(tmp_path / "bundle", 0) as files, browser.opened() as chromium:
        threading.Thread(target=files.serve_forever, daemon=True).start()
        page = chromium.new_page()
        page.goto(f"http://localhost:{files.server_address[1]}/")

        def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
            arrays = {name: [array.ravel().tolist(), list(array.shape)] for name, array in inputs.items()}
            data, dims = page.evaluate(CALL, arrays)
            return [np.array(data, np.float32).reshape(dims)]

        verdict = verify_run(artifact, run, cases=[{"B": 2, "L": 7}, {"B": 1, "L": 197}], self_checks=False)
        files.shutdown()
    assert verdict.ok, verdict.worst

"""Bundles of JavaScript: artifacts for WebAssembly, called in Node, against the float64 oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.javascript import node

import mhsa_compile as mhsa
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.runtime.standalone.bundle import bundle
from mhsa_compile.verification.verify import verify_run

LENGTHS = [{"B": 2, "L": 1}, {"B": 1, "L": 7}, {"B": 1, "L": 197}]
SPECS = {
    "a block": (mhsa.AttentionSpec(embed_dim=44, num_heads=4), LENGTHS),
    "causal, grouped": (mhsa.AttentionSpec(embed_dim=66, num_heads=6, num_kv_heads=2, causal=True), LENGTHS),
    "a mask": (
        mhsa.AttentionSpec(embed_dim=24, num_heads=3, mask="bool"),
        [{"B": 2, "L": 37, "mask_B": 2, "mask_H": 1, "mask_L": 37, "mask_S": 37}],
    ),
    "a window, rotary, capped": (
        mhsa.AttentionSpec(embed_dim=40, num_heads=5, causal=True, rope=True, softcap=20.0, window=(13, 0)),
        [{"B": 2, "L": 41}],
    ),
}
MORE_SPECS = {
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


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Artifact, Path]]:
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
    order = [info.name for info in artifact.manifest.outputs]
    with node.calls(place, folder) as call:

        def run(inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
            outputs = call.asked(inputs)
            assert outputs, call.answer
            return [outputs[name] for name in order]

        verdict = verify_run(artifact, run, cases=cases, self_checks=False)
    assert verdict.ok, verdict.worst


@pytest.mark.parametrize("name", SPECS)
def test_node_agrees_with_the_oracle(made, name: str, tmp_path: Path) -> None:
    artifact, place = made(name)
    check_against_oracle(artifact, place, tmp_path, SPECS[name][1])


@pytest.mark.thorough
@pytest.mark.parametrize("name", MORE_SPECS)
def test_node_agrees_with_the_oracle_on_more(made, name: str, tmp_path: Path) -> None:
    artifact, place = made(name)
    check_against_oracle(artifact, place, tmp_path, MORE_SPECS[name][1])


def test_other_weights_are_over_the_budget(made, tmp_path: Path) -> None:
    """A control: what is judged are the bundle's own numbers."""
    artifact, place = made("a block")
    other = tmp_path / "other"
    bundle(mhsa.compile(mhsa.MultiHeadAttention(SPECS["a block"][0]), target="wasm32"), other)
    with pytest.raises(AssertionError):
        check_against_oracle(artifact, other, tmp_path, LENGTHS[1:2])
    check_against_oracle(artifact, place, tmp_path, LENGTHS[1:2])

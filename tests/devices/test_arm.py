"""Compiled here for aarch64, run there: on QEMU's CPUs, through the runtime that an ARM machine has.

A first look. The whole matrix, every target, the node tests and the example are `make test-arm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import onnx
import pytest
import torch
from onnx import helper
from support.arm import runs
from support.arm.runs import Refused, There
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.verification.verify import verify_run

SPEC = mhsa.AttentionSpec(embed_dim=66, num_heads=6, head_dim=11, num_kv_heads=2, causal=True, mask="key_padding")


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    torch.manual_seed(7)
    compiled = mhsa.compile(mhsa.MultiHeadAttention(SPEC).eval(), "aarch64-neoverse-n1")
    return compiled.save(tmp_path_factory.mktemp("arm") / "n1.mhsa")


@pytest.fixture(scope="module")
def there() -> Iterator[There]:
    with runs.runs("neoverse-n1", threads=2) as there:
        yield there


@pytest.mark.thorough
@pytest.mark.arm
def test_a_cross_build_is_right_there(artifact: Artifact, there: There, record_property) -> None:
    run = there.load(artifact)
    verdict = verify_run(artifact, run, cases=[{"B": 3, "L": 7}, {"B": 1, "L": 67}], self_checks=False)
    runs.note(record_property, "a causal block on neoverse-n1", *verdict.cases)
    assert verdict.ok, verdict.worst


def few_bits(bits: int) -> onnx.ModelProto:
    """A product of weights of so many bits with zero points, that allows activations of eight."""
    rng, words = np.random.default_rng(bits), {"K": 96, "N": 40, "bits": bits, "block_size": 32, "accuracy_level": 4}
    arrays = {
        "w": rng.integers(0, 256, (40, 3, 4 * bits), np.uint8),
        "s": rng.random((40, 3), np.float32),
        "z": rng.integers(0, 256, (40, -(-3 * bits // 8)), np.uint8),
    }
    node = helper.make_node("MatMulNBits", ["x", *arrays], ["y"], domain="com.microsoft", **words)
    return model_of([node], {"x": ["B", "L", 96]}, {"y": ["B", "L", 40]}, arrays, domain="com.microsoft")


@pytest.mark.arm
@pytest.mark.parametrize("bits", [4, 8])
def test_weights_of_few_bits_are_right_there(bits: int, there: There, record_property) -> None:
    """In SDOT, which takes signed bytes: those of eight bits lose 128 first."""
    artifact = mhsa.compile(few_bits(bits), "aarch64-neoverse-n1", without_attention="accept")
    assert [op.kernel for op in artifact.manifest.ops] == ["cpu.linear_of_blocks"]
    verdict = verify_run(artifact, there.load(artifact), cases=[{"B": 1, "L": 1}, {"B": 3, "L": 7}], self_checks=False)
    runs.note(record_property, f"weights of {bits} bits on neoverse-n1", *verdict.cases)
    assert verdict.ok, verdict.worst


@pytest.mark.arm
def test_bad_input_is_refused_there_in_words(artifact: Artifact, there: There) -> None:
    run = there.load(artifact)
    with pytest.raises(Refused, match=r"InputError: .*expected .*66"):
        run({"x": np.zeros((1, 5, 67), np.float32), "mask": np.ones((1, 5), np.bool_)})


@pytest.mark.thorough
@pytest.mark.arm
def test_a_cpu_without_the_features_is_refused_before_any_code_runs(artifact: Artifact) -> None:
    """Loading refuses it, with what is needed and what is missing; it never comes to an illegal instruction."""
    with runs.runs("cortex-a53") as small, pytest.raises(Refused) as refused:
        small.load(artifact)
    needed = " ".join(artifact.manifest.target.hardware.features)
    words = rf"ArtifactError: .*expected a CPU with {needed}, .*got .* without asimddp asimdhp asimdrdm atomics "
    assert re.search(words, str(refused.value)), refused.value


def test_this_machine_refuses_it() -> None:
    relu = model_of([helper.make_node("Relu", ["x"], ["y"])], {"x": ["B", 8]}, {"y": ["B", 8]}, {})
    artifact = mhsa.compile(relu, "aarch64-neoverse-n1", without_attention="accept")
    with pytest.raises(mhsa.errors.ArtifactError, match="expected a CPU of aarch64"):
        mhsa.load(artifact)

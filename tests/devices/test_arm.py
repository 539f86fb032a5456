"""Compiled here for aarch64, run there: on QEMU's CPUs, through the runtime that an ARM machine has.

A first look. The whole matrix, every target, the node tests and the example are `make test-arm`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.arm import runs
from support.arm.runs import Refused, There

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


def test_this_machine_refuses_it(artifact: Artifact) -> None:
    with pytest.raises(mhsa.errors.ArtifactError, match="expected a CPU of aarch64"):
        mhsa.load(artifact)

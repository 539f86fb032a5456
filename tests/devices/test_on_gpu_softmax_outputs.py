"""On an NVIDIA GPU: what a softmax's rows are like, against float64. `make test-gpu`."""

from __future__ import annotations

import pytest
from support.cuda import gpu_machine

import mhsa_compile as mhsa
from mhsa_compile.spec.masks import Longformer
from mhsa_compile.verification.verify import verify_run

pytestmark = gpu_machine.marks

INSIDE = ("y", "lse", "entropy", "top_k:5", "weights:heads=4,0,rows=0,-1")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rows_of_a_softmax(dtype: str) -> None:
    spec = mhsa.AttentionSpec(
        embed_dim=96, num_heads=6, num_kv_heads=2, causal=True, sinks=True, alibi=True, dtype=dtype, outputs=INSIDE
    )
    _check(gpu_machine.compiled(spec), ({"B": 1, "L": 131, "S": 131}, {"B": 3, "L": 7, "S": 7}))


def test_rows_under_a_constant_mask() -> None:
    spec = mhsa.AttentionSpec(embed_dim=80, num_heads=5, static_mask=Longformer(window=30), outputs=INSIDE)
    _check(gpu_machine.compiled(spec, L=197, S=197), ({"B": 2, "L": 197, "S": 197},))


def _check(artifact: mhsa.Artifact, cases: tuple[dict[str, int], ...]) -> None:
    verdict = verify_run(artifact, gpu_machine.through(mhsa.load(artifact)), cases=cases)
    assert verdict.ok, verdict.checks

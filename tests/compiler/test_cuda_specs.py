"""Specs with all that they may ask for, compiled for GPUs: by which kernels, and into machine code."""

from __future__ import annotations

from typing import Any

import pytest
from support import node_cases

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.runtime.artifact.artifact import Artifact
from mhsa_compile.spec.masks import Longformer
from mhsa_compile.spec.position_encoding import Rope

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("cuda_compiler")]

EVERYTHING: dict[str, Any] = {
    "softcap": 20.0,
    "softclamp": 9.0,
    "alibi": True,
    "sinks": True,
    "window": (30, 0),
    "causal": True,
}
INSIDE = ("y", "lse", "entropy", "top_k:3", "weights:rows=0,-1", "heads")
SPECS: dict[str, tuple[str, mhsa.AttentionSpec, dict[str, int], set[str]]] = {
    "cache": (
        "cuda-sm90a",
        mhsa.AttentionSpec(
            embed_dim=64, num_heads=4, num_kv_heads=2, kv_cache=True, rope=Rope(max_length=64), dtype="bfloat16",
            **EVERYTHING,
        ),
        {},
        {"cuda.rope", "cuda.scatter"},
    ),
    "inside": (
        "cuda-sm86",
        mhsa.AttentionSpec(embed_dim=64, num_heads=4, outputs=INSIDE, dtype="float16", **EVERYTHING),
        {},
        {"cuda.statistics", "cuda.weights"},
    ),
    **{
        f"values apart, {target}, {dtype}": (
            target,
            mhsa.AttentionSpec(
                embed_dim=64, num_heads=4, kv_embed_dim=48, v_embed_dim=32, mask="key_padding", dtype=dtype
            ),
            {},
            wanted,
        )
        for target, dtype, wanted in (
            ("cuda-sm80", "bfloat16", {"cuda.linear", "cuda.attention"}),
            ("cuda-sm80", "float32", {"cuda.linear_float32", "cuda.attention_float32"}),
            ("cuda-sm90a", "float16", {"cuda.linear", "cuda.attention_hopper"}),
        )
    },
    "constant mask": (
        "cuda-sm80",
        mhsa.AttentionSpec(embed_dim=20, num_heads=4, static_mask=Longformer(window=8), outputs=("y", "weights")),
        {"L": 37, "S": 37},
        {"cuda.weights"},
    ),
}  # fmt: skip


def kernels(artifact: Artifact) -> set[str]:
    return {op.kernel for op in artifact.manifest.ops}


@pytest.mark.parametrize("name", SPECS)
def test_all_of_a_spec(name: str) -> None:
    target, spec, dims, wanted = SPECS[name]
    artifact = mhsa.compile(spec, target, dims=dims)
    assert wanted <= kernels(artifact)
    assert artifact.manifest.outputs[0].name == "y"


def test_eight_bit_weights_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match=r"64 -> .*: expected a linear that a kernel can do"):
        mhsa.compile(mhsa.AttentionSpec(embed_dim=64, num_heads=4), "cuda-sm80", weights="int8")


def test_a_mask_in_bfloat16_that_is_filled_up_with_infinity() -> None:
    assert kernels(mhsa.compile(node_cases.cases()["test_attention_4d_padded_kv_bf16"].model, "cuda-sm80"))

"""On emulated ARM machines: the parity matrix, every target, and onnx's node tests. `make test-arm`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
import torch
from support import node_cases
from support.arm import runs
from support.arm.runs import Machines
from support.cases import PARITY, ParityCase

import mhsa_compile as mhsa
from mhsa_compile.hardware.profile import load_profile, profile_names
from mhsa_compile.verification.verify import verify_run

pytestmark = pytest.mark.arm

TARGETS = [
    name for name in profile_names() if name != "native" and load_profile(name).tvm.mtriple.startswith("aarch64-linux")
]
PLAIN, ALL = "neoverse-n1", "neoverse-v1"
"""The matrix is compiled for the first; what is not float32 throughout for the second too, which has more of it."""
MATRIX = [(case, PLAIN) for case in PARITY]
MATRIX += [(case, ALL) for case in PARITY if case.spec.dtype != "float32" or case.weights]
EVERYWHERE = ("causal-gqa", "bool-cross", "bf16-causal", "fp16-bool", "int8-cross-no-bias")
"""The cases of the matrix that are compiled for every target."""
SAMPLE = [(case, target) for case in PARITY for target in TARGETS if case.name in EVERYWHERE]
NODES = node_cases.cases()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    found = Machines()
    yield found
    found.close()


@pytest.mark.thorough_but(
    "int8-cross-*",
    "values-*",
    "fp16-bool-cortex-*",
    "bf16-causal-cortex-*",
    "sinks-*",
    "bf16-cache-*",
    "int8-values-*",
    "bf16-values-*",
    "bf16-additive-*",
    "fp16-additive-*",
    "additive-h5-neoverse-n1",
    "additive-bottom-right-neoverse-n1",
    "strided-bottom-right-neoverse-n1",
    "rope-pairs-gqa-neoverse-n1",
    "alibi-both-sides-additive-neoverse-n1",
    "cache-rope-gqa-neoverse-n1",
    "bf16-bool-neoverse-n1",
    "fp16-key-padding-cross-neoverse-n1",
    "fp16-bottom-right-cross-neoverse-n1",
    "fp16-longformer-neoverse-n1",
    "int8-bf16-causal-gqa-neoverse-n1",
    "bf16-scale-1-neoverse-v1",
    "bf16-longformer-neoverse-v1",
    "fp16-bool-neoverse-v1",
    "bf16-causal-neoverse-v2",
    "fp16-bool-aarch64-generic",
    "fp16-bool-neoverse-v2",
)
@pytest.mark.parametrize(
    ("case", "target"),
    dict.fromkeys([*MATRIX, *SAMPLE]),
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_parity(case: ParityCase, target: str, machines: Machines, record_property) -> None:
    torch.manual_seed(7)
    module = mhsa.MultiHeadAttention(case.spec).eval()
    there = machines[runs.cpu_of(target)]
    for fixed, cases in case.builds:
        artifact = mhsa.compile(module, runs.emulable(target), dims=fixed, weights=case.weights)
        verdict = verify_run(artifact, there.load(artifact), cases=cases, self_checks=False)
        runs.note(record_property, f"{case.name} on {target}", *verdict.cases)
        worst = verdict.worst
        assert verdict.ok, f"error {worst.error:.3g}, budget {worst.budget:.3g} at {worst.dims}"


@pytest.mark.parametrize("bits", runs.SVE)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_sve(name: str, bits: int, machines: Machines, record_property) -> None:
    """A target of SVE's, whose vectors are as wide as the machine's, and whose code LLVM may write in SVE."""
    (case,) = (case for case in PARITY if case.name == name)
    profile = runs.emulable(ALL)
    wide = msgspec.structs.replace(profile, hardware=msgspec.structs.replace(profile.hardware, vector_bits=bits))
    torch.manual_seed(7)
    module = mhsa.MultiHeadAttention(case.spec).eval()
    artifact = mhsa.compile(module, wide, weights=case.weights)
    run = machines[runs.SVE[bits]].load(artifact)
    verdict = verify_run(artifact, run, cases=case.builds[0][1], self_checks=False)
    runs.note(record_property, f"{name} on {ALL} with SVE of {bits} bits", *verdict.cases)
    assert verdict.ok, verdict.worst


@pytest.mark.thorough_but(
    "test_attention_4d_attn_mask_4d_causal",
    "test_attention_4d_gqa_with_past_and_present_fp16",
    "test_attention_4d_with_qk_matmul_softmax",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal",
    "test_attention_3d_gqa_attn_mask",
    "test_attention_3d_with_past_and_present_qk_matmul_softmax",
    "test_attention_4d_causal_fp16",
    "test_attention_4d_causal_padded_kv_bf16",
    "test_attention_4d_attn_mask_causal_bf16",
    "test_attention_3d_causal_bf16",
    "test_attention_24_qk_matmul_output_mode3_softmax_precision",
    "test_attention_local_window_rank1_boolean_mask",
    "test_attention_local_window_ext_cache_float16_mask",
    "test_rotary_embedding_no_position_ids",
    "test_rotary_embedding_no_position_ids_interleaved",
    "test_tensorscatter_3d",
)
@pytest.mark.parametrize("name", NODES)
def test_node(name: str, machines: Machines) -> None:
    """The outputs are held to onnx's own tolerances."""
    case = NODES[name]
    artifact = mhsa.compile(case.model, "aarch64-generic")
    node_cases.compare(case, machines[runs.cpu_of("aarch64-generic")].load(artifact))


def test_every_target_of_the_architecture_is_tried() -> None:
    assert {target for _, target in SAMPLE} == set(TARGETS) >= {
        "aarch64-generic", "cortex-a53", "cortex-a72", "cortex-a76", "neoverse-n1", "neoverse-v1", "neoverse-v2",
    }  # fmt: skip
    assert len(SAMPLE) == len(TARGETS) * len(EVERYWHERE)

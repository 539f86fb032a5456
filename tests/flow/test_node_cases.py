"""Every node test of onnx for the operators compiled here, through compile and load, to onnx's own tolerances."""

import pytest
from support.node_cases import OPERATORS, cases, check

CASES = cases()


def test_all_are_there() -> None:
    """There are as many node tests as onnx 1.23 has."""
    found = [case.model.graph.node[0].op_type for case in CASES.values()]
    assert {operator: found.count(operator) for operator in OPERATORS} == {
        "Attention": 93,
        "RotaryEmbedding": 8,
        "TensorScatter": 3,
    }


@pytest.mark.thorough_but(
    "test_attention_24_qk_matmul_output_mode3_softmax_precision",
    "test_attention_3d_gqa_attn_mask",
    "test_attention_3d_softcap",
    "test_attention_3d_with_past_and_present_qk_matmul_softcap",
    "test_attention_4d_attn_mask_causal_bf16",
    "test_attention_4d_gqa_with_past_and_present_fp16",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal",
    "test_attention_local_window_ext_cache_float16_mask",
    "test_attention_local_window_rank1_boolean_mask",
    "test_rotary_embedding_no_position_ids_interleaved",
)
@pytest.mark.parametrize("name", CASES)
def test_node(name: str) -> None:
    check(CASES[name])

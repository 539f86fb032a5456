"""A light slice of onnx's node tests beside those of attention, and how each verdict is found."""

import dataclasses

import numpy as np
import pytest
from onnx.backend.test.case.test_case import TestCase
from support import node_sweep

RIGHT = {
    "test_bitshift_right_uint8": "bitshift",
    "test_causal_conv_with_state_decode_step": "causal_conv_with_state",
    "test_center_crop_pad_crop": "center_crop_pad",
    "test_layer_normalization_2d_axis1": "layernormalization",
    "test_nllloss_NC": "negativeloglikelihoodloss",
    "test_sce_mean_log_prob": "softmax_cross_entropy_loss",
    "test_swiglu_float16": "swiglu",
}
REFUSED = {
    "test_adam": "adam",
    "test_strnormalizer_nostopwords_nochangecase": "stringnormalizer",
    "test_tfidfvectorizer_tf_only_bigrams_skip0": "tfidfvectorizer",
}
"""The module of onnx's that has each test."""


@pytest.fixture(scope="module")
def cases() -> dict[str, TestCase]:
    return node_sweep.cases((RIGHT | REFUSED).values())


@pytest.mark.thorough
def test_there_are_as_many_as_onnx_has() -> None:
    assert len(node_sweep.cases()) == 1344


@pytest.mark.thorough_but("test_swiglu_float16")
@pytest.mark.parametrize("name", RIGHT)
def test_right(cases: dict[str, TestCase], name: str) -> None:
    assert node_sweep.judge(cases[name]) == ("right", "")


@pytest.mark.parametrize("name", REFUSED)
def test_refused(cases: dict[str, TestCase], name: str) -> None:
    assert node_sweep.judge(cases[name])[0] == "refused"


def test_a_wrong_value_is_one(cases: dict[str, TestCase]) -> None:
    """Beside another expectation, what was right is wrong."""
    case = cases["test_swiglu_float16"]
    inputs, outputs = case.data_sets[0]
    other = dataclasses.replace(case, data_sets=[(inputs, [np.asarray(output) + 1 for output in outputs])])
    assert node_sweep.judge(other)[0] == "wrong"

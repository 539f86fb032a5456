"""Constants without elements: TVM writes them into a library that it then cannot read."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError


def test_an_empty_state_beside_others() -> None:
    source = """<ir_version: 9, opset_import: ["" : 20]> g (float[N, 3] x) => (float[N, 3] y, float[2, 0] state) {
        y = Relu(x)  none = Constant <value = float[2, 0] {}> ()  state = Identity(none) }"""
    call = mhsa.load(mhsa.compile(parser.parse_model(source), without_attention="accept"))
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    for _ in range(3):
        y, state = call(x)
        assert np.array_equal(y, np.maximum(x, 0)) and state.shape == (2, 0) and state.dtype == np.float32


def test_texts_are_refused_by_name() -> None:
    source = (
        """<ir_version: 9, opset_import: ["" : 20]> g (string[2] words, float[2] x) => (float[2] y) { y = Relu(x) }"""
    )
    with pytest.raises(ModelError, match="input 'words': expected a tensor of numbers, got one of texts"):
        mhsa.compile(parser.parse_model(source), without_attention="accept")

"""A large table that is the Transpose of a product's weight is read by columns: no turned copy of it is made."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import ModelProto, numpy_helper, parser

import mhsa_compile as mhsa
from mhsa_compile.frontend.canonicalize.passes import tied_tables

TIED = """<ir_version: 9, opset_import: ["" : 18]> g (int64[B, L] ids) => (float[B, L, 4194304] y) {
    table = Transpose <perm = [1, 0]> (w)  rows = Gather(table, ids)  y = MatMul(rows, w) }"""


def tied(words: int, width: int) -> ModelProto:
    model = parser.parse_model(TIED.replace("4194304", str(words)))
    weight = np.random.default_rng(0).standard_normal((width, words)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


@pytest.mark.parametrize("words", [1 << 19, 1 << 18])
def test_large_ones_alone(words: int) -> None:
    operators = [node.op_type for node in tied_tables.rewrite(tied(words, 8)).graph.node]
    assert operators == (["Gather", "Transpose", "MatMul"] if words == 1 << 19 else ["Transpose", "Gather", "MatMul"])


def test_rows_are_the_same() -> None:
    model = tied(1 << 19, 8)
    ids = np.array([[3, -1, (1 << 19) - 1]])
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"ids": ids})[0]
    artifact = mhsa.compile(model, without_attention="accept", check=False)
    assert artifact.manifest.inputs[0].rows == 1 << 19
    np.testing.assert_allclose(mhsa.load(artifact)(ids), expected, atol=1e-5)

"""ONNX Runtime is timed on the very file that was compiled, where it takes that and not our graph of it."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import mhsa_compile as mhsa
from mhsa_bench.bench import bench

pytestmark = pytest.mark.thorough

GRAPH = """<ir_version: 9, opset_import: ["" : 18]>
g (float[batch, length, 16] x, int64[batch, length] attention_mask) => (float[batch, length, 16] y) {
    q = MatMul(x, wq)
    k = MatMul(x, wk)
    apart = Constant<value = int64[4] {0, 0, 2, 8}>()
    q_apart = Reshape(q, apart)
    k_apart = Reshape(k, apart)
    v_apart = Reshape(x, apart)
    q_heads = Transpose<perm = [0, 2, 1, 3]>(q_apart)
    k_heads = Transpose<perm = [0, 2, 3, 1]>(k_apart)
    v_heads = Transpose<perm = [0, 2, 1, 3]>(v_apart)
    scores = MatMul(q_heads, k_heads)
    axes = Constant<value = int64[2] {1, 2}>()
    rows = Unsqueeze(attention_mask, axes)
    seen = Cast<to = 1>(rows)
    one = Constant<value_float = 1.0>()
    hidden = Sub(one, seen)
    low = Constant<value_float = -3e38>()
    added = Mul(hidden, low)
    masked = Add(scores, added)
    weights = Softmax<axis = -1>(masked)
    heads = MatMul(weights, v_heads)
    rows_of_heads = Transpose<perm = [0, 2, 1, 3]>(heads)
    back = Constant<value = int64[3] {0, 0, 16}>()
    y = Reshape(rows_of_heads, back)
}"""


def model() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    parsed = onnx.parser.parse_model(GRAPH)
    weights = (numpy_helper.from_array(rng.standard_normal((16, 16)).astype("f4"), name) for name in ("wq", "wk"))
    parsed.graph.initializer.extend(weights)
    helper.set_model_props(parsed, {"author": "somebody"})
    return parsed


def test_the_peer_runs_the_users_own_file():
    source = model()
    artifact = mhsa.compile(source)
    kept = onnx.load(artifact.path / "source.onnx")
    for tensor in kept.graph.initializer:
        tensor.ClearField("data_location")
    assert kept == source
    report = bench(artifact, against=("onnxruntime",), dims={"batch": 1, "length": 5}, seconds=0.01)
    row = next(row for row in report.rows if row.name == "onnxruntime")
    assert row.missing is None and row.median_us > 0


def test_a_source_whose_weights_became_others_is_not_kept_twice():
    source = model()
    rng = np.random.default_rng(0)
    wide = rng.standard_normal((1500, 16, 16)).astype("f4")
    source.graph.initializer.append(numpy_helper.from_array(wide, "wide"))  # nobody reads it
    assert not (mhsa.compile(source).path / "source.onnx").exists()

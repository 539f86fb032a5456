"""Which tensors a graph may list as its outputs: one twice, an input, a weight. ONNX Runtime is the reference."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import mhsa_compile as mhsa
from mhsa_compile.frontend.reading.dialect import in_one_dialect

RNG = np.random.default_rng(0)
DIMS = {"const": [3, 5], "a": [16, 16]}


def _model(outputs: list[str], *nodes: onnx.NodeProto) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(RNG.standard_normal((16, 16)).astype(np.float32) / 4, name) for name in "abc"]
    weights.append(numpy_helper.from_array(RNG.standard_normal((3, 5)).astype(np.float32), "const"))
    products = [helper.make_node("MatMul", ["x", w], [o]) for w, o in zip("abc", "qkv", strict=True)]
    attention = helper.make_node("Attention", ["q", "k", "v"], ["y"], q_num_heads=2, kv_num_heads=2)
    tensors = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, DIMS.get(name, ["B", "L", 16]))
        for name in ("x", *outputs)
    }
    values = [tensors["x"]], [tensors[name] for name in outputs]
    graph = helper.make_graph([*products, attention, *nodes], "outputs", *values, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


NEGATIVE = helper.make_node("Neg", ["y"], ["y_2"])


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (_model(["y", "y"]), ["y", "y_2"]),
        (_model(["y", "y", "y_2"], NEGATIVE), ["y", "y_3", "y_2"]),
        (_model(["x", "y", "x"]), ["x", "y", "x_2"]),
        (_model(["q", "y", "y", "y"]), ["q", "y", "y_2", "y_3"]),
        (_model(["y"]), ["y"]),
    ],
    ids=range(5),
)
def test_each_output_has_a_tensor_of_its_own(model: onnx.ModelProto, names: list[str]) -> None:
    before = model.SerializeToString()
    read = in_one_dialect(model)
    onnx.checker.check_model(read, full_check=True)
    assert [value.name for value in read.graph.output] == names
    assert model.SerializeToString() == before


@pytest.mark.thorough
def test_results_are_onnx_runtime_s() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = _model(["const", "y", "y", "a", "x", "y_2"], NEGATIVE)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    x = RNG.standard_normal((2, 7, 16)).astype(np.float32)
    attention = mhsa.load(mhsa.compile(model))
    for result, expected in zip(attention(x), session.run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-5)

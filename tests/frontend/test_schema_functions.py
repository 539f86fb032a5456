"""Operators that ONNX defines by others, written out: to the values of onnx's own node tests."""

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from support import onnx_models

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.passes import schema_functions
from mhsa_compile.frontend.reading.check import check_graph
from mhsa_compile.frontend.reading.standard import PREVIEW, PREVIEW_VERSION, STANDARD

OPERATORS = {
    "LayerNormalization": (["x", "scale"], ["y", "mean", "deviation"], {"axis": 1}),
    "NegativeLogLikelihoodLoss": (["scores", "target"], ["y"], {"reduction": "sum"}),
    "SoftmaxCrossEntropyLoss": (["scores", "target"], ["y", "log"], {}),
    "Celu": (["x"], ["y"], {"alpha": 2.0}),
    "Swish": (["x"], ["y"], {}),
}
ELEMENTS = {
    "x": np.linspace(-2, 3, 12, dtype=np.float32).reshape(2, 6),
    "scale": np.linspace(1, 2, 6, dtype=np.float32),
    "scores": np.linspace(-2, 3, 12, dtype=np.float32).reshape(2, 6) ** 2,
    "target": np.array([4, 1]),
}


def model_of(operator: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    inputs, outputs, attributes = OPERATORS[operator]
    feeds = {name: ELEMENTS[name] for name in inputs}
    kinds = {name: str(array.dtype) for name, array in feeds.items()}
    node = helper.make_node(operator, inputs, outputs, name="odd", **attributes)
    values = {name: array.shape for name, array in feeds.items()}
    return onnx_models.model_of([node], values, dict.fromkeys(outputs), kinds=kinds, opset=24), feeds


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_definition_stands_in_the_place_of_its_node(operator: str) -> None:
    """Nothing is left that has no row, the nodes are named for the call, and the values stay."""
    model, feeds = model_of(operator)
    written = schema_functions.rewrite(model)
    assert {node.op_type for node in written.graph.node} <= STANDARD.keys()
    assert all(node.name.startswith("odd/") for node in written.graph.node)
    assert not written.functions
    for ours, theirs in zip(
        ReferenceEvaluator(written).run(None, feeds), ReferenceEvaluator(model).run(None, feeds), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_is_understood_stays_one_node() -> None:
    """A LayerNormalization whose mean nobody reads has a row."""
    model, _ = model_of("LayerNormalization")
    del model.graph.output[1:]
    assert schema_functions.rewrite(model) is model


def test_the_mean_of_a_layer_normalization() -> None:
    """It runs, to the reference's values."""
    model, feeds = model_of("LayerNormalization")
    results = mhsa.load(mhsa.compile(model, without_attention="accept"))(**feeds)
    for ours, theirs in zip(results, ReferenceEvaluator(model).run(None, feeds), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def flex_attention(version: int) -> onnx.ModelProto:
    """One FlexAttention whose probabilities a graph of its own doubles."""
    scores, doubled = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["B", "H", "L", "S"]) for name in ("p", "doubled")
    )
    body = helper.make_graph([helper.make_node("Add", ["p", "p"], ["doubled"])], "twice", [scores], [doubled])
    node = helper.make_node("FlexAttention", ["q", "k", "v"], ["y"], domain=PREVIEW, scale=0.5, prob_mod=body)
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 2, 3, 4]) for name in "qkv"]
    output = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 2, 3, 4])
    imports = [helper.make_opsetid("", 26), helper.make_opsetid(PREVIEW, version)]
    return helper.make_model(helper.make_graph([node], "g", inputs, [output]), opset_imports=imports, ir_version=11)


def test_flex_attention_of_the_preview() -> None:
    """It is written out, with the graph that it holds."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 3, 4), dtype=np.float32)
    written = schema_functions.rewrite(flex_attention(PREVIEW_VERSION))
    assert {node.domain for node in written.graph.node} == {""}
    scores = np.exp(q @ k.swapaxes(2, 3) * 0.5)
    expected = 2 * scores / scores.sum(-1, keepdims=True) @ v
    (result,) = ReferenceEvaluator(written).run(None, {"q": q, "k": k, "v": v})
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def test_another_version_of_the_preview_is_refused() -> None:
    """Its definition may be another."""
    model = schema_functions.rewrite(flex_attention(PREVIEW_VERSION + 1))
    with pytest.raises(ModelError, match=r"FlexAttention.*version"):
        check_graph(model)

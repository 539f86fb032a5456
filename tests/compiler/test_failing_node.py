"""A graph that has no code is refused by the name of the node that has none, not by another library's words."""

from __future__ import annotations

import onnx
import pytest
from onnx import helper
from support.onnx_models import model_of

import mhsa_compile as mhsa
from mhsa_compile.compiler.failing_node import failing_node
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.reading.row import row
from mhsa_compile.frontend.reading.standard import STANDARD

N = helper.make_node


def model(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    return model_of(nodes, {"x": [2, 8], "g": [2, 8]}, {"y": None}, opset=23)


CHAIN = [N("Relu", ["x"], ["a"]), N("Erf", ["x"], ["b"]), N("Exp", ["a"], ["c"]), N("Add", ["b", "c"], ["y"])]


@pytest.mark.parametrize("place", range(4))
def test_the_node_is_found(place: int) -> None:
    bad = CHAIN[place].op_type

    def compiles(part: onnx.ModelProto) -> None:
        onnx.checker.check_model(onnx.shape_inference.infer_shapes(part))
        assert all(node.op_type != bad for node in part.graph.node)

    found = failing_node(model(*CHAIN), compiles)
    assert found is not None and found.op_type == bad


def test_none_is_found_where_nothing_fails_or_a_part_is_refused() -> None:
    assert failing_node(model(*CHAIN), lambda part: None) is None

    def refuses(part: onnx.ModelProto) -> None:
        raise ModelError("model", "one thing", "another")

    assert failing_node(model(*CHAIN), refuses) is None


def test_no_node_is_to_blame_where_any_graph_fails() -> None:
    def compiles(part: onnx.ModelProto) -> None:
        raise ValueError(part.graph.node[0].op_type)

    assert failing_node(model(*CHAIN), compiles) is None


def test_a_user_reads_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STANDARD, "RMSNormalization", row("axis", inputs=2))  # TVM has no code of it over all axes
    nodes = [
        N("Exp", ["x"], ["a"]),
        N("RMSNormalization", ["a", "g"], ["b"], name="odd", axis=0),
        N("Neg", ["b"], ["y"]),
    ]
    with pytest.raises(ModelError, match="RMSNormalization node 'odd': expected an operator of a form") as caught:
        mhsa.compile(model(*nodes), without_attention="accept", cache=False)
    assert caught.value.next_step and "Check failed" not in str(caught.value)

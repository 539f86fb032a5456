"""GELUs that were written as what they consist of."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from support.onnx_models import model_of

from mhsa_compile.frontend.canonicalize.passes import gelus
from mhsa_compile.frontend.canonicalize.rewriting.shape_propagation import propagate_shapes

N = helper.make_node
CONSTANTS = {
    "root": np.float32(2**0.5), "inverse": np.array([0.5**0.5], "f4"), "one": np.float32(1), "half": np.float32(0.5),
    "two": np.float32(2), "three": np.float32(3), "c": np.float32(0.044715), "s": np.float32((2 / np.pi) ** 0.5),
    "rank": np.full((1, 1, 1, 1), 0.5, "f4"),
}  # fmt: skip
ARGUMENTS = {
    "divided": [N("Div", ["x", "root"], ["z"])],
    "multiplied": [N("Mul", ["inverse", "x"], ["z"])],
    "GPT-2's": [
        N("Pow", ["x", "three"], ["p"]),
        N("Mul", ["c", "p"], ["q"]),
        N("Add", ["x", "q"], ["sum"]),
        N("Mul", ["sum", "s"], ["z"]),
    ],
    "cubes multiplied": [
        N("Mul", ["x", "x"], ["p"]),
        N("Mul", ["p", "x"], ["cube"]),
        N("Mul", ["cube", "c"], ["q"]),
        N("Add", ["q", "x"], ["sum"]),
        N("Mul", ["s", "sum"], ["z"]),
    ],
    "x by itself": [
        N("Mul", ["c", "x"], ["p"]),
        N("Mul", ["x", "p"], ["q"]),
        N("Add", ["q", "one"], ["sum"]),
        N("Mul", ["x", "s"], ["scaled"]),
        N("Mul", ["scaled", "sum"], ["z"]),
    ],
}
PRODUCTS = {
    "half of the gate": [N("Mul", ["half", "gate"], ["t"]), N("Mul", ["x", "t"], ["y"])],
    "half of x": [N("Mul", ["x", "half"], ["t"]), N("Mul", ["t", "gate"], ["y"])],
    "half of all": [N("Mul", ["gate", "x"], ["t"]), N("Div", ["t", "two"], ["y"])],
}


def written_out(argument: str, product: str, **changed: str) -> onnx.ModelProto:
    """x (B, 5, 7) -> y; `changed` puts other values in the place of those that nodes read, and has one more output."""
    kind = "Erf" if argument in ("divided", "multiplied") else "Tanh"
    more = changed.pop("output", "")
    nodes = [*ARGUMENTS[argument], N(kind, ["z"], ["e"]), N("Add", ["e", "one"], ["gate"]), *PRODUCTS[product]]
    nodes = [N(n.op_type, [changed.get(name, name) for name in n.input], n.output) for n in nodes]
    outputs = {"y": None, **({more: None} if more else {})}
    return propagate_shapes(model_of(nodes, {"x": ["B", 5, 7]}, outputs, CONSTANTS), {})


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_a_gelu_is_one_node(argument: str, product: str) -> None:
    source = written_out(argument, product)
    changed = gelus.rewrite(source)
    assert [node.op_type for node in changed.graph.node] == ["Gelu"]
    x = 3 * np.random.default_rng(0).standard_normal((3, 5, 7)).astype("f4")
    expected, y = (ReferenceEvaluator(model).run(None, {"x": x})[0] for model in (source, changed))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("divided", {"root": "two"}),
        ("divided", {"one": "half"}),
        ("divided", {"half": "one"}),
        ("divided", {"half": "rank"}),
        ("divided", {"output": "e"}),
        ("GPT-2's", {"c": "s"}),
        ("GPT-2's", {"three": "two"}),
        ("GPT-2's", {"s": "c"}),
    ],
)
def test_another_formula_stays(argument: str, changed: dict[str, str]) -> None:
    """Other constants, y of more axes than x, a value between that is an output."""
    source = written_out(argument, "half of the gate", **changed)
    assert "Gelu" not in [node.op_type for node in gelus.rewrite(source).graph.node]

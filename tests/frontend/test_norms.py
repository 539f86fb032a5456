"""Norms that were written as what they consist of."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from support.onnx_models import model_of

from mhsa_compile.frontend.canonicalize.passes import norms
from mhsa_compile.frontend.canonicalize.rewriting.shape_propagation import propagate_shapes

D, N = 6, helper.make_node
CONSTANTS = {
    "two": np.float32(2), "one": np.float32(1), "e": np.float32(0.25), "axis": np.array([-1]), "first": np.array([1]),
    "w": np.linspace(-1, 2, D, dtype="f4"), "b": np.linspace(3, 1, D, dtype="f4"), "number": np.ones(1, "f4"),
}  # fmt: skip
SQUARES = {"Pow": N("Pow", ["c", "two"], ["square"]), "Mul": N("Mul", ["c", "c"], ["square"])}
SIZES = {
    "divided": [N("Div", ["c", "root"], ["n"])],
    "Reciprocal": [N("Reciprocal", ["root"], ["inverse"]), N("Mul", ["inverse", "c"], ["n"])],
    "1 / root": [N("Div", ["one", "root"], ["inverse"]), N("Mul", ["c", "inverse"], ["n"])],
}


def written_out(square: str = "Pow", size: str = "divided", centred: bool = True, **changed: str) -> onnx.ModelProto:
    """x (B, 5, D) -> y, with a bias where rows are centred; `changed` puts constants in the place of others."""
    name = {key: changed.get(key, key) for key in ("axis", "e", "w", "b")}
    nodes = [N("ReduceMean", ["x", name["axis"]], ["mean"]), N("Sub", ["x", "mean"], ["c"])]
    if not centred:
        nodes = [N("Identity", ["x"], ["c"])]
    nodes += [
        SQUARES[square],
        N("ReduceMean", ["square", "axis"], ["variance"]),
        N("Add", [name["e"], "variance"], ["sum"]),
        N("Sqrt", ["sum"], ["root"]),
        *SIZES[size],
        N("Mul", ["n", name["w"]], ["scaled" if centred else "y"]),
    ]
    nodes += [N("Add", [name["b"], "scaled"], ["y"])] if centred else []
    outputs = {"y": ["B", 5, D], **({changed["seen"]: [None, None, None]} if "seen" in changed else {})}
    return propagate_shapes(model_of(nodes, {"x": ["B", 5, D]}, outputs, CONSTANTS), {})


def kinds(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("square", SQUARES)
def test_a_norm_is_one_node(square: str, size: str, centred: bool) -> None:
    source = written_out(square, size, centred)
    changed = norms.rewrite(source)
    assert kinds(changed) == (["LayerNormalization"] if centred else ["Identity", "RMSNormalization"])
    x = np.random.default_rng(0).standard_normal((3, 5, D)).astype("f4") + 2
    expected, y = (ReferenceEvaluator(model).run(None, {"x": x})[0] for model in (source, changed))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_what_is_added_may_be_more_than_a_row() -> None:
    changed = norms.rewrite(written_out(b="x"))
    assert kinds(changed) == ["LayerNormalization", "Add"]


@pytest.mark.parametrize("changed", [{"axis": "first"}, {"e": "w"}, {"w": "x"}, {"w": "number"}, {"seen": "n"}])
def test_another_formula_stays(changed: dict[str, str]) -> None:
    """A mean along another axis, an epsilon for each element, weights that are no row, a value that is an output."""
    source = written_out(**changed)
    assert "LayerNormalization" not in kinds(norms.rewrite(source))

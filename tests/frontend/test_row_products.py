"""Products between reshapes, and products whose results are cut into parts."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator
from support.onnx_models import model_of

from mhsa_compile.frontend.fusion.row_products import as_row_products

RNG = np.random.default_rng(0)
K, N = 6, 12


def model(
    nodes: list[onnx.NodeProto], outputs: dict[str, list[object]], *arrays: tuple[str, np.ndarray]
) -> onnx.ModelProto:
    """x ("B", L 5, K) -> the outputs, with a weight "w" (K, N), "t" (N, K), a bias "b" and `arrays`."""
    weights = {"w": (K, N), "t": (N, K), "b": (N,)}
    named = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    return model_of(nodes, {"x": ["B", 5, K]}, outputs, named | dict(arrays))


def kinds(source: onnx.ModelProto) -> list[str]:
    return sorted(node.op_type for node in source.graph.node)


def check_same(one: onnx.ModelProto, other: onnx.ModelProto) -> None:
    onnx.checker.check_model(other, full_check=True)
    x = RNG.standard_normal((3, 5, K)).astype(np.float32)
    for expected, got in zip(*(ReferenceEvaluator(source).run(None, {"x": x}) for source in (one, other)), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("weight", "bias", "transposed"), [("w", "b", 0), ("t", "b", 1), ("w", "", 0)])
def test_a_product_between_reshapes_takes_the_rows(weight: str, bias: str, transposed: int) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["rows"]),
        helper.make_node("Gemm", ["rows", weight, bias] if bias else ["rows", weight], ["made"], transB=transposed),
        helper.make_node("Reshape", ["made", "back"], ["y"]),
    ]
    shapes = ("flat", np.array([-1, K])), ("back", np.array([-1, 5, N]))
    source = model(nodes, {"y": ["B", 5, N]}, *shapes)
    changed = as_row_products(source)
    assert kinds(changed) == sorted(["MatMul", *["Add"] * bool(bias), *["Transpose"] * transposed])
    check_same(source, changed)


def test_heads_that_a_reshape_joins_stay_rows() -> None:
    """As of attention whose result goes to a product: heads and rows are joined in one Reshape."""
    nodes = [
        helper.make_node("Reshape", ["x", "heads"], ["apart"]),
        helper.make_node("Reshape", ["apart", "flat"], ["rows"]),
        helper.make_node("Gemm", ["rows", "w", "b"], ["made"]),
        helper.make_node("Reshape", ["made", "back"], ["y"]),
    ]
    shapes = [("heads", [0, 5, 2, K // 2]), ("flat", [-1, K]), ("back", [-1, 5, N])]
    source = model(nodes, {"y": ["B", 5, N]}, *((name, np.array(shape)) for name, shape in shapes))
    changed = as_row_products(source)
    assert kinds(changed) == ["Add", "MatMul", "Reshape", "Reshape"]
    check_same(source, changed)


@pytest.mark.parametrize("back", [[5, -1, N], [-1, 5, N // 2], [-1, 1, N]])
def test_other_reshapes_stay(back: list[int]) -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["rows"]),
        helper.make_node("Gemm", ["rows", "w"], ["made"]),
        helper.make_node("Reshape", ["made", "back"], ["y"]),
    ]
    source = model(nodes, {"y": [None, None, None]}, ("flat", np.array([-1, K])), ("back", np.array(back)))
    assert as_row_products(source) is source


def test_a_product_that_others_read_stays() -> None:
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["rows"]),
        helper.make_node("Gemm", ["rows", "w"], ["made"]),
        helper.make_node("Reshape", ["made", "back"], ["y"]),
    ]
    shapes = ("flat", np.array([-1, K])), ("back", np.array([-1, 5, N]))
    source = model(nodes, {"y": ["B", 5, N], "made": [None, N]}, *shapes)
    assert as_row_products(source) is source


@pytest.mark.parametrize("axis", [2, -1])
@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 8, 3], [5, 7]])
@pytest.mark.parametrize(("weight", "bias"), [("w", True), ("w", False), ("t", True)])
def test_a_product_is_one_for_each_part(weight: str, bias: bool, sizes: list[int], axis: int) -> None:
    nodes = [] if weight == "w" else [helper.make_node("Transpose", ["t"], ["turned"], perm=[1, 0])]
    nodes.append(helper.make_node("MatMul", ["x", "w" if weight == "w" else "turned"], ["made"]))
    if bias:
        nodes.append(helper.make_node("Add", ["b", "made"], ["sum"]))
    names = [f"y{i}" for i in range(len(sizes))]
    nodes.append(helper.make_node("Split", ["sum" if bias else "made", "sizes"], names, axis=axis))
    outputs = {name: ["B", 5, size] for name, size in zip(names, sizes, strict=True)}
    source = model(nodes, outputs, ("sizes", np.array(sizes)))
    changed = as_row_products(source)
    assert kinds(changed).count("MatMul") == len(sizes)
    assert all(node.input[0] in ("w", "t", "b") for node in changed.graph.node if node.op_type == "Split")
    check_same(source, changed)


def test_lengths_are_asked_of_x() -> None:
    """As ONNX Runtime's GroupQueryAttention of one packed input, in our reading, asks for the length."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["made"]),
        helper.make_node("Split", ["made"], ["y0", "y1"], axis=2, num_outputs=2),
        helper.make_node("Shape", ["made"], ["length"], start=1, end=2),
        helper.make_node("Shape", ["made"], ["both"], end=-1),
        *(helper.make_node("Cast", [name], [f"{name}_"], to=onnx.TensorProto.FLOAT) for name in ("length", "both")),
    ]
    outputs = {"y0": ["B", 5, N // 2], "y1": ["B", 5, N // 2], "length_": [1], "both_": [2]}
    source = model(nodes, outputs)
    changed = as_row_products(source)
    assert kinds(changed).count("MatMul") == 2 and "made" not in {name for n in changed.graph.node for name in n.output}
    check_same(source, changed)


@pytest.mark.parametrize("words", [{}, {"start": 2}, {"end": 3}])
def test_parts_stay_of_what_is_asked_for_its_width(words: dict[str, int]) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["made"]),
        helper.make_node("Split", ["made"], ["y0", "y1"], axis=2, num_outputs=2),
        helper.make_node("Shape", ["made"], ["shape"], **words),
        helper.make_node("Cast", ["shape"], ["dims"], to=onnx.TensorProto.FLOAT),
    ]
    source = model(nodes, {"y0": ["B", 5, N // 2], "y1": ["B", 5, N // 2], "dims": [None]})
    assert as_row_products(source) is source


def test_parts_of_rows_or_of_what_others_read_stay() -> None:
    product = helper.make_node("MatMul", ["x", "w"], ["made"])
    by_length = helper.make_node("Split", ["made", "sizes"], ["y0", "y1"], axis=1)
    source = model([product, by_length], {"y0": ["B", 2, N], "y1": ["B", 3, N]}, ("sizes", np.array([2, 3])))
    assert as_row_products(source) is source
    parts = helper.make_node("Split", ["made"], ["y0", "y1"], axis=2, num_outputs=2)
    outputs = {"y0": ["B", 5, N // 2], "y1": ["B", 5, N // 2], "made": ["B", 5, N]}
    source = model([product, parts], outputs)
    assert as_row_products(source) is source

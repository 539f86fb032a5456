"""What exports of whole models of transformers are made of, each form in a graph of a few nodes; and one such model."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from support.model_families import FAMILIES, run
from torch import Tensor, nn
from torch.nn import functional as F

import mhsa_compile as mhsa
from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.export.export import export
from mhsa_compile.verification.error_budget import max_error
from mhsa_compile.verification.oracle.evaluate import oracle

pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
B, H, L, E = 2, 3, 5, 4
Dims = tuple[int | str, ...]


def model(
    nodes: list[tuple[Any, ...]], inputs: dict[str, Dims], outputs: dict[str, Dims | None], tensors: dict[str, Any]
) -> onnx.ModelProto:
    """Nodes are (operator, inputs, output, attributes); all inputs and outputs are float32."""

    def values(given: dict[str, Any]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in given.items()]

    made = [helper.make_node(kind, read, [output], **said) for kind, read, output, said in nodes]
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()]
    graph = helper.make_graph(made, "g", values(inputs), values(outputs), constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def drawn(inputs: dict[str, Any]) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {name: generator.standard_normal(shape).astype("f4") for name, shape in inputs.items()}


FLAT: dict[str, Dims] = dict.fromkeys("qkv", (B, H, L, E)) | {"bias": (B * H, 1, L), "mask": (B, 1, L, L)}


def flat_heads(*between: tuple[Any, ...], joined: str = "qkv") -> onnx.ModelProto:
    """Batch and heads are one axis of both products, as BLOOM's and DeBERTa's; `between` the first and the Softmax."""
    nodes: list[tuple[Any, ...]] = [("Reshape", [name, "rows"], f"{name}_flat", {}) for name in joined]
    nodes += [
        ("Transpose", ["k_flat"], "keys", {"perm": [0, 2, 1]}),
        ("MatMul", ["q_flat", "keys"], "scores", {}),
        *between,
        ("Reshape", ["biased", "apart"], "split", {}),
        ("Add", ["split", "mask"], "masked", {}),
        ("Softmax", ["masked"], "weights", {}),
        ("Reshape", ["weights", "together"], "weights_flat", {}),
        ("MatMul", ["weights_flat", "v_flat"], "y_flat", {}),
        ("Reshape", ["y_flat", "heads"], "y", {}),
    ]
    sizes = {"rows": [B * H, L, E], "apart": [B, H, L, L], "together": [B * H, L, L], "heads": [B, H, L, E]}
    return model(nodes, FLAT, {"y": (B, H, L, E)}, sizes | {"zero": np.float32(-1e9)})


def test_batch_and_heads_as_one_axis() -> None:
    source = flat_heads(("Add", ["scores", "bias"], "biased", {}))
    result = canonicalize(source)
    assert [block.fused for block in result.blocks] == [True], result.blocks
    assert "Softmax" not in {node.op_type for node in result.model.graph.node}
    inputs = drawn(FLAT)
    assert max_error(oracle(source, inputs)[0], oracle(result.model, inputs)[0]) < 1e-12


def test_batch_and_heads_as_one_axis_and_why_not() -> None:
    selects = canonicalize(
        flat_heads(("Less", ["scores", "bias"], "less", {}), ("Where", ["less", "scores", "zero"], "biased", {}))
    )
    assert [block.fused for block in selects.blocks] == [False]
    assert "selects where batch and heads are one axis" in selects.blocks[0].note


@pytest.mark.thorough
def test_what_is_filled_hides_as_much_as_the_lowest_number() -> None:
    """A row that is hidden whole gets the mean of the values; in units of log2 the lowest float32 would be -inf."""
    lowest = float(np.finfo(np.float32).min)
    nodes: list[tuple[Any, ...]] = [
        ("Transpose", ["k"], "keys", {"perm": [0, 1, 3, 2]}),
        ("MatMul", ["q", "keys"], "scores", {}),
        ("Greater", ["mask", "zero"], "seen", {}),
        ("Where", ["seen", "scores", "lowest"], "masked", {}),
        ("Softmax", ["masked"], "weights", {}),
        ("MatMul", ["weights", "v"], "y", {}),
    ]
    free: dict[str, Dims] = dict.fromkeys("qkv", ("B", H, "L", E)) | {"mask": ("B", 1, "L", "L")}
    source = model(nodes, free, {"y": ("B", H, "L", E)}, {"zero": np.float32(0), "lowest": np.float32(lowest)})
    inputs = drawn({**FLAT})
    del inputs["bias"]
    inputs["mask"][1, :, -2:] = -1
    artifact = mhsa.compile(source)
    assert [block.fused for block in artifact.manifest.attention] == [True]
    assert max_error(oracle(source, inputs)[0], mhsa.load(artifact, threads=1)(**inputs)) < 1e-6


def test_the_end_of_a_table_is_as_long_as_the_sequence() -> None:
    """MPT takes its biases so: from a table of 9, and nothing longer."""
    nodes: list[tuple[Any, ...]] = [
        ("Shape", ["q"], "length", {"start": 2, "end": 3}),
        ("Squeeze", ["length", "axis"], "L", {}),
        ("Mul", ["L", "minus"], "negative", {}),
        ("Add", ["size", "negative"], "rest", {}),
        ("Max", ["nothing", "rest"], "start", {}),
        ("Reshape", ["start", "one"], "starts", {}),
        ("Slice", ["table", "starts", "end", "last"], "bias", {}),
        ("Transpose", ["k"], "keys", {"perm": [0, 1, 3, 2]}),
        ("MatMul", ["q", "keys"], "scores", {}),
        ("Add", ["scores", "bias"], "biased", {}),
        ("Softmax", ["biased"], "weights", {}),
        ("MatMul", ["weights", "v"], "y", {}),
    ]
    tensors = {"axis": [0], "minus": -1, "size": 9, "nothing": 0, "one": [-1], "end": [2**63 - 1], "last": [2]}
    table = drawn({"table": (H, 1, 9)})
    free: dict[str, Dims] = dict.fromkeys("qkv", ("B", H, "L", E))
    source = model(nodes, free, {"y": ("B", H, "L", E)}, {n: np.array(v) for n, v in tensors.items()} | table)
    result = canonicalize(source)
    assert (result.limits, [block.fused for block in result.blocks]) == ({"L": 9}, [True])
    for length in (1, L, 9):
        inputs = drawn(dict.fromkeys("qkv", (B, H, length, E)))
        assert max_error(oracle(source, inputs)[0], oracle(result.model, inputs)[0]) < 1e-12


def test_sizes_are_computed_with() -> None:
    """Beside a rotary embedding there are a Range up to a product of sizes, Tile by one, Max of one, Pow of another
    dtype."""
    nodes: list[tuple[Any, ...]] = [
        ("RotaryEmbedding", ["x", "cos", "sin"], "y", {}),
        ("Shape", ["x"], "batch", {"start": 0, "end": 1}),
        ("Shape", ["x"], "length", {"start": 2, "end": 3}),
        ("Squeeze", ["batch", "axis"], "B", {}),
        ("Squeeze", ["length", "axis"], "L", {}),
        ("Mul", ["B", "L"], "places", {}),
        ("Range", ["zero", "places", "step"], "counted", {}),
        ("Cast", ["counted"], "numbers", {"to": TensorProto.FLOAT}),
        ("Max", ["zero", "L"], "most", {}),
        ("Cast", ["most"], "most_float", {"to": TensorProto.FLOAT}),
        ("Add", ["numbers", "most_float"], "sums", {}),
        ("Pow", ["base", "counted"], "powers", {}),
        ("Reshape", ["B", "one"], "times", {}),
        ("Concat", ["times", "single"], "repeats", {"axis": 0}),
        ("Tile", ["row", "repeats"], "tiled", {}),
    ]
    tensors = {"axis": [0], "zero": 0, "step": 1, "one": [-1], "single": [2], "base": np.float32(0.5)}
    tensors |= {"row": np.arange(6, dtype=np.float32).reshape(2, 3)}
    inputs: dict[str, Dims] = {"x": ("B", H, "L", E), "cos": ("B", "L", 2), "sin": ("B", "L", 2)}
    outputs: dict[str, Dims] = {"y": ("B", H, "L", E), "sums": ("N",), "powers": ("N",), "tiled": ("M", 6)}
    source = model(nodes, inputs, outputs, {name: np.asarray(value) for name, value in tensors.items()})
    given = drawn({"x": (B, H, L, E), "cos": (B, L, 2), "sin": (B, L, 2)})
    _, sums, powers, tiled = mhsa.load(mhsa.compile(source))(**given)
    assert np.array_equal(sums, np.arange(B * L) + np.float32(L))
    assert np.allclose(powers, 0.5 ** np.arange(B * L))
    assert np.array_equal(tiled, np.tile(tensors["row"], (B, 2)))


class OneHeadOfKeys(nn.Module):
    """An attention as Falcon's: its one head of keys broadcasts, and it gives a dict."""

    def __init__(self, three_axes: bool) -> None:
        super().__init__()
        self.three_axes = three_axes

    def forward(self, x: Tensor) -> dict[str, Any]:
        q = x if self.three_axes else x.unflatten(-1, (2, 4)).transpose(1, 2)
        k = x if self.three_axes else x[..., :4].unsqueeze(1)
        y = F.scaled_dot_product_attention(q, k, k)
        return {"y": y, "nothing": None, "pair": (x + 1, [x + 2])}


@pytest.mark.thorough
@pytest.mark.parametrize("three_axes", [False, True])
def test_results_keep_their_names(three_axes: bool) -> None:
    source = export(OneHeadOfKeys(three_axes), example_inputs={"x": torch.randn(2, 5, 8)})
    assert [value.name for value in source.graph.output] == ["y", "pair_0", "pair_1_0"]
    assert [node.op_type for node in source.graph.node].count("Attention") == 1


class Cached(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x, object()


def test_a_result_that_is_no_tensor() -> None:
    with pytest.raises(ModelError, match=r"tuples and dicts of them, got object 'output_1'. Have the module return"):
        export(Cached(), example_inputs={"x": torch.randn(2, 5, 8)})
    with pytest.raises(ModelError, match=r"a forward that takes input \(2, 5, 8\)"):
        export(nn.Linear(7, 7), example_inputs={"input": torch.randn(2, 5, 8)})


class JoinedHeads(nn.Module):
    """Attention whose products have batch and heads as one axis, which gives its weights as well."""

    def __init__(self, weights_joined: bool) -> None:
        super().__init__()
        self.weights_joined = weights_joined

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        B, L, _ = x.shape
        rows = x.unflatten(-1, (3, 4)).transpose(1, 2).reshape(B * 3, L, 4)
        weights = (rows @ rows.transpose(1, 2)).view(B, 3, L, L).softmax(-1)
        joined = weights.view(B * 3, L, L)
        return (joined @ rows).view(B, 3, L, 4), joined if self.weights_joined else weights


@pytest.mark.thorough
@pytest.mark.parametrize("weights_joined", [False, True])
def test_weights_are_read_where_heads_lie_apart(weights_joined: bool) -> None:
    source = canonicalize(export(JoinedHeads(weights_joined), example_inputs={"x": torch.randn(2, 5, 12)}))
    (block,) = source.blocks
    assert block.fused is not weights_joined
    assert block.note == ("its weights are read where batch and heads are one axis" if weights_joined else "")


@pytest.mark.thorough
def test_a_whole_model_gives_a_named_tuple() -> None:
    outcome = run(FAMILIES["bert"], "sdpa", threads=1)
    assert [block.fused for block in outcome.blocks] == [True, True]
    assert outcome.worst <= 1

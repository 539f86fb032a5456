"""Decomposed attention, as exporters write it: what becomes the operator means the same, and what does not says why.

The graphs are those of PyTorch's old exporter, at opsets 11 to 17, of functions that people write. Before and after the
rewriting they are evaluated in float64.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.nn import functional as F

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.canonicalize.canonicalize import canonicalize
from mhsa_compile.frontend.canonicalize.rewriting.shape_propagation import propagate_shapes
from mhsa_compile.frontend.onnx_graph import GraphView
from mhsa_compile.frontend.relax.importer import import_onnx
from mhsa_compile.kernels.interface.ops import AttentionOp, LinearOp
from mhsa_compile.runtime.artifact.manifest import AttentionCoverage
from mhsa_compile.spec.outputs import layer_words
from mhsa_compile.verification.error_budget import budget, max_error
from mhsa_compile.verification.verify import eager, oracle

B, L, S, H, G, E, V, W, M = 2, 5, 7, 6, 3, 8, 3, 11, 9  # W windows of M
LOWEST = torch.finfo(torch.float32).min
SHAPES = {
    "q": (B, H, L, E), "k": (B, H, S, E), "v": (B, H, S, V), "k_self": (B, H, L, E), "v_self": (B, H, L, V),
    "k_group": (B, G, S, E), "v_group": (B, G, S, V), "added": (B, 1, L, S), "keys": (B, S),
    "q_flat": (B * H, L, E), "k_flat": (B * H, S, E), "v_flat": (B * H, S, V), "x": (B, L, 48), "scores": (B, L, S),
    "places": (B, L), "windows": (W, M, M), "bias": (1, H, M, M), "q_windows": (B * W, H, M, E),
    "k_windows": (B * W, H, M, E), "v_windows": (B * W, H, M, V),
}  # fmt: skip
AXES = {B: "B", L: "L", S: "S", B * H: "N", B * W: "N"}


class Function(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.sinks = nn.Parameter(torch.linspace(-1.0, 2.0, H))
        self.register_buffer("triangle", torch.ones(16, 16, dtype=torch.bool).tril().view(1, 1, 16, 16))

    def forward(self, *inputs: Tensor) -> Tensor:
        needs_buffers = "buffers" in self.function.__code__.co_varnames
        return self.function(*inputs, **({"buffers": self} if needs_buffers else {}))


def exported(module: nn.Module, names: tuple[str, ...], opset: int = 17) -> onnx.ModelProto:
    """Exports a module by PyTorch's old exporter; batch and lengths are symbolic."""
    inputs = tuple(drawn()[name] for name in names)
    axes = {n: {i: AXES[d] for i, d in enumerate(SHAPES[n]) if d in AXES} for n in names}
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module.eval(), inputs, file, input_names=list(names), output_names=["y"], dynamic_axes=axes,
            opset_version=opset, dynamo=False,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def drawn() -> dict[str, Tensor]:
    """One row of `keys` has none, and one row of `added` hides all of them with a finite number."""
    generator = torch.Generator().manual_seed(0)
    values = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    values["keys"] = torch.rand(B, S, generator=generator) < 0.7
    values["keys"][0, 0], values["keys"][1] = True, False
    values["places"] = torch.randint(0, 16, (B, L), generator=generator)
    values["added"][0, 0, 1] = -10000.0
    return values


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | float = 0.0, scale: float = E**-0.5) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * scale + mask, -1) @ v


def filled(fill: float) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).masked_fill(~keys[:, None, None, :], fill)
        return torch.softmax(scores, -1) @ v

    return function


def causal_buffer(q: Tensor, k: Tensor, v: Tensor, buffers: Any = None) -> Tensor:
    length = q.shape[2]
    seen = buffers.triangle[:, :, :length, :length]
    return torch.softmax(torch.where(seen, q @ k.transpose(-1, -2) / math.sqrt(E), -1e4), -1) @ v


def causal_computed(fill: float, diagonal: int = 1) -> Callable[..., Tensor]:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(diagonal)
        return torch.softmax((q @ k.transpose(-1, -2)).masked_fill(hidden, fill), -1) @ v

    return function


def causal_by_index(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    index = torch.arange(q.shape[2])
    mask = torch.where(index[None, :] <= index[:, None], 0.0, LOWEST)
    return attend(q, k, v, mask)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, :, None].expand(-1, -1, H // G, -1, -1).reshape(x.shape[0], H, *x.shape[2:]) for x in (k, v))
    return attend(q, k, v)


def rows(x: Tensor) -> Tensor:
    """Heads apart and together again, with sizes that the graph computes."""
    batch, length, width = x.shape
    heads = x.view(batch, length, -1, E)
    q, k, v = (heads.permute(0, 2, 1, 3), heads.permute(0, 2, 3, 1), heads.transpose(1, 2))
    y = torch.softmax((q / E**0.25) @ (k / E**0.25), dim=-1) @ v
    return y.transpose(1, 2).contiguous().view(batch, length, width)


def einsum_rows(x: Tensor) -> Tensor:
    """Heads stay where they lie: (batch, length, heads, head size)."""
    heads = x.view(x.shape[0], x.shape[1], -1, E)
    weights = torch.softmax(torch.einsum("blhd,bshd->bhls", heads * 0.3, heads), -1)
    return torch.einsum("bhls,bshd->blhd", weights, heads).reshape(x.shape)


def keys_first(x: Tensor) -> Tensor:
    """Attention as Keras writes it, the right operand's rows first."""
    heads = x.view(x.shape[0], x.shape[1], -1, E)
    weights = torch.softmax(torch.einsum("aecd,abcd->acbe", heads, heads * 0.3), -1)
    return torch.einsum("acbe,aecd->abcd", weights, heads).reshape(x.shape)


def einsum_heads(q: Tensor, k: Tensor, v: Tensor, m: Tensor) -> Tensor:
    scores = torch.einsum("...ld,...sd->...ls", q, k) * E**-0.5
    return torch.einsum("bhsv,bhls->bhlv", v, torch.softmax(scores + m, -1))


def windowed(q: Tensor, k: Tensor, v: Tensor, windows: Tensor, bias: Tensor) -> Tensor:
    """Swin's: windows take turns in the batch, and each has a mask of its own."""
    scores = q @ k.transpose(-1, -2) * E**-0.5 + bias
    apart = scores.view(-1, W, H, M, M) + windows.unsqueeze(1).unsqueeze(0)
    return torch.softmax(apart.view(-1, H, M, M), -1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(q @ k.transpose(-1, -2) / 3.0) * 3.0 + added, -1) @ v


def with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | float = 0.0, buffers: Any = None, *, shifted: bool = True
) -> Tensor:
    scores = q @ k.transpose(-1, -2) * E**-0.5
    scores = scores.masked_fill(~mask, -math.inf) if getattr(mask, "dtype", None) == torch.bool else scores + mask
    sinks = buffers.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)
    both = torch.cat((scores, sinks), -1)
    if shifted:
        both = both - both.max(-1, keepdim=True).values
    return torch.softmax(both, -1)[..., :-1] @ v


def sinks_of_keys(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, buffers: Any = None) -> Tensor:
    return with_sinks(q, k, v, keys[:, None, None, :], buffers, shifted=False)


def sinks_kept(q: Tensor, k: Tensor, v: Tensor, buffers: Any = None) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    both = torch.cat((scores, buffers.sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)), -1)
    return torch.softmax(both, -1) @ torch.cat((v, v[:, :, :1]), 2)


def sinks_of_queries(q: Tensor, k: Tensor, v: Tensor, buffers: Any = None) -> Tensor:
    both = torch.cat((q @ k.transpose(-1, -2), buffers.sinks.view(1, -1, 1, 1) * q[..., :1]), -1)
    return torch.softmax(both, -1)[..., :-1] @ v


WINDOWS = ("q_windows", "k_windows", "v_windows", "windows")
CORE, SELF = ("q", "k", "v"), ("q", "k_self", "v_self")
CASES: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], dict[str, Any]]] = {
    "scaled scores": (attend, CORE, {}),
    "scaled queries": (lambda q, k, v: attend(q * 0.3, k, v, scale=1.0), CORE, {"scale": 0.3}),
    "divided scores": (lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) / 4.0, -1) @ v, CORE, {"scale": 0.25}),
    "one head": (attend, ("q_flat", "k_flat", "v_flat"), {}),
    "heads apart and together": (rows, ("x",), {}),
    "einsum, rows": (einsum_rows, ("x",), {"scale": 0.3}),
    "einsum, keys first": (keys_first, ("x",), {"scale": 0.3}),
    "einsum, heads": (einsum_heads, (*CORE, "added"), {}),
    "added mask": (attend, (*CORE, "added"), {}),
    "mask before the scale": (
        lambda q, k, v, m: torch.softmax((q @ k.transpose(-1, -2) + m) * 0.5, -1) @ v,
        (*CORE, "added"),
        {},
    ),
    "lowest in masked places": (filled(LOWEST), (*CORE, "keys"), {}),
    "-1e9 in masked places": (filled(-1e9), (*CORE, "keys"), {}),
    "infinity in masked places": (filled(-math.inf), (*CORE, "keys"), {}),
    "function of PyTorch": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), CORE, {}),
    "triangle of a buffer": (causal_buffer, SELF, {"is_causal": 1}),
    "triangle, computed": (causal_computed(-math.inf), SELF, {"is_causal": 1}),
    "triangle, computed, finite": (causal_computed(-1e4), SELF, {"is_causal": 1}),
    "triangle by index": (causal_by_index, SELF, {"is_causal": 1}),
    "another triangle": (causal_computed(-1e9, diagonal=2), SELF, {}),
    "triangle of PyTorch": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        SELF,
        {"is_causal": 1},
    ),
    "repeated keys": (repeated, ("q", "k_group", "v_group"), {}),
    "windows": (windowed, (*WINDOWS, "bias"), {}),
    "soft cap": (capped, (*CORE, "added"), {"softcap": 3.0}),
    "sinks": (with_sinks, CORE, {}),
    "sinks and a mask": (with_sinks, (*CORE, "added"), {}),
    "sinks and keys": (sinks_of_keys, (*CORE, "keys"), {}),
    "softmax in float64": (lambda q, k, v: torch.softmax((q @ k.transpose(-1, -2)).double(), -1).float() @ v, CORE, {}),
}
OPSETS = {"heads apart and together": (11, 13, 17), "added mask": (11, 14, 17), "repeated keys": (11, 17)}
RUNS = [(case, opset) for case in CASES for opset in OPSETS.get(case, (17,))]


def blocks(model: onnx.ModelProto) -> tuple[AttentionCoverage, ...]:
    return canonicalize(model).blocks


@pytest.mark.thorough_only("repeated keys-17")
@pytest.mark.parametrize(("case", "opset"), RUNS)
def test_means_the_same(case: str, opset: int) -> None:
    """A row without keys included: it gives the mean of the values, unless what hides them is -inf."""
    function, names, said = CASES[case]
    model = exported(Function(function), names, opset)
    found = canonicalize(model)
    assert [block.fused for block in found.blocks] == [True], found.blocks
    (node,) = (node for node in found.model.graph.node if node.op_type == "Attention")
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    assert {name: attributes.get(name) for name in said} == {n: pytest.approx(value) for n, value in said.items()}
    assert attributes.get("is_causal", 0) == said.get("is_causal", 0)
    feeds = {name: drawn()[name].numpy() for name in names}
    with np.errstate(invalid="ignore"):
        (before,), (yardstick,) = oracle(model, feeds), eager(model, feeds)
    (after,) = oracle(found.model, feeds)
    seen = np.isfinite(before)
    assert seen.any()
    assert max_error(before[seen], after[seen]) <= budget(before[seen], yardstick[seen], "float32")
    assert (after[~seen] == 0).all()


def test_sinks_of_several_forms_have_definitions_of_their_own_and_so_have_outputs() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor, added: Tensor, buffers: Any = None) -> Tensor:
        return with_sinks(q, k, v, buffers=buffers) + with_sinks(q, k, v, added, buffers)

    names = (*CORE, "added")
    model = exported(Function(twice), names)
    found = canonicalize(model, layer_words(["entropy"]))
    assert [block.fused for block in found.blocks] == [True, True], found.blocks
    overloads = [function.overload for function in found.model.functions]
    assert len(set(overloads)) == len(overloads) == 4
    feeds = {name: drawn()[name].numpy() for name in names}
    (before,), (yardstick,) = oracle(model, feeds), eager(model, feeds)
    after, *entropies = oracle(found.model, feeds)
    assert max_error(before, after) <= budget(before, yardstick, "float32")
    assert [entropy.shape for entropy in entropies] == [(B, H, L), (B, H, L)]
    assert not np.allclose(*entropies)


def test_grouped_keys_are_not_repeated() -> None:
    model = canonicalize(exported(Function(repeated), ("q", "k_group", "v_group"))).model
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    assert list(node.input) == ["q", "k_group", "v_group"]
    assert len(model.graph.node) == 1


@pytest.mark.parametrize(("function", "opset"), [(rows, 11), (einsum_rows, 17), (keys_first, 17)])
def test_heads_are_read_where_they_lie(function: Callable[..., Tensor], opset: int) -> None:
    model = canonicalize(exported(Function(function), ("x",), opset)).model
    assert {node.op_type for node in model.graph.node} == {"Reshape", "Transpose", "Attention"}


class Keras(nn.Module):
    """MultiHeadAttention as Keras has it: the heads of every weight and bias are an axis of their own."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"q": (48, H, E), "k": (48, H, E), "v": (48, H, V), "o": (H, V, 48)}
        self.weights = nn.ParameterDict({name: torch.randn(shape) / 7 for name, shape in shapes.items()})
        self.biases = nn.ParameterDict({name: torch.randn(self.weights[name].shape[1:]) for name in "qkv"})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("abc,cde->abde", x, self.weights[n]) + self.biases[n] for n in "qkv")
        weights = torch.softmax(torch.einsum("aecd,abcd->acbe", k, q * E**-0.5), -1)
        return torch.einsum("abcd,cde->abe", torch.einsum("acbe,aecd->abcd", weights, v), self.weights["o"])


def test_keras_s_weights_are_those_of_rows() -> None:
    """The three projections become one, and nothing is left to TVM."""
    torch.manual_seed(0)
    model = exported(Keras(), ("x",))
    imported = import_onnx(canonicalize(model).model)
    assert [type(op) for op in imported.ops.values()] == [LinearOp, AttentionOp, LinearOp]
    assert "permute" not in imported.module["main"].script()
    feeds = {"x": drawn()["x"].numpy()}
    (before,), (yardstick,) = oracle(model, feeds), eager(model, feeds)
    (after,) = oracle(canonicalize(model).model, feeds)
    assert max_error(before, after) <= budget(before, yardstick, "float32")


REFUSED: dict[str, tuple[Callable[..., Tensor], tuple[str, ...], str]] = {
    "fill that does not hide": (filled(-5.0), (*CORE, "keys"), "masked scores are replaced by -5, which does not hide"),
    "scale of several numbers": (
        lambda q, k, v, m: torch.softmax((q @ k.transpose(-1, -2)) * m, -1) @ v,
        (*CORE, "added"),
        "Mul '.*' scales by something that is not one constant number",
    ),
    "einsum of groups": (
        lambda q, k, v: torch.einsum(
            "bgnls,bgsv->bgnlv",
            torch.softmax(torch.einsum("bgnld,bgsd->bgnls", q.reshape(q.shape[0], G, H // G, -1, E), k), -1),
            v,
        ),
        ("q", "k_group", "v_group"),
        "Einsum '.*' of 'bgnls,bgsv->bgnlv', which is no batch of products of two matrices, stands between",
    ),
    "windows that select": (
        lambda q, k, v, m: (
            torch.softmax(
                (q @ k.transpose(-1, -2))
                .view(-1, W, H, M, M)
                .masked_fill(m[None, :, None] > 0, -1e4)
                .view(-1, H, M, M),
                -1,
            )
            @ v
        ),
        WINDOWS,
        "Where '.*' selects by windows; a mask of windows is taken where it is added",
    ),
    "two products": (
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2) + k.sum(-2, keepdim=True) @ k.transpose(-1, -2), -1) @ v,
        CORE,
        "Add '.*' joins several products of activations",
    ),
    "a sink that is read": (sinks_kept, CORE, "Concat '.*' joins scores and a sink, whose weight is not cut off"),
    "a sink of each query": (sinks_of_queries, CORE, "Concat '.*' joins scores and what is no sink of each head"),
    "weights that are dropped": (
        lambda q, k, v: torch.softmax(q @ k.transpose(-1, -2), -1).square() @ v,
        CORE,
        "(Pow|Mul) '.*' stands between the Softmax and the product with the values",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_why_not(case: str) -> None:
    function, names, reason = REFUSED[case]
    (block,) = blocks(exported(Function(function), names))
    assert not block.fused
    assert block.form == "decomposed"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(block.note)


def test_a_block_that_is_not_recognised_compiles_all_the_same(tmp_path: Any) -> None:
    function, names, _ = REFUSED["scale of several numbers"]
    model = exported(Function(function), names)
    artifact = mhsa.compile(model)
    assert [block.fused for block in artifact.manifest.attention] == [False]
    assert {"product", "softmax"} <= {op.op for op in artifact.manifest.ops}
    inputs = {name: drawn()[name].numpy() for name in names}
    (expected,), (yardstick,) = oracle(model, inputs), eager(model, inputs)
    assert max_error(expected, mhsa.load(artifact)(**inputs)) <= budget(expected, yardstick, "float32")


def test_a_softmax_of_a_classifier_is_no_attention() -> None:
    model = exported(Function(lambda x: torch.softmax(x @ torch.ones(48, 3), -1)), ("x",))
    canonical = canonicalize(model)
    assert not canonical.blocks
    assert canonical.instead.endswith("MatMul, Softmax")


@pytest.mark.thorough
def test_lengths_end_where_a_table_does() -> None:
    """Positions are taken from a table of 16: a call with 17 is refused, not computed from what lies behind it."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(16, 48)
            self.register_buffer("index", torch.arange(16).view(1, 16))

        def forward(self, x: Tensor) -> Tensor:
            return rows(x + self.table(self.index[:, : x.shape[1]]))

    model = exported(Positions(), ("x",))
    artifact = mhsa.compile(model)
    assert artifact.manifest.limits == {"L": 16}
    attention = mhsa.load(artifact)
    x = np.random.default_rng(0).standard_normal((2, 16, 48), np.float32)
    (expected,), (yardstick,) = oracle(model, {"x": x}), eager(model, {"x": x})
    assert max_error(expected, attention(x)) <= budget(expected, yardstick, "float32")
    with pytest.raises(InputError, match=r"dim 'L': expected at most 16, .* got 17"):
        attention(np.zeros((1, 17, 48), np.float32))


def test_rows_that_are_looked_up_element_by_element() -> None:
    """GPT-J takes the angles of its positions so: by a copy of the table for each batch entry, and of each position."""

    def function(x: Tensor, places: Tensor, buffers: Any = None) -> Tensor:
        table = torch.cos(torch.arange(16.0)[:, None] * torch.arange(48.0))[None]
        tables, columns = table.repeat(places.shape[0], 1, 1), places.unsqueeze(-1).repeat(1, 1, 48)
        return rows(x + torch.gather(tables, 1, columns))

    model = exported(Function(function), ("x", "places"))
    found = canonicalize(model).model
    assert [n.op_type for n in found.graph.node if n.op_type in ("Tile", "Gather", "GatherElements")] == ["Gather"]
    feeds = {name: drawn()[name].numpy() for name in ("x", "places")}
    (before,), (yardstick,), (after,) = oracle(model, feeds), eager(model, feeds), oracle(found, feeds)
    assert max_error(before, after) <= budget(before, yardstick, "float32")


def test_an_operator_of_microsoft_that_nobody_knows() -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]) for name in "xy")
    node = helper.make_node("Trilu9", ["x"], ["y"], name="odd", domain="com.microsoft")
    model = helper.make_model(
        helper.make_graph([node], "g", [x], [y]),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)],
    )
    with pytest.raises(ModelError, match="Trilu9 node 'odd': expected an operator among Attention, "):
        canonicalize(model)


def test_a_zero_in_the_target_of_a_reshape_is_no_size() -> None:
    """A zero stands for a size of what is reshaped, perhaps not known when the target is: PP-OCR's recogniser."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["B", "S", 6])
    same, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("same", "y"))
    ints = {"zero": [0], "one": [1], "two": [2], "six": [6]}
    nodes = [
        helper.make_node("Shape", ["x"], ["dims"]),
        helper.make_node("Slice", ["dims", "one", "two"], ["length"]),
        helper.make_node("Concat", ["zero", "one", "length", "six"], ["target"], axis=0),
        helper.make_node("Reshape", ["same", "target"], ["apart"]),
        helper.make_node("Relu", ["apart"], ["y"]),
    ]
    constants = [helper.make_tensor(name, TensorProto.INT64, [1], value) for name, value in ints.items()]
    graph = helper.make_graph(nodes, "g", [x, same], [y], constants)
    settled = propagate_shapes(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)]), {})
    assert all(0 not in (GraphView(settled).shape(name) or ()) for name in ("apart", "y"))


class LastQuery(nn.Module):
    """One query against nine keys, with the row of a causal mask that it needs: it hides nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("visible", torch.ones(9, 9).tril().bool()[None, None])

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible[:, :, 8:])


def test_a_constant_mask_that_hides_nothing_is_no_mask() -> None:
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    free = {"q": {}, "k": {}, "v": {}}
    compiled = mhsa.load(mhsa.compile(LastQuery(), example_inputs=(q, k, v), dynamic_shapes=free))
    assert compiled.manifest.semantics[0].static_mask is None
    assert [op.kernel for op in compiled.manifest.ops] == ["cpu.decode"]
    torch.testing.assert_close(compiled(q, k, v), LastQuery()(q, k, v))


@pytest.mark.parametrize(("shift", "fused"), [(0.5, True), (1e6, False)])
def test_halves_whose_scores_are_float32_and_shifted(shift: float, fused: bool) -> None:
    """As FlexAttention is defined: a number added to all scores changes no softmax, unless it rounds them away."""
    model = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 23]>
    g (float16[2,3,5,8] q, float16[2,3,8,6] k, float16[2,3,6,8] v) => (float[2,3,5,8] y) <float shift = {{{shift}}}> {{
        s = MatMul(q, k)  wide = Cast <to=1> (s)  scores = Add(wide, shift)  p = Softmax(scores)
        values = Cast <to=1> (v)  y = MatMul(p, values) }}""")
    canonical = canonicalize(model)
    assert [block.fused for block in canonical.blocks] == [fused]
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 3, 5, 8), "k": (2, 3, 8, 6), "v": (2, 3, 6, 8)}
    inputs = {name: rng.standard_normal(shape).astype(np.float16) for name, shape in shapes.items()}
    q, k, v = (array.astype(np.float64) for array in inputs.values())
    powers = np.exp(q @ k)
    np.testing.assert_allclose(
        oracle(canonical.model, inputs)[0], powers / powers.sum(-1, keepdims=True) @ v, rtol=1e-6
    )

"""Exported graphs: what they hold, what stays symbolic, and that they are the same bytes every time."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from onnx.reference import ReferenceEvaluator
from torch import nn

from mhsa_compile import masks
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.frontend.export.export import check_equal_but_for_sizes, check_symbols, export
from mhsa_compile.nn.modules import MultiHeadAttention, ScaledDotProductAttention, weights
from mhsa_compile.spec.attention_spec import SPEC_KEY, AttentionSpec
from mhsa_compile.verification.error_budget import max_error
from mhsa_compile.verification.oracle.evaluate import Reference, promote
from mhsa_compile.verification.random_inputs import random_inputs
from mhsa_compile.verification.verify import oracle

MASK = ("mask_B", "mask_H", "mask_L", "mask_S")


def block(**fields) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(AttentionSpec(embed_dim=24, num_heads=4, **fields))


def dims(model: onnx.ModelProto) -> dict[str, tuple[int | str, ...]]:
    values = [*model.graph.input, *model.graph.output]
    return {v.name: tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim) for v in values}


def attention_node(model: onnx.ModelProto) -> tuple[onnx.NodeProto, dict[str, object]]:
    (node,) = (node for node in model.graph.node if node.op_type == "Attention")
    return node, {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


@pytest.mark.thorough
def test_self_attention() -> None:
    module = block()
    model = export(module)
    assert dims(model) == {"x": ("B", "L", 24), "y": ("B", "L", 24)}
    assert operators(model) == ["Transpose", "MatMul", "Add"] * 3 + ["Attention"] + ["Transpose", "MatMul", "Add"]
    assert attention_node(model)[1] == {"q_num_heads": 4, "kv_num_heads": 4}
    assert model.opset_import[0].version == 23
    initializers = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    expected = weights(module)
    assert initializers.keys() == expected.keys()
    assert all(np.array_equal(initializers[name], expected[name]) for name in expected)


@pytest.mark.thorough
def test_cross_attention_with_everything() -> None:
    model = export(block(kv_embed_dim=10, num_kv_heads=2, v_head_dim=7, bias=False, scale=0.5, mask="bool"))
    assert dims(model) == {"x": ("B", "L", 24), "context": ("B", "S", 10), "mask": MASK, "y": ("B", "L", 24)}
    assert attention_node(model)[1] == {"q_num_heads": 4, "kv_num_heads": 2, "scale": 0.5}
    assert operators(model) == ["Transpose", "MatMul"] * 3 + ["Attention"] + ["Transpose", "MatMul"]


@pytest.mark.thorough
def test_keys_and_values_of_two_inputs() -> None:
    model = export(block(kv_embed_dim=10, v_embed_dim=7, mask="key_padding"))
    rows = {"key": ("B", "S", 10), "value": ("B", "S", 7)}
    assert dims(model) == {"x": ("B", "L", 24), **rows, "mask": ("B", "S"), "y": ("B", "L", 24)}
    assert operators(model).count("MatMul") == 4
    fixed = export(block(kv_embed_dim=10, v_embed_dim=7), dims={"B": 1, "S": 600})  # longer than what is checked
    assert dims(fixed)["value"] == (1, 600, 7)


@pytest.mark.thorough
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_causal_cross_attention(causal: str) -> None:
    model = export(block(kv_embed_dim=10, causal=causal, mask="additive"))
    node, attributes = attention_node(model)
    assert attributes["is_causal"] == 1
    if causal == "top_left":
        assert model.opset_import[0].version == 23
        assert len(node.input) == 4
    else:  # nonpad_kv_seqlen = S, which makes the operator's offset S - L
        assert model.opset_import[0].version == 24
        assert len(node.input) == 7
        assert operators(model)[-7:-4] == ["Shape", "Shape", "Expand"]


@pytest.mark.thorough
def test_causal_self_attention_needs_no_offset() -> None:
    model = export(block(causal="bottom_right"))
    assert model.opset_import[0].version == 23
    assert attention_node(model)[1]["is_causal"] == 1


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_windows_take_opset_25(causal: str | None) -> None:
    model = export(block(kv_embed_dim=10, causal=causal, window=(3, 1)))
    node, attributes = attention_node(model)
    assert model.opset_import[0].version == 25
    assert (attributes["left_window_size"], attributes["right_window_size"]) == (3, 1)
    assert len(node.input) == (7 if causal == "bottom_right" else 3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dtype", "code"),
    [pytest.param("bfloat16", TensorProto.BFLOAT16, marks=pytest.mark.thorough), ("float16", TensorProto.FLOAT16)],
)
def test_dtypes(dtype: str, code: int) -> None:
    module = block(dtype=dtype, mask="additive", causal=True)
    model = export(module)
    assert {value.type.tensor_type.elem_type for value in (*model.graph.input, *model.graph.output)} == {code}
    initializers = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    expected = weights(module)
    assert all(np.array_equal(initializers[name], expected[name]) for name in expected)


@pytest.mark.thorough
def test_a_static_mask_is_an_initializer_of_its_own() -> None:
    pattern = masks.Longformer(window=4, global_tokens=1)
    model = export(block(static_mask=pattern, kv_embed_dim=10), dims={"L": 7, "S": 11})
    node, _ = attention_node(model)
    assert node.input[3] == "static_mask"
    (mask,) = (tensor for tensor in model.graph.initializer if tensor.name == "static_mask")
    assert np.array_equal(numpy_helper.to_array(mask), pattern.array(7, 11))
    assert dims(model) == {"x": ("B", 7, 24), "context": ("B", 11, 10), "y": ("B", 7, 24)}


@pytest.mark.parametrize(("fixed", "free"), [({}, "L and S"), ({"L": 7}, "S"), ({"S": 7}, "L")])
def test_a_static_mask_needs_fixed_lengths(fixed: dict[str, int], free: str) -> None:
    with pytest.raises(InputError, match=f"dims: expected fixed lengths, .*, got {free} left symbolic"):
        export(block(static_mask=masks.Strided(stride=3), kv_embed_dim=10), dims=fixed)


LONG = {
    "plain": ({}, {"L": 4096}),
    "both lengths of self-attention": ({}, {"L": 4096, "S": 4096}),
    "cross": ({"kv_embed_dim": 10, "causal": "bottom_right"}, {"L": 7, "S": 4099}),
    "mask": ({"mask": "bool"}, {"B": 1, "L": 4096}),
    "documents": ({"static_mask": masks.Documents(lengths=(1000, 3000))}, {"L": 4096}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("case", LONG)
def test_long_lengths_are_checked_at_short_ones(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The float64 check would take gigabytes at L = 4096; its largest run here is of 13 positions."""
    fields, fixed = LONG[case]
    seen = []
    for name in ("oracle", "eager"):
        evaluate = getattr(Reference, name)

        def recorded(self, inputs, evaluate=evaluate):
            seen.extend(max(array.shape) for array in inputs.values())
            return evaluate(self, inputs)

        monkeypatch.setattr(Reference, name, recorded)
    model = export(block(**fields), dims=fixed)
    assert fixed["L"] in dims(model)["x"]
    assert 0 < max(seen) <= 24


@pytest.mark.thorough
def test_a_graph_that_differs_at_other_lengths_is_an_error() -> None:
    one, two = export(block(), dims={"L": 7}), export(block(), dims={"L": 11})
    check_equal_but_for_sizes(one, two)
    attention_node(two)[0].attribute[0].i += 1
    with pytest.raises(ModelError, match="got Attention nodes that differ"):
        check_equal_but_for_sizes(one, two)
    del two.graph.node[-1]
    with pytest.raises(ModelError, match="the same at every length"):
        check_equal_but_for_sizes(one, two)


@pytest.mark.thorough
def test_key_padding() -> None:
    assert dims(export(block(mask="key_padding")))["mask"] == ("B", "L")
    model = export(block(mask="key_padding", kv_embed_dim=10))
    assert dims(model)["mask"] == ("B", "S")
    assert "Slice" not in operators(model)


OWN = (
    ({"sinks": True}, {}),
    ({"alibi": True, "causal": True, "window": (3, 0)}, {}),
    ({"alibi": True, "sinks": True, "mask": "bool", "softcap": 3.0}, {}),
    ({"alibi": True, "mask": "additive", "num_kv_heads": 2, "v_head_dim": 7}, {}),
    ({"alibi": True, "sinks": True, "kv_embed_dim": 10, "causal": "bottom_right"}, {}),
    ({"alibi": True, "sinks": True, "static_mask": masks.Strided(stride=3)}, {"L": 11}),
    ({"alibi": True, "sinks": True, "kv_cache": True, "causal": True}, {}),
)


@pytest.mark.thorough
@pytest.mark.parametrize(("fields", "fixed"), OWN, ids=str)
def test_an_operator_of_our_own_comes_with_its_definition(fields: dict[str, object], fixed: dict[str, int]) -> None:
    """A tool that knows nothing of it, as the reference evaluator here, runs the function; our oracle has its own
    meaning."""
    model = export(block(**fields), dims=fixed)
    node, _ = attention_node(model)
    assert node.domain == "mhsa"
    assert [bool(name) for name in [*node.input, ""][7:9]] == ["sinks" in fields, "alibi" in fields]
    sizes = {"B": 2, "L": 11, "S": 7 if "kv_embed_dim" in fields else 11, "C": 13, "mask_H": 4}
    inputs = random_inputs(model, sizes | fixed, seed=3)
    wide = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in inputs.items()}
    graph, weights = promote(model, {})
    outputs = ReferenceEvaluator(graph).run(None, weights | wide)
    for expected, actual in zip(oracle(model, inputs), outputs, strict=True):
        assert max_error(expected, actual) < 1e-12


@pytest.mark.thorough
def test_what_the_standard_has_a_word_for_is_standard() -> None:
    node, attributes = attention_node(export(block(softcap=30.0)))
    assert (node.domain, attributes["softcap"]) == ("", 30.0)
    model = export(block(rope={"max_length": 32, "rotary_dim": 4, "interleaved": True}, num_kv_heads=2))
    assert not model.functions
    turned = [node for node in model.graph.node if node.op_type == "RotaryEmbedding"]
    assert [{a.name: a.i for a in node.attribute} for node in turned] == [
        {"num_heads": heads, "interleaved": 1, "rotary_embedding_dim": 4} for heads in (4, 2)
    ]
    assert {node.input[1] for node in turned} == {"rope_cos"}
    tables = {tensor.name: tensor.dims for tensor in model.graph.initializer}
    assert tables["rope_cos"] == tables["rope_sin"] == [32, 2]


@pytest.mark.thorough
def test_a_cache_goes_in_and_comes_out() -> None:
    model = export(block(kv_cache=True, causal=True, num_kv_heads=2, v_head_dim=7, rope={"max_length": 32}))
    key, value = ("B", 2, "C", 6), ("B", 2, "C", 7)
    assert dims(model) == {
        "x": ("B", "L", 24), "past_key": key, "past_value": value, "length": ("B",),
        "y": ("B", "L", 24), "present_key": key, "present_value": value,
    }  # fmt: skip
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(metadata["mhsa.in_place"]) == {"past_key": "present_key", "past_value": "present_value"}
    node, attributes = attention_node(model)
    assert (list(node.input[1:3]), attributes["is_causal"]) == (["present_key", "present_value"], 1)
    assert model.opset_import[0].version == 24
    step = export(block(kv_cache=True, causal=True), dims={"B": 1, "L": 1, "C": 32})
    assert dims(step)["x"] == (1, 1, 24)


@pytest.mark.parametrize(
    ("fields", "fixed", "named"),
    [
        ({"rope": {"max_length": 32}}, {"L": 33}, "L of at most the spec's rope.max_length = 32"),
        ({"rope": {"max_length": 32}, "kv_cache": True, "causal": True}, {"C": 33}, "C of at most the spec's"),
        ({"kv_cache": True, "causal": True}, {"L": 7, "C": 5}, "a capacity C of at least L = 7"),
    ],
)
def test_lengths_that_do_not_fit(fields: dict[str, object], fixed: dict[str, int], named: str) -> None:
    with pytest.raises(InputError, match=f"dims: expected {named}"):
        export(block(**fields), dims=fixed)


@pytest.mark.thorough
def test_core() -> None:
    spec = AttentionSpec(embed_dim=24, num_heads=4, num_kv_heads=2, v_head_dim=7, causal="bottom_right", mask="bool")
    model = export(ScaledDotProductAttention(spec))
    assert dims(model) == {
        "q": ("B", 4, "L", 6), "k": ("B", 2, "S", 6), "v": ("B", 2, "S", 7), "mask": MASK, "y": ("B", 4, "L", 7),
    }  # fmt: skip
    assert attention_node(model)[1] == {"is_causal": 1}


@pytest.mark.thorough
def test_fixed_dims() -> None:
    model = export(block(), dims={"B": 1, "L": 128, "S": 128})
    assert dims(model) == {"x": (1, 128, 24), "y": (1, 128, 24)}
    model = export(block(kv_embed_dim=10, mask="bool"), dims={"B": 1, "L": None, "S": 5, "mask_H": 1})
    assert dims(model)["mask"] == (1, 1, "mask_L", 5)
    assert dims(model)["x"] == (1, "L", 24)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"T": 3}, "symbols among B, L"), ({"L": 0}, "positive integer"), ({"L": 5, "S": 7}, "symbols among B, L")],
)
def test_wrong_dims(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        export(block(), dims=wrong)


@pytest.mark.thorough
def test_metadata_is_the_spec_and_nothing_of_this_machine() -> None:
    module = block(mask="key_padding", kv_embed_dim=10, causal="bottom_right")
    model = export(module)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert AttentionSpec.from_json(metadata[SPEC_KEY]) == module.spec
    assert metadata["mhsa.module"] == "MultiHeadAttention"
    text = str(model)
    for trace in ("pkg.torch", ".py", "doc_string", "site-packages"):
        assert trace not in text


@pytest.mark.thorough
def test_export_is_silent_and_leaves_the_module_alone(capfd: pytest.CaptureFixture[str]) -> None:
    module = block(kv_embed_dim=10).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export(module)
    assert module.training
    assert capfd.readouterr() == ("", "")


class Residual(nn.Module):
    """A module of the user's own around PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(24, 72)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projection(x).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
        return x + nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class TwoStreams(nn.Module):
    def forward(self, query: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(query, memory, memory)


@pytest.mark.thorough
def test_any_module_with_examples() -> None:
    model = export(Residual(), example_inputs=[torch.randn(1, 5, 24)])
    shapes = list(dims(model).values())
    assert dims(model)["x"] == ("B", "L", 24)
    assert shapes[-1][:2] == ("B", "L")
    assert "Attention" in operators(model)


@pytest.mark.thorough
def test_weights_whose_sign_is_lazy() -> None:
    module = Residual()
    module.register_buffer("shift", torch._neg_view(torch.randn(72)))
    module.projection.weight = nn.Parameter(torch._neg_view(torch.randn(72, 24)))
    module.projection.register_forward_hook(lambda layer, inputs, output: output + module.shift)
    right = {"projection.weight": module.projection.weight.detach().resolve_neg(), "shift": module.shift.resolve_neg()}
    model = export(module, example_inputs=[torch.randn(1, 5, 24)])
    written = {tensor.name: torch.tensor(numpy_helper.to_array(tensor)) for tensor in model.graph.initializer}
    assert all(torch.equal(written[name], value) for name, value in right.items())
    assert module.projection.weight.is_neg()  # the module is as it was


def test_any_module_with_named_symbols() -> None:
    examples = {"query": torch.randn(1, 2, 5, 8), "memory": torch.randn(1, 2, 7, 8)}
    named = {"query": {0: "N", 2: "T"}, "memory": {0: "N", 2: "M"}}
    model = export(TwoStreams(), example_inputs=examples, dynamic_shapes=named, dims={"N": 1})
    assert dims(model)["query"] == (1, 2, "T", 8)
    assert dims(model)["memory"] == (1, 2, "M", 8)


class Gives(nn.Module):
    """Gives what a function makes of its inputs and its weight."""

    def __init__(self, results: Any) -> None:
        super().__init__()
        self.weight, self.results = nn.Parameter(torch.arange(24.0)), results

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:
        return self.results(x, bias, self.weight)


@pytest.mark.thorough_but("<lambda>-names5")
@pytest.mark.parametrize(
    ("results", "names"),
    [
        (lambda x, bias, weight: (x + weight, bias), ["output_0", "output_1"]),
        (lambda x, bias, weight: (x.contiguous(), bias.view(bias.shape), weight), ["output_0", "output_1", "output_2"]),
        (lambda x, bias, weight: [x - bias] * 2, ["output_0", "output_1"]),
        (lambda x, bias, weight: {"bias": x + bias, "x": bias, "y": bias}, ["bias_1", "x_1", "y"]),
        (lambda x, bias, weight: {"mul": x + bias, "add": x * bias}, ["mul", "add"]),
        (lambda x, bias, weight: {"weight": x + weight, "y": weight}, ["weight", "y"]),
        (lambda x, bias, weight: {"bias": x - bias}, ["bias_1"]),
    ],
)
def test_results_that_are_inputs_or_one_value_or_called_as_others_are(results: Any, names: list[str]) -> None:
    module, given = Gives(results), {"x": torch.randn(2, 5, 24), "bias": torch.randn(2, 5, 24)}
    model = export(module, example_inputs=given)
    onnx.checker.check_model(model)
    assert [value.name for value in model.graph.input] == ["x", "bias"]
    assert [value.name for value in model.graph.output] == names
    outputs = ReferenceEvaluator(model).run(None, {name: value.numpy() for name, value in given.items()})
    with torch.no_grad():
        expected = module(**given)
    expected = list(expected.values()) if isinstance(expected, dict) else list(expected)
    pairs = zip(outputs, (value.detach().numpy() for value in expected), strict=True)
    assert all(np.allclose(one, other, atol=1e-6) for one, other in pairs)


class Single(nn.Module):
    """Says float32 itself, so that it cannot be run in float64."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.eye(24, dtype=torch.float32)


class Rounds(nn.Module):
    """Rounds its input to float32, so that its weights of float64 fit nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.to(torch.float32), self.linear.weight)


@pytest.mark.thorough_but("<lambda>")
@pytest.mark.parametrize("made", [Single, lambda: torch.fx.symbolic_trace(Rounds())])
def test_a_module_that_says_float32_itself(made: Callable[[], nn.Module], capfd: pytest.CaptureFixture[str]) -> None:
    """That it fails in float64 is no word to a user, though a graph module would print it."""
    assert dims(export(made(), example_inputs={"x": torch.randn(2, 5, 24)}))["x"] == ("B", "L", 24)
    assert "Traceback" not in capfd.readouterr().err


class Sums(nn.Module):
    """Says float32 inside; its few numbers may by chance be nearer to the truth than float32's are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(24, 24, generator=torch.Generator().manual_seed(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(x.to(torch.float32) @ self.weight.to(torch.float32), -1)
        return weights.square().sum((1, 2)).to(x.dtype)


@pytest.mark.parametrize("seed", range(4))
def test_few_numbers_of_a_module_that_says_float32_itself(seed: int) -> None:
    """Held against the graph by more than one draw of PyTorch's own error."""
    assert dims(export(Sums(seed), example_inputs=[torch.zeros(2, 5, 24)]))["x"] == ("B", "L", 24)


class Specialised(nn.Module):
    """Ties its length to a parameter's, as position embeddings of one size do."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(5, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.position


@pytest.mark.thorough
def test_check_symbols_sees_a_dim_that_was_lost() -> None:
    module = block()
    with pytest.raises(ModelError, match=r"\(1, 5, 24\)"):
        check_symbols(export(module, dims={"B": 1, "L": 5}), module, {"x": ("B", "L", 24)})


@pytest.mark.thorough
def test_check_symbols_sees_a_graph_that_is_wrong_elsewhere() -> None:
    """Declared symbolic, but with the causal offset of another alignment: only a run shows it."""
    right = block(kv_embed_dim=10, causal="top_left")
    wrong = block(kv_embed_dim=10, causal="bottom_right")
    wrong.load_state_dict(right.state_dict())
    with pytest.raises(ModelError, match="to agree within"):
        check_symbols(export(wrong), right, {"x": ("B", "L", 24), "context": ("B", "S", 10)})


class Caching(nn.Module):
    """Gives a cache where its config says so, or that of a part, as T5's decoder has one of its own."""

    def __init__(self, parts: tuple[str, ...], config: SimpleNamespace) -> None:
        super().__init__()
        self.config = config
        for part in parts:
            self.add_module(part, Caching((), SimpleNamespace(use_cache=True)))

    def forward(self, x: torch.Tensor) -> dict[str, object]:
        return {"y": x, "past_key_values": object()}


@pytest.mark.parametrize(
    ("parts", "switch"),
    [
        ((), "config.use_cache = False."),
        (("encoder", "decoder"), "config.use_cache = False and encoder.config.use_cache = False and decoder.config"),
    ],
)
def test_which_configs_switch_a_cache_off(parts: tuple[str, ...], switch: str) -> None:
    module = Caching(parts, SimpleNamespace(use_cache=True))
    with pytest.raises(ModelError, match=f"object 'past_key_values'.*switched off by {switch}"):
        export(module, example_inputs=[torch.zeros(2, 5, 24)])
    module = Caching((), SimpleNamespace())
    with pytest.raises(ModelError, match=r"Have the module return tensors\.$"):
        export(module, example_inputs=[torch.zeros(2, 5, 24)])


def test_modules_that_cannot_be_exported() -> None:
    with pytest.raises(InputError, match="example_inputs"):
        export(Residual())
    with pytest.raises(InputError, match=r"got a Tensor\. Put it in a list\."):
        export(Residual(), example_inputs=torch.randn(2, 5, 24))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a tensor for 'x', got list\. .*return_tensors"):
        export(Residual(), example_inputs={"x": [[1.0] * 24]})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="at most 1"):
        export(Residual(), example_inputs=[torch.zeros(1, 5, 24)] * 2)
    with pytest.raises(InputError, match="a tensor for 'x'"):
        export(Residual(), example_inputs=[3])


class Masking(nn.Module):
    """Adds `(1 - mask) * -1e4` to the scores, of a mask of whole numbers, and fills rows of the result by that mask."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.row = nn.Linear(24, 24), nn.Parameter(torch.randn(24))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.project(x) @ x.transpose(1, 2) + (1.0 - mask)[:, None] * -1e4
        y = scores.softmax(-1) @ x
        y[mask == 0] = 0
        y[:, mask[0] == 0] = self.row
        return y


def test_masks_of_whole_numbers_subtract_and_select() -> None:
    examples = {"x": torch.randn(2, 5, 24), "mask": torch.ones(2, 5, dtype=torch.int64)}
    model = export(Masking(), example_inputs=examples)  # held against the module at sizes never seen
    assert [tuple(d.dim_param for d in v.type.tensor_type.shape.dim) for v in model.graph.input][1] == ("B", "L")
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("Where") == 2
    assert not {"ScatterND", "NonZero"} & {*kinds}


def test_what_cannot_be_traced_prints_no_graph(capsys: pytest.CaptureFixture[str]) -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return x * 2 if mask.sum() > 3 else x

    with pytest.raises(ModelError, match=r"one that torch\.export can export"):
        export(Deciding(), example_inputs={"x": torch.ones(2, 4, 6), "mask": torch.ones(2, 4, dtype=torch.int64)})
    assert "def forward" not in capsys.readouterr().err

"""Layers of transformers as one artifact: PyTorch's numbers, and every edit that must be seen."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    DynamicCache,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaModel,
    PreTrainedModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

import mhsa_compile as mhsa
from mhsa_compile.errors import InputError
from mhsa_compile.integrations import weight_state
from mhsa_compile.integrations.accelerate import NAME
from mhsa_compile.integrations.acceleration_report import AccelerationReport
from mhsa_compile.integrations.first_calls import FirstCalls
from mhsa_compile.integrations.layers import state as layer_state
from mhsa_compile.integrations.layers import ways
from mhsa_compile.integrations.layers.export import ExportedKind, call_of
from mhsa_compile.integrations.layers.exported import BEFORE, ExportedLayerForward
from mhsa_compile.integrations.layers.state import LayerState
from mhsa_compile.verification.error_budget import budget, max_error

WORDS, D = 101, 32
SIZES: dict[str, Any] = {"hidden_size": D, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IDS = torch.arange(5, 27).reshape(2, 11)
PADDING = (torch.arange(11) < torch.tensor([[11], [8]])).long()
PICTURES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def bert() -> PreTrainedModel:
    return BertModel(BertConfig(vocab_size=WORDS, **SIZES))


def llama() -> PreTrainedModel:
    return LlamaModel(LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, **SIZES))


def gpt2() -> PreTrainedModel:
    config = GPT2Config(
        vocab_size=WORDS, n_embd=D, n_layer=2, n_head=4, scale_attn_by_inverse_layer_idx=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return GPT2Model(config)


def distilbert() -> PreTrainedModel:
    return DistilBertModel(DistilBertConfig(vocab_size=WORDS, dim=D, hidden_dim=48, n_layers=2, n_heads=4))


def roberta() -> PreTrainedModel:
    return RobertaModel(RobertaConfig(vocab_size=WORDS, **SIZES))


def albert() -> PreTrainedModel:
    """Its layers are no GradientCheckpointingLayer; one is called twice."""
    return AlbertModel(AlbertConfig(vocab_size=WORDS, embedding_size=31, **SIZES))


def t5() -> PreTrainedModel:
    """All layers but the first are given their bias of positions, and give it back."""
    return T5EncoderModel(T5Config(vocab_size=WORDS, d_model=D, d_kv=8, d_ff=48, num_layers=2, num_heads=4))


def vit() -> PreTrainedModel:
    return ViTModel(ViTConfig(image_size=8, patch_size=2, **SIZES))


def model_of(make: Callable[[], PreTrainedModel]) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    for weight in model.parameters():
        nn.init.normal_(weight, 0.1 if weight.ndim == 1 else 0, 0.2)
    return model


def hidden(model: Any, *inputs: Tensor, **named: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(*inputs, **named)[0]
    return result


def excess(plain: Any, model: Any, *inputs: Tensor, **named: Any) -> float:
    """The largest error of a model's result, as a part of float32's budget around the plain one's in float64."""
    result, own = hidden(model, *inputs, **named), hidden(plain, *inputs, **named)
    wide = copy.deepcopy(plain).double()
    truth = hidden(wide, *(x.double() if x.is_floating_point() else x for x in inputs), **named)
    return float(max_error(truth.numpy(), result.numpy()) / budget(truth.numpy(), own.numpy(), "float32"))


def accelerated(plain: Any, **options: Any) -> tuple[Any, AccelerationReport]:
    model = copy.deepcopy(plain)
    return model, mhsa.accelerate(model, **{"layers": "whole", **options})


def outcomes(report: AccelerationReport) -> list[tuple[bool, str, dict[str, int]]]:
    return [(row.is_whole, row.why_parts, row.parts) for row in report.layers]


WHOLE = [(True, "", {})] * 2


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, AccelerationReport]:
    """A model and its accelerated copy, which was called."""
    plain = model_of(bert)
    model, report = accelerated(plain)
    assert excess(plain, model, IDS) <= 1
    return plain, model, report


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "named"),
    [
        pytest.param(make, named, id=make.__name__)
        for make, named in ((llama, {"use_cache": False}), (gpt2, {"use_cache": False}), (distilbert, {}),
                            (roberta, {}), (bert, {}), (t5, {}))
    ],
)  # fmt: skip
def test_layers_of_families(make: Callable[[], PreTrainedModel], named: dict[str, Any]) -> None:
    plain = model_of(make)
    model, report = accelerated(plain)
    for masks in ({}, {"attention_mask": PADDING}):
        for rows in (1, 2):
            masks_of = {name: mask[-rows:] for name, mask in masks.items()}
            assert excess(plain, model, IDS[:rows], **masks_of, **named) <= 1
            assert excess(plain, model, IDS[:rows, :9], **{n: m[:, :9] for n, m in masks_of.items()}, **named) <= 1
    assert outcomes(report) == WHOLE, repr(report)
    assert report.checked >= 4
    mhsa.restore(model)
    assert not any("forward" in vars(part) for part in model.modules())
    assert torch.equal(hidden(model, IDS, **named), hidden(plain, IDS, **named))


@pytest.mark.thorough
def test_a_layer_that_is_called_for_several() -> None:
    plain = model_of(albert)
    model, report = accelerated(plain)
    assert excess(plain, model, IDS, attention_mask=PADDING) <= 1 and excess(plain, model, IDS[:1]) <= 1
    assert outcomes(report) == WHOLE[:1], repr(report)


def test_a_model_whose_layers_have_no_name_says_so() -> None:
    plain = model_of(albert)
    plain._can_record_outputs = None
    _, report = accelerated(plain)
    assert "0 of 1 layers can be one artifact each\n" in repr(report)
    assert "its parts: it has no layers that transformers names" in repr(report)


@pytest.mark.thorough
def test_layers_of_pictures() -> None:
    plain = model_of(vit)
    model, report = accelerated(plain)
    assert excess(plain, model, PICTURES) <= 1 and excess(plain, model, PICTURES[:1]) <= 1
    assert outcomes(report) == WHOLE


def test_one_artifact_for_layers_that_differ_in_weights_alone(pair: tuple[Any, Any, AccelerationReport]) -> None:
    forwards = [layer.forward for layer in pair[1].encoder.layer]
    kinds = {kind for forward in forwards for bound in forward._bound for kind in bound.artifacts}
    assert len(kinds) == 1 and len(forwards) == 2
    assert not torch.equal(*(layer.output.dense.weight for layer in pair[0].encoder.layer))


def bound_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on artifacts of layers are given other weights."""
    source = ExportedLayerForward._source

    def wrong(self: ExportedLayerForward, kind: ExportedKind) -> tuple[Any, dict[str, Tensor]]:
        what, weights = source(self, kind)
        return what, {name: weight * 1.001 for name, weight in weights.items()}

    monkeypatch.setattr(ExportedLayerForward, "_source", wrong)


@pytest.mark.thorough
def test_a_layer_that_differs_is_called_by_its_parts(
    pair: tuple[Any, Any, AccelerationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of all others: weights off by a thousandth are seen by the budget, and by the first call's check."""
    bound_wrong(monkeypatch)
    model, report = accelerated(pair[0], check=False)
    assert excess(pair[0], model, IDS) > 10
    model, report = accelerated(pair[0])
    with pytest.warns(UserWarning, match="a result is off by"):
        assert excess(pair[0], model, IDS) <= 1
    assert excess(pair[0], model, IDS) <= 1
    assert [sum(row.parts.values()) for row in report.layers] == [2, 2] and "a result is off by" in repr(report)


def write_data(layer: Any) -> None:
    layer.output.dense.weight.data.mul_(2)
    layer.attention.output.LayerNorm.bias.data.add_(1)


def take_a_step(layer: Any) -> None:
    for weight in layer.parameters():
        weight.grad = torch.full_like(weight, 1.0)
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    for weight in layer.parameters():
        weight.grad = None


def take_a_fused_step(layer: Any) -> None:
    for weight in layer.parameters():
        weight.grad = torch.full_like(weight, 1.0)
    torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True).step()


def load_state(layer: Any) -> None:
    layer.load_state_dict({name: value * 0.7 for name, value in layer.state_dict().items()})


def put_parameter(layer: Any) -> None:
    layer.intermediate.dense.bias = nn.Parameter(torch.ones(48))


def hook_a_part(layer: Any) -> None:
    layer.intermediate.register_forward_hook(lambda module, inputs, output: output * 0.5)


def hook_an_input(layer: Any) -> None:
    layer.output.dense.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))


def hook_the_layer(layer: Any) -> None:
    layer.register_forward_hook(lambda module, inputs, output: output * 0.5)


def other_epsilon(layer: Any) -> None:
    layer.output.LayerNorm.eps = 0.5


def other_activation(layer: Any) -> None:
    layer.intermediate.intermediate_act_fn = nn.Tanh().eval()


def other_function(layer: Any) -> None:
    layer.intermediate.intermediate_act_fn.act = torch.sin


def other_scale(layer: Any) -> None:
    layer.attention.self.scaling = 2.0


def doubled(layer: Any, *given: Tensor) -> Tensor:
    result: Tensor = type(layer).forward(layer, *given) * 2
    return result


def own_forward(layer: Any) -> None:
    layer.output.forward = MethodType(doubled, layer.output)


class Adapter(nn.Module):
    """A linear and an adapter beside it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        torch.manual_seed(3)
        self.down, self.up = nn.Linear(D, 2), nn.Linear(2, 48)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x) + self.up(self.down(x))
        return result


def put_adapter(layer: Any) -> None:
    layer.intermediate.dense = Adapter(layer.intermediate.dense).eval()


def parametrize(layer: Any) -> None:
    nn.utils.parametrizations.weight_norm(layer.intermediate.dense)
    with torch.no_grad():
        layer.intermediate.dense.parametrizations.weight.original0.mul_(2)


class Doubled(type(model_of(bert).encoder.layer[0])):  # type: ignore[misc]
    """A layer that became another."""

    def forward(self, *given: Any, **named: Any) -> Any:
        return super().forward(*given, **named) * 2


def other_class(layer: Any) -> None:
    layer.__class__ = Doubled


def drop_a_bias(layer: Any) -> None:
    layer.intermediate.dense.bias = None


def widen(layer: Any) -> None:
    torch.manual_seed(4)
    layer.intermediate.dense.weight.data, layer.intermediate.dense.bias.data = torch.randn(50, D), torch.randn(50)
    layer.output.dense.weight.data = torch.randn(D, 50)


def tie(layer: Any) -> None:
    layer.attention.self.key.weight = layer.attention.self.query.weight


def share(layer: Any) -> None:
    layer.attention.self.key = layer.attention.self.query


FAST = [write_data, take_a_step, load_state, hook_a_part, hook_an_input, hook_the_layer, own_forward, other_class]
SLOW = [take_a_fused_step, put_parameter, other_epsilon, other_activation, other_function, other_scale, put_adapter,
        parametrize, drop_a_bias, widen, tie, share]  # fmt: skip


@pytest.mark.thorough_but("hook_the_layer")
@pytest.mark.parametrize("edit", [*FAST, *(pytest.param(edit, marks=pytest.mark.thorough) for edit in SLOW)])
def test_edits_of_an_accelerated_layer(edit: Callable[[Any], None], pair: tuple[Any, Any, AccelerationReport]) -> None:
    plain, model, _ = copy.deepcopy(pair)
    assert excess(plain, model, IDS) <= 1
    before = copy.deepcopy(plain)
    for each in (plain, model):
        edit(each.encoder.layer[0])
    assert excess(before, plain, IDS) > 10, "the edit changes the result, so that one which is missed is seen"
    assert excess(plain, model, IDS) <= 1
    assert plain.state_dict().keys() == model.state_dict().keys()
    mhsa.restore(model)
    assert torch.equal(hidden(model, IDS), hidden(plain, IDS))


def test_an_edit_is_missed_where_nothing_is_looked_at(
    pair: tuple[Any, Any, AccelerationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls of the edits of numbers, and of the structure."""
    for edit in (write_data, hook_a_part):
        plain, model, _ = copy.deepcopy(pair)
        with monkeypatch.context() as patch:
            patch.setattr(weight_state, "_views", lambda places: [])
            assert excess(plain, model, IDS) <= 1
            patch.setattr("mhsa_compile.integrations.layers.state.LayerState.holds", lambda self: True)
            for each in (plain, model):
                edit(each.encoder.layer[0])
            assert excess(plain, model, IDS) > 10


@pytest.mark.thorough
@pytest.mark.parametrize("sees_ties", [True, False])
def test_a_weight_that_was_another_ones(
    sees_ties: bool, pair: tuple[Any, Any, AccelerationReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An artifact of a layer two of whose weights are one has no room for a second."""
    if not sees_ties:  # the control
        monkeypatch.setattr(layer_state, "_structure", lambda layer: iter([str(layer)]))
    plain = copy.deepcopy(pair[0])
    tie(plain.encoder.layer[0])
    model, _ = accelerated(plain, check=False)
    assert (excess(plain, model, IDS) <= 1) == sees_ties
    own = torch.randn(D, D, generator=torch.Generator().manual_seed(4))
    for each in (plain, model):
        each.encoder.layer[0].attention.self.key.weight = nn.Parameter(own)
    assert (excess(plain, model, IDS) <= 1) == sees_ties


class Scaled(nn.Module):
    """A function of one's own, by what is looked up in four places."""

    factor = 1.0

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.factors, self.named = config, [1.0], {"inside": {"factor": 1.0}}
        self.function: Callable[..., Tensor] = partial(functional.gelu, approximate="none")
        self.eval()

    def activation(self, x: Tensor) -> Tensor:
        return self.function(x)

    def forward(self, x: Tensor) -> Tensor:
        factor = self.factor * self.factors[0] * self.named["inside"]["factor"] * self.config.own["factor"]
        return scaled(self.activation(x), factor)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x * factor


def other_of_class(part: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scaled, "factor", 2.0)


def other_method(part: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scaled, "activation", lambda self, x: x)


def other_by_name(part: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(globals(), "scaled", lambda x, factor: x + factor)


def other_in_list(part: Any, patch: pytest.MonkeyPatch) -> None:
    part.factors[0] = 2.0


def other_in_dict(part: Any, patch: pytest.MonkeyPatch) -> None:
    part.named["inside"]["factor"] = 2.0


def other_in_config(part: Any, patch: pytest.MonkeyPatch) -> None:
    part.config.own["factor"] = 2.0


def other_partial(part: Any, patch: pytest.MonkeyPatch) -> None:
    part.function = partial(functional.gelu, approximate="tanh")


OF_CODE = [other_of_class, other_method, other_by_name, other_in_list, other_in_dict, other_in_config, other_partial]
OF_WEIGHTS = [drop_a_bias, widen, tie, share, put_parameter, other_epsilon, other_function, other_class]


def scaled_layer() -> Any:
    layer = model_of(bert).encoder.layer[0]
    layer.attention.self.config.own = {"factor": 1.0}
    layer.intermediate.intermediate_act_fn = Scaled(layer.attention.self.config)
    return layer


@pytest.mark.parametrize("edit", OF_CODE)
def test_a_layers_state_sees_edits_of_what_its_code_reads(
    edit: Callable[[Any, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = scaled_layer()
    state, x = LayerState(layer, BEFORE), torch.randn(1, 3, D)
    before = layer(x)
    with torch.no_grad():
        layer.output.dense.weight.data.mul_(1)
    assert state.holds() and not state.why and LayerState(layer, BEFORE).structure == state.structure
    edit(layer.intermediate.intermediate_act_fn, monkeypatch)
    assert not torch.allclose(layer(x), before), "it changes what the layer gives"
    assert not state.holds() and LayerState(layer, BEFORE).structure != state.structure


@pytest.mark.parametrize("edit", OF_WEIGHTS)
def test_a_layers_state_sees_edits_of_its_parts(edit: Callable[[Any], None]) -> None:
    layer = model_of(bert).encoder.layer[0]
    state = LayerState(layer, BEFORE)
    edit(layer)
    other = LayerState(layer, BEFORE)
    assert not state.holds() and other.holds()
    assert other.structure != state.structure or edit is put_parameter


class Stateful:
    """What is called and has numbers of its own, which no artifact would look at."""

    factor = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_what_is_called_and_has_numbers_of_its_own_is_in_no_artifact() -> None:
    layer = scaled_layer()
    part = layer.intermediate.intermediate_act_fn
    for function in (Stateful(), Stateful().__call__, partial(Stateful())):
        part.function = function
        assert LayerState(layer, BEFORE).why == (
            "its intermediate.intermediate_act_fn has function, of which an artifact would see no change"
        )


def test_copies_are_models_of_their_own(pair: tuple[Any, Any, AccelerationReport]) -> None:
    plain, model, _ = pair
    assert plain.state_dict().keys() == model.state_dict().keys()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other = copy.deepcopy(plain)
        for each in (twin, other):
            write_data(each.encoder.layer[1])
        assert excess(other, twin, IDS) <= 1 and excess(plain, model, IDS) <= 1


def test_what_an_artifact_cannot_take_part_in(pair: tuple[Any, Any, AccelerationReport]) -> None:
    plain, model, _ = copy.deepcopy(pair)
    report = vars(model)[NAME]
    with pytest.raises(InputError, match="without a gradient"):
        model(IDS)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.allclose(model(IDS)[0].float(), plain(IDS)[0].float(), atol=0.1)
    with torch.no_grad():
        model.config.output_hidden_states = plain.config.output_hidden_states = True
        states, expected = (each(IDS).hidden_states for each in (model, plain))
        model.config.output_hidden_states = plain.config.output_hidden_states = False
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(states, expected, strict=True))
        assert len(states) == 3
        with pytest.raises(InputError, match="output_attentions"):
            model(IDS, output_attentions=True)
        calls = dict(report.layers[0].parts)
        assert excess(plain, model, IDS) <= 1
        assert report.layers[0].parts == calls, "hooks that transformers left there collect nothing now"
        model.encoder.layer[0].output.dropout.train()
        assert not torch.equal(model(IDS)[0], model(IDS)[0]), "what a part in training mode drops is dropped"
        with pytest.raises(InputError, match="dropout"):
            model.train()(IDS)
        model.eval()
        assert excess(plain, model, IDS) <= 1
        model.set_attn_implementation("eager")
        plain.set_attn_implementation("eager")
        assert torch.allclose(model(IDS)[0], plain(IDS)[0], atol=1e-5)
        ours, theirs = (each(IDS, output_attentions=True).attentions for each in (model, plain))
        assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(ours, theirs, strict=True))
    assert any("autocast" in why for why in report.layers[0].parts)
    assert any("collects" in why for why in report.layers[0].parts)
    assert any("became 'eager'" in why for why in report.layers[0].parts)


@pytest.mark.thorough
def test_other_numbers_and_compilers(pair: tuple[Any, Any, AccelerationReport]) -> None:
    plain, model, _ = copy.deepcopy(pair)
    with torch.no_grad():
        layer, x = model.encoder.layer[0], torch.randn(2, 11, D)
        with warnings.catch_warnings(record=True) as caught:  # PyTorch has one of its own, too
            warnings.simplefilter("always")
            over = torch.vmap(lambda row: layer(row[None])[0])(x)
        assert any("PyTorch computes calls with vmap" in str(one.message) for one in caught)
        assert torch.allclose(over, plain.encoder.layer[0](x), atol=1e-5)
        compiled = torch.compile(model, backend="eager")
        assert torch.allclose(compiled(IDS)[0], plain(IDS)[0], atol=1e-5)
        for dtype in (torch.bfloat16, torch.float64):
            ours, theirs = copy.deepcopy(model).to(dtype), copy.deepcopy(plain).to(dtype)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "attention .*queries of torch.float64")
                result = ours(IDS)[0]
            assert torch.allclose(result, theirs(IDS)[0], atol=0.1 if dtype == torch.bfloat16 else 1e-10)
    with torch.inference_mode():
        assert torch.allclose(model(IDS)[0], plain(IDS)[0], atol=1e-4)


class Writes(type(model_of(bert).encoder.layer[0])):  # type: ignore[misc]
    """A layer that writes into what it is given."""

    def forward(self, hidden_states: Tensor, attention_mask: Any, encoder_hidden_states: Any, **named: Any) -> Any:
        hidden_states.mul_(2)
        return super().forward(hidden_states, attention_mask, encoder_hidden_states, **named)


class Counts(type(model_of(bert).encoder.layer[0])):  # type: ignore[misc]
    """A layer that counts its calls in a buffer, and by a list."""

    def forward(self, hidden_states: Tensor, attention_mask: Any, encoder_hidden_states: Any, **named: Any) -> Any:
        self.calls.add_(1)
        self.places.append(1)
        x = hidden_states * (self.calls + len(self.places))
        return super().forward(x, attention_mask, encoder_hidden_states, **named)


class Remembers(type(model_of(bert).encoder.layer[0])):  # type: ignore[misc]
    """A layer that writes into itself."""

    def forward(self, hidden_states: Tensor, attention_mask: Any, encoder_hidden_states: Any, **named: Any) -> Any:
        self.last = vars(self).get("last", 0) + 1
        return super().forward(hidden_states, attention_mask, encoder_hidden_states, **named)


@pytest.mark.thorough_but("Writes")
@pytest.mark.parametrize("kind", [Writes, Remembers, Counts])
def test_a_layer_that_writes_is_called_by_its_parts(kind: type[nn.Module]) -> None:
    plain = model_of(bert)
    plain.encoder.layer[0].__class__ = kind
    plain.encoder.layer[0].register_buffer("calls", torch.zeros(()))
    plain.encoder.layer[0].places = []
    model, report = accelerated(plain)
    for _ in range(2):
        assert excess(plain, model, IDS) <= 1
    assert list(report.layers[0].parts) == ["its forward writes into what it is given, or into the layer"]
    assert report.layers[1].is_whole


class HandsOn(type(model_of(bert).encoder.layer[0])):  # type: ignore[misc]
    """A layer that gives back its mask beside its result, as T5's do with a bias of positions, and None."""

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, *others: Any, **named: Any) -> Any:
        return super().forward(hidden_states, attention_mask, *others, **named), attention_mask, None


@pytest.mark.thorough_but("3")
@pytest.mark.parametrize("batch", [1, 3])
def test_what_a_layer_is_given_and_gives_back_is_the_callers(batch: int) -> None:
    plain = model_of(bert)
    plain.encoder.layer[0].__class__ = HandsOn
    model, report = accelerated(plain)
    x = torch.randn(batch, 5, D, generator=torch.Generator().manual_seed(0))
    mask = torch.randn(1, 1, 5, 5, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for given in (mask, None):
            result, other, nothing = model.encoder.layer[0](x, given)
            expected = plain.encoder.layer[0](x, given)[0]
            assert torch.allclose(result, expected, atol=1e-5) and other is given and nothing is None
    assert report.layers[0].is_whole and not report.layers[0].parts, repr(report)


def test_several_threads_call_and_bind_at_once(pair: tuple[Any, Any, AccelerationReport]) -> None:
    plain, model = pair[0], copy.deepcopy(pair[1])
    inputs = [IDS[:, : 3 + number] for number in range(4)]
    expected = [hidden(plain, ids) for ids in inputs]

    def wrong(number: int) -> int:
        return sum(not torch.allclose(hidden(model, inputs[number]), expected[number], atol=1e-4) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(wrong, range(4))) == 0
    with ThreadPoolExecutor(4) as pool, torch.no_grad():
        write_data(model.encoder.layer[0])
        assert sum(pool.map(wrong, range(4))) == 80


def test_a_first_call_beside_another_is_checked_itself() -> None:
    """As of two threads: the second begins while the first one's check is under way."""
    checks = FirstCalls("layer", True, lambda: None)
    wrong, right = [torch.ones(3)], [torch.zeros(3)]
    second: list[str] = []

    def theirs() -> list[Tensor]:
        if not second:
            second.append("")
            second[0] = checks.check("kind", wrong, theirs)
        return right

    with pytest.warns(UserWarning, match="PyTorch computes its calls"):
        assert "a result is off by" in checks.check("kind", wrong, theirs)
    assert "a result is off by" in second[0] and checks.wrong
    assert checks.check("kind", right, lambda: right) == "", "asked once"


CACHE = "past_key_values is a DynamicCache, which no artifact fills: pass use_cache=False to go without"


def test_calls_that_no_artifact_takes() -> None:
    names, x = ("hidden_states", "attention_mask", "past_key_values"), torch.zeros(2, 3, D)

    def why(*given: Any, **named: Any) -> Any:
        call = call_of(names, given, named)
        return call if isinstance(call, str) else "taken"

    assert why(x, None, DynamicCache()) == CACHE
    assert why(x, None) == why(x, torch.ones(2, 1, 3, 3)) == why(x, places=(x, x), use_cache=False) == "taken"
    assert why(None, x) == why(x[0]) == "its hidden_states are no sequences in a batch"
    assert why(x, output_attentions=True) == "output_attentions is asked for, which its parts alone have"
    assert why(x, hidden_states=x) == "hidden_states is given twice"
    assert why(x.double()) == "hidden_states is float64 on cpu, not float32 in CPU memory"
    assert why(x, torch.ones(5, 1, 3, 3)) == "attention_mask is (5, 1, 3, 3), beside a batch of 2"
    assert (
        why(x, places=()) == "places is a tuple"
        and why(x, None, None, 1) == "more arguments than its forward has names for"
    )


@pytest.mark.thorough
def test_a_cache_is_the_parts() -> None:
    plain = model_of(llama)
    model, report = accelerated(plain)
    assert excess(plain, model, IDS) <= 1
    assert [list(row.parts) for row in report.layers] == [[CACHE]] * 2


@pytest.mark.thorough_only("times1-parts-*")
@pytest.mark.parametrize(
    ("times", "way", "words"),
    [
        ([(1.0, 2.0)], "whole", "whole at 2 x 11 (1e+03 ms, PyTorch's 2e+03)"),
        ([(1.0, 1.1), (1.0, 1.1, 0.5)], "parts", "its parts at 2 x 11 (1e+03 ms, PyTorch's 1.1e+03, its parts' 500)"),
        ([(3.0, 1.0), (3.0, 1.0, 2.0)], "pytorch",
         "left to PyTorch at 2 x 11 (3e+03 ms, PyTorch's 1e+03, its parts' 2e+03)"),
    ],
)  # fmt: skip
def test_the_fastest_way_is_taken_and_reported(
    times: list[tuple[float, ...]],
    way: str,
    words: str,
    pair: tuple[Any, Any, AccelerationReport],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = iter(times)

    def timed(*calls: Callable[[], Any]) -> tuple[float, ...]:
        for call in calls:
            call()
        return next(turns)

    monkeypatch.setattr(ways, "in_turns", timed)
    monkeypatch.setattr("mhsa_compile.integrations.layers.exported.LEAST_WEIGHTS", 0)
    plain = pair[0]
    model, report = accelerated(plain, layers="fastest")
    assert excess(plain, model, IDS) <= 1
    assert torch.equal(hidden(model, IDS), hidden(plain, IDS)) == (way == "pytorch")
    assert [row.outcome() for row in report.layers] == [words] * 2, "the second layer takes the first one's word"
    hook_a_part(model.encoder.layer[0])
    hidden(model, IDS)
    assert any("hooks" in why for why in report.layers[0].parts)


def test_what_is_not_taken_whole_says_why(pair: tuple[Any, Any, AccelerationReport]) -> None:
    eager = model_of(bert)
    eager.set_attn_implementation("eager")
    odd = model_of(bert)
    odd.encoder.layer[0].forward = odd.encoder.layer[0].forward
    reports = [
        accelerated(eager)[1],
        accelerated(odd)[1],
        accelerated(pair[0], layers="fastest")[1],
        accelerated(pair[0], layers="parts")[1],
        accelerated(pair[0], linears="int4")[1],
    ]
    reasons = [
        'the model\'s attention was eager: load the model with attn_implementation="sdpa"',
        "it has a forward of its own",
        'it has fewer than 65536 weights; layers="whole" takes it, too',
        'layers="parts"',
        "its linears have few bits",
    ]
    assert [report.layers[0].why_parts for report in reports] == reasons
    assert all(why in repr(report) for why, report in zip(reasons, reports, strict=True))

"""The attention layers of other people's models: found by running them, and held against what they compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from support.attention_families import FAMILIES, REFUSED, built, given

from mhsa_analysis.model_layers import TrainedLayer, trained_layers
from mhsa_compile.conversion.attention_calls import NAME
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.verification.error_budget import agrees

MASKS = {"T5": "additive"}
BANDS: dict[str, list[Any]] = {
    "Gemma2": [("top_left", (3, 0)), ("top_left", None)],
    "Mistral": [("top_left", (3, 0))] * 2,
    "ModernBert": [(None, None), (None, (2, 2))],
}
CAUSAL = {"Cohere", "GPT2", "GPTNeoX", "Gemma", "Glm", "Granite", "Llama", "OPT", "Phi", "Qwen2"}


def results_of(layer: TrainedLayer) -> list[Tensor]:
    return [layer.attention(**layer.arguments(call)).detach() for call in range(len(layer.inputs))]


def checked(layers: list[TrainedLayer]) -> None:
    for layer in layers:
        results = results_of(layer)
        layer.check(results)
        for call, y in enumerate(results):
            if len(results) == 1 or y.abs().max() > 0.5 * max(one.abs().max() for one in results):
                with pytest.raises(ModelError, match="whose own result is another"):
                    layer.check([*results[:call], y * 1.001, *results[call + 1 :]])


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_compute_what_the_model_computes(name: str) -> None:
    """Texts of several lengths without padding: what is constant becomes part of the layer."""
    model = built(name, FAMILIES[name])
    before = model.config._attn_implementation
    layers = trained_layers(model, [given(name, 1, length) for length in (11, 1, 6)])
    assert len(layers) == (1 if name in ("T5", "Whisper") else 2)
    assert [layer.attention.spec.mask for layer in layers] == [MASKS.get(name)] * len(layers)
    bands = BANDS.get(name, [("top_left" if name in CAUSAL else None, None)] * len(layers))
    assert [(layer.attention.spec.causal, layer.attention.spec.window) for layer in layers] == bands
    checked(layers)
    assert before == model.config._attn_implementation != NAME and not any(m._forward_hooks for m in model.modules())


@pytest.mark.thorough_but("T5")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("ViT", "Dinov2", "Whisper")])
def test_padding_is_a_mask_of_the_call(name: str) -> None:
    layers = trained_layers(built(name, FAMILIES[name]), [given(name, 2, 9, hidden=4), given(name, 1, 5)])
    assert {layer.attention.spec.mask for layer in layers} == {MASKS.get(name, "bool")}
    checked(layers)


@pytest.mark.thorough_but("Bert")
@pytest.mark.parametrize("name", ["Bert", "GPT2", "Gemma2", "Llama"])
def test_weights_are_the_models_own(name: str) -> None:
    """The weights are held against `output_attentions` of transformers itself, eager: nothing of ours is in that."""
    model, inputs = built(name, FAMILIES[name]), given(name, 2, 9, hidden=3)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        own = model(**inputs, output_attentions=True).attentions
        exact = built(name, FAMILIES[name]).double()
        exact.set_attn_implementation("eager")
        expected = exact(**inputs, output_attentions=True).attentions
    for layer, theirs, best in zip(trained_layers(model, [inputs]), own, expected, strict=True):
        _, ours = layer.attention.with_outputs("y", "weights")(**layer.arguments(0))
        rows = layer.rows[0][:, None].expand(2, 4, 9)
        assert ours.shape == theirs.shape == (2, 4, 9, 9)
        assert agrees(best[rows], theirs[rows], ours[rows])


def test_a_layer_that_is_called_again_is_another() -> None:
    first, second = trained_layers(built("Albert", FAMILIES["Albert"]), [given("Albert", 1, 9)])
    assert second.name == f"{first.name}, call 2" and not torch.equal(first.inputs[0], second.inputs[0])


@pytest.mark.thorough_only("Gemma3Text", "Qwen3")
@pytest.mark.parametrize("name", REFUSED)
def test_what_means_something_else_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=f"model: expected attention as in BERT.*{REFUSED[name][1]}"):
        trained_layers(built(name, REFUSED[name][0]), [given(name, 1, 9)])


def test_what_the_model_hands_down_is_seen() -> None:
    """The layer by itself is plain BERT's; with a bias that comes as the model's mask it is not, and still right."""
    model = built("Bert", FAMILIES["Bert"])
    bias = torch.randn(1, 4, 9, 9)
    inputs = given("Bert", 1, 9) | {"attention_mask": bias}
    layers = trained_layers(model, [inputs])
    assert {layer.attention.spec.mask for layer in layers} == {"additive"}
    checked(layers)


def encoder(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(24, 4, 32, **options), 2, enable_nested_tensor=False).eval()


@pytest.mark.parametrize("batch_first", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_pytorchs_own_layers(batch_first: bool) -> None:
    model, ahead = encoder(batch_first=batch_first), nn.Transformer.generate_square_subsequent_mask(9)
    x: Tensor = torch.randn(2, 9, 24)
    x = x if batch_first else x.transpose(0, 1)
    padding = torch.arange(9) >= torch.tensor([[9], [5]])
    kinds: list[tuple[dict[str, Any], tuple[str | None, str | None]]] = [
        ({}, (None, None)),
        ({"mask": ahead, "is_causal": True}, (None, "top_left")),
        ({"src_key_padding_mask": padding}, ("bool", None)),
        ({"mask": ahead.isinf(), "src_key_padding_mask": padding}, ("bool", None)),
        ({"mask": torch.randn(9, 9)}, ("additive", None)),
    ]
    for options, expected in kinds:
        layers = trained_layers(model, [{"src": x, **options}])
        assert [layer.name for layer in layers] == ["layers.0.self_attn", "layers.1.self_attn"]
        assert {(layer.attention.spec.mask, layer.attention.spec.causal) for layer in layers} == {expected}
        checked(layers)
        again = model(x, **options)
    assert again.shape == x.shape and not any(m._forward_hooks for m in model.modules())


def test_a_short_text_errs_as_all_texts_do() -> None:
    """PyTorch's own error on two tokens is a matter of chance: all texts together have one that can be held to."""
    model = encoder(batch_first=True)
    texts = [torch.randn(1, length, 24) * size for length, size in ((2, 0.1), (64, 1.0), (64, 1.0), (64, 1.0))]
    layer, _ = trained_layers(model, [{"src": text} for text in texts])
    exact = copy.deepcopy(layer.attention).double()
    expected = [exact(layer.inputs[call].double()).detach() for call in range(4)]
    results = results_of(layer)
    own = [float((y - true).abs().max()) for y, true in zip(results, expected, strict=True)]
    step = 2.0**-23 * float(expected[0].abs().max())
    assert max(own) > 2 * own[0] + step, "the short text is to be the quietest"
    moved = (expected[0] + max(own)).float()
    assert not agrees(expected[0], results[0], moved)  # by itself it would be refused
    layer.check([moved, *results[1:]])
    with pytest.raises(ModelError, match="whose own result is another"):
        layer.check([(expected[0] + 8 * max(own)).float(), *results[1:]])


@pytest.mark.parametrize("name", ["q_proj", "v_proj", "out_proj"])
def test_a_layer_of_other_weights_is_refused(name: str) -> None:
    layer, _ = trained_layers(encoder(batch_first=True), [{"src": torch.randn(1, length, 24)} for length in (2, 9, 31)])
    other = copy.deepcopy(layer.attention)
    layer.check(results_of(layer))
    with torch.no_grad():
        getattr(other, name).weight[3] *= 1.001
    with pytest.raises(ModelError, match="whose own result is another"):
        layer.check([other(**layer.arguments(call)).detach() for call in range(3)])


def test_a_decoders_cross_attention_is_left_out() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(24, 4, 32), 1).eval()
    (layer,) = trained_layers(decoder, [{"tgt": torch.randn(7, 2, 24), "memory": torch.randn(5, 2, 24)}])
    assert layer.name == "layers.0.self_attn"


def test_what_is_refused() -> None:
    with pytest.raises(ModelError, match="got a Linear, in which there is no attention"):
        trained_layers(nn.Linear(2, 2).eval(), [{"input": torch.zeros(1, 2)}])
    with pytest.raises(InputError, match="inputs: expected one or more"):
        trained_layers(encoder(), [])
    with pytest.raises(InputError, match="model: expected eval mode"):
        trained_layers(encoder().train(), [{"src": torch.zeros(1, 5, 24)}])

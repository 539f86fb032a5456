"""Attention of many families, converted from bare layers: weights, heads and results as the layer's own, in budget."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from support.attention_families import FAMILIES, REFUSED, built
from transformers import AttentionInterface

from mhsa_compile.conversion.from_transformers import from_llama, from_transformers
from mhsa_compile.errors import ModelError
from mhsa_compile.verification.error_budget import agrees


def layer_of(name: str, number: int = 0) -> Any:
    """The first module that has the output projection of attention in it."""
    model = built(name, FAMILIES[name] if name in FAMILIES else REFUSED[name][0])
    found = [m for n, m in model.named_modules() if type(m).__name__.endswith("Attention") and not n.endswith(".self")]
    return [m for m in found if type(m).__name__ != "T5LayerSelfAttention"][number]


EXPECTED: dict[str, dict[str, Any]] = {
    "Bert": {"causal": None, "bias": True, "rope": None},
    "GPT2": {"causal": "top_left", "bias": True, "rope": None},
    "Gemma2": {"window": (3, 0), "softcap": 3.0, "scale": 1 / 3, "num_kv_heads": 2},
    "Granite": {"scale": 0.37},
    "Llama": {"causal": "top_left", "window": None, "bias": False, "num_kv_heads": 2},
    "Mistral": {"window": (3, 0)},
    "Whisper": {"causal": None, "scale": 1.0},
}
TURNED = {"Cohere": (6, True), "GPTNeoX": (4, False), "Glm": (4, True), "Llama": (6, False), "Phi": (4, False)}


@pytest.mark.thorough_only("Dinov2")
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "T5"])
def test_what_a_layer_says_becomes_a_spec(name: str) -> None:
    """`from_transformers` itself holds the result against the layer's own, and would refuse it."""
    spec = from_transformers(layer_of(name)).spec
    assert {field: getattr(spec, field) for field in EXPECTED.get(name, {})} == EXPECTED.get(name, {})
    if name in TURNED:
        assert (spec.rope.rotary_dim, spec.rope.interleaved) == TURNED[name]


def test_weights_are_the_very_weights() -> None:
    gpt2, bert = layer_of("GPT2"), layer_of("Bert")
    ours = from_transformers(gpt2)
    fused = torch.cat([getattr(ours, f"{name}_proj").weight for name in "qkv"])
    assert torch.equal(fused, gpt2.c_attn.weight.T) and torch.equal(ours.out_proj.weight, gpt2.c_proj.weight.T)
    assert torch.equal(ours.k_proj.bias, gpt2.c_attn.bias[24:48])
    low = from_transformers(bert.bfloat16())
    assert low.spec.dtype == "bfloat16" and torch.equal(low.v_proj.weight, bert.self.value.weight)
    assert torch.equal(low.out_proj.bias, bert.output.dense.bias)


def test_the_layer_and_its_config_stay_as_they_were() -> None:
    layer = layer_of("Llama")
    before = layer.config._attn_implementation, set(vars(layer)), copy.deepcopy(layer.state_dict())
    from_transformers(layer)
    assert before[:2] == (layer.config._attn_implementation, set(vars(layer)))
    assert all(torch.equal(value, layer.state_dict()[name]) for name, value in before[2].items())
    assert not layer._forward_hooks and not layer._forward_pre_hooks


def test_bias_by_distance_is_a_mask() -> None:
    layer = layer_of("T5")
    with pytest.raises(ModelError, match='mask: expected "additive", got a T5Attention, which adds a bias by distance'):
        from_transformers(layer)
    ours = from_transformers(layer, mask="additive")
    x = torch.randn(2, 11, 24)
    bias = layer.compute_bias(11, 11).detach()
    exact = copy.deepcopy(ours).double()(x.double(), mask=bias.double())
    assert agrees(exact, ours(x, mask=bias), layer(x, position_bias=bias)[0])


def test_cross_attention_takes_a_context() -> None:
    from transformers import WhisperConfig, WhisperModel

    decoder = WhisperModel(WhisperConfig(**FAMILIES["Whisper"])).eval().get_decoder()
    layer = decoder.layers[0].encoder_attn
    assert from_transformers(layer).spec.kv_embed_dim is None  # by its own word it may be either
    from transformers.models.bert.modeling_bert import BertAttention, BertConfig

    crossing = BertAttention(BertConfig(hidden_size=24, num_attention_heads=4), is_cross_attention=True).eval()
    ours = from_transformers(crossing)
    assert ours.spec.kv_embed_dim == 24
    x, context = torch.randn(2, 5, 24), torch.randn(2, 9, 24)
    own = crossing(x, encoder_hidden_states=context)[0]
    made = crossing.output.LayerNorm(ours(x, context) + x)
    exact = copy.deepcopy(crossing).double()(x.double(), encoder_hidden_states=context.double())[0]
    assert agrees(exact, own, made)


@pytest.mark.parametrize("name", REFUSED)
def test_what_means_something_else_is_refused(name: str) -> None:
    layer = layer_of(name)
    with pytest.raises(ModelError, match=f"got a {type(layer).__name__}: .*{REFUSED[name][1]}"):
        from_transformers(layer)


class Clipped(nn.Module):
    """A linear layer that some models have instead: OLMo's clip_qkv, quantised ones, ..."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).clamp(-0.5, 0.5)


def test_layers_that_look_like_llamas_and_compute_something_else() -> None:
    """The names are all Llama's; only what the layer computes tells."""
    layer = layer_of("Llama")
    layer.v_proj = Clipped(layer.v_proj)
    with pytest.raises(ModelError, match="its values are no linear function"):
        from_llama(layer)
    layer = layer_of("Llama")
    layer.o_proj = nn.Sequential(layer.o_proj, nn.LayerNorm(24))
    with pytest.raises(ModelError, match="its result is no linear function"):
        from_llama(layer)
    layer = layer_of("Llama")
    layer.config.rope_parameters = layer.config.rope_parameters | {"rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ModelError, match="rope_type='dynamic'"):
        from_llama(layer)


def test_a_softmax_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def clipped(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        k, v = (one.repeat_interleave(module.num_key_value_groups, dim=1) for one in (k, v))
        weights = ((q @ k.transpose(2, 3) * scaling).clamp(max=0.1) + (0 if mask is None else mask)).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), weights

    layer = layer_of("Llama")
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", clipped)
    with pytest.raises(ModelError, match="its own result is another"):
        from_llama(layer)


def test_windows() -> None:
    layer = layer_of("Mistral")
    with pytest.raises(ModelError, match=r"its window is \(3, 0\), and window=\(9, 0\) is another"):
        from_llama(layer, window=(9, 0))
    assert from_llama(layer_of("Llama"), window=(9, 0)).spec.window == (9, 0)
    sliding = layer_of("ModernBert", 1)
    with pytest.raises(ModelError, match="says a window of 3, and not to which side"):
        from_transformers(sliding)
    assert from_transformers(sliding, window=(2, 2)).spec.window == (2, 2)


def test_threads_convert_at_the_same_time() -> None:
    layers = [layer_of(name) for name in ("Bert", "GPT2", "Llama", "Mistral")] * 3
    alone = [from_transformers(layer) for layer in layers[:4]]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(from_transformers, layers))
    for number, ours in enumerate(together):
        same = alone[number % 4]
        assert ours.spec == same.spec and torch.equal(ours.k_proj.weight, same.k_proj.weight)


def test_the_name_means_nothing_outside() -> None:
    layer = layer_of("Llama")
    from_transformers(layer)
    noted = AttentionInterface()["mhsa_noted"]
    with pytest.raises(ModelError, match="nothing outside of this process"):
        noted(layer, *[torch.zeros(1, 1, 1, 6)] * 3)

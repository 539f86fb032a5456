"""Attention modules of transformers, compiled from the modules themselves: random weights, odd numbers of heads.

What is right is the module itself in float64, on its own weights; what is allowed follows from its own error.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.bert.modeling_bert import BertAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding
from transformers.models.t5.modeling_t5 import T5Attention
from transformers.models.vit.modeling_vit import ViTAttention
from transformers.models.whisper.modeling_whisper import WhisperAttention

import mhsa_compile as mhsa
from mhsa_compile.nn.functional import to_numpy
from mhsa_compile.verification.error_budget import budget, max_error

D = 60
Inputs = dict[str, Tensor | tuple[Tensor, ...]]
pytestmark = pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")


def bert(kind: str) -> nn.Module:
    return BertAttention(transformers.BertConfig(hidden_size=D, num_attention_heads=3, attn_implementation=kind))


def gpt2(kind: str) -> nn.Module:
    return GPT2Attention(transformers.GPT2Config(n_embd=D, n_head=3, attn_implementation=kind), layer_idx=0)


def llama_config(kind: str) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        hidden_size=D, num_attention_heads=15, num_key_value_heads=5, head_dim=14, attn_implementation=kind
    )


def llama(kind: str) -> nn.Module:
    return LlamaAttention(llama_config(kind), layer_idx=0)


def vit(kind: str) -> nn.Module:
    return ViTAttention(transformers.ViTConfig(hidden_size=D, num_attention_heads=5, attn_implementation=kind))


def whisper(kind: str) -> nn.Module:
    config = transformers.WhisperConfig(d_model=D, encoder_attention_heads=3, attn_implementation=kind)
    return WhisperAttention(D, 3, config=config)


def t5(kind: str) -> nn.Module:
    config = transformers.T5Config(d_model=D, num_heads=3, d_kv=14, attn_implementation=kind)
    return T5Attention(config, has_relative_attention_bias=True)


MODELS: dict[str, Callable[[str], nn.Module]] = {
    "bert": bert, "gpt2": gpt2, "llama": llama, "vit": vit, "whisper": whisper, "t5": t5,
}  # fmt: skip
MASKS = {"bert": "attention_mask", "gpt2": "attention_mask", "llama": "attention_mask", "t5": "mask"}


def inputs(model: str, kind: str, batch: int, length: int, dtype: torch.dtype) -> Inputs:
    """What a layer is called with: with eager attention also a mask, as the models make it: causal, and the end of one
    row is padding."""
    given: Inputs = {"hidden_states": torch.randn(batch, length, D).to(dtype)}
    if model == "llama":
        rotary = LlamaRotaryEmbedding(llama_config(kind))
        given["position_embeddings"] = rotary(given["hidden_states"], torch.arange(length).expand(batch, -1))
    if kind == "eager" and model in MASKS:
        seen = torch.ones(length, length, dtype=torch.bool).tril().expand(batch, 1, -1, -1).clone()
        seen[-1, :, :, max(1, length - 2) :] = False
        given[MASKS[model]] = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
    return given


def result(module: nn.Module, given: Inputs) -> np.ndarray:
    with torch.no_grad():
        return to_numpy(module(**given)[0])


def widened(value: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return tuple(map(widened, value)) if isinstance(value, tuple) else value.double()


RUNS = [
    ("sdpa", torch.float32),
    ("eager", torch.bfloat16),
    pytest.param("eager", torch.float32, marks=pytest.mark.slow),
    pytest.param("sdpa", torch.bfloat16, marks=pytest.mark.slow),
]


@pytest.mark.thorough_but("*-eager-float32", "*-sdpa-bfloat16")
@pytest.mark.parametrize(("kind", "dtype"), RUNS, ids=lambda value: str(value).removeprefix("torch."))
@pytest.mark.parametrize("model", MODELS)
def test_compiles_from_the_module_itself(model: str, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = MODELS[model](kind).to(dtype).eval()
    for name, parameter in module.named_parameters():
        if "bias" in name:  # they begin as zeros
            nn.init.normal_(parameter, std=0.1)
    artifact = mhsa.compile(module, example_inputs=inputs(model, kind, 2, 7, dtype))
    assert [block.fused for block in artifact.manifest.attention] == [True], artifact.manifest.attention
    assert {info.name for info in artifact.manifest.weights} <= {name for name, _ in module.named_parameters()}
    attention, exact = mhsa.load(artifact), copy.deepcopy(module).double()
    for batch, length in ((3, 13), (1, 1)):
        given = inputs(model, kind, batch, length, dtype)
        expected, own = result(exact, {name: widened(value) for name, value in given.items()}), result(module, given)
        flat = {name: value for name, value in given.items() if not isinstance(value, tuple)}
        if "position_embeddings" in given:
            flat["cos"], flat["sin"] = given["position_embeddings"]
        y = to_numpy(attention(**flat))
        assert max_error(expected, y) <= budget(expected, own, str(dtype).removeprefix("torch."))

"""Tiny models of transformers that ask its attention interface, of random weights, and how a way of computing attention
is judged on them: token for token, and against the model in float64."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import torch
import transformers
from torch import Tensor, nn

from mhsa_compile.verification.error_budget import budget, max_error

VOCABULARY = 101
TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
PLAIN = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = {**PLAIN, **TOKENS, "num_key_value_heads": 2}
WINDOW = {"head_dim": 16, "sliding_window": 8}
MIXED = {**GROUPED, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
PAIR = {
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
}  # fmt: skip

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {**TOKENS, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}),
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", {**GROUPED, **WINDOW}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2", {**MIXED, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3Text", {**MIXED, "query_pre_attn_scalar": 16}),
    "gpt_oss": (  # its other experts know no float64
        "GptOss",
        {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"},
    ),
}
CAUSAL_MODELS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**PLAIN, "vocab_size": VOCABULARY}),
    "roberta": ("Roberta", {**PLAIN, "vocab_size": VOCABULARY, "pad_token_id": 1}),
    "modernbert": (
        "ModernBert",
        {**PLAIN, **TOKENS, "num_hidden_layers": 3, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    ),
}
T5 = {
    "d_model": 64, "d_kv": 16, "d_ff": 64, "num_heads": 4, "num_layers": 2, "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
WHISPER = {
    **TOKENS, **PAIR, "max_source_positions": 20, "max_target_positions": 60, "num_mel_bins": 8,
    "decoder_start_token_id": 1,
}  # fmt: skip
VIT = {**{k: v for k, v in PLAIN.items() if k != "max_position_embeddings"}, "image_size": 32, "patch_size": 8}


def built(config: str, model: str, fields: dict[str, Any]) -> Any:
    """The model in eval mode, with weights that make attention matter."""
    torch.manual_seed(0)
    network = getattr(transformers, model)(getattr(transformers, f"{config}Config")(**fields)).eval()
    sharpen(network)
    return network


def sharpen(model: nn.Module) -> None:
    """Draws weights that make attention matter: with those that a model begins with, all keys weigh about the same."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name:
            nn.init.normal_(parameter, std=0.2)
        elif "bias" in name or "sinks" in name:
            nn.init.normal_(parameter, std=0.3)


def decoder(name: str) -> Any:
    config, fields = DECODERS[name]
    return built(config, CAUSAL_MODELS.get(config, f"{config}ForCausalLM"), fields)


def encoder(name: str) -> Any:
    config, fields = ENCODERS[name]
    return built(config, f"{config}Model", fields)


def prompts(batch: int, length: int, hidden: int = 0) -> dict[str, Tensor]:
    """Token ids, and a mask that hides the first `hidden` of the last row."""
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    mask[-1, :hidden] = 0
    return {"input_ids": ids, "attention_mask": mask}


def share_of_budget(model: Any, run: Callable[[Any], Tensor]) -> float:
    """The largest error of `run(model)` on "mhsa", as a share of what eager attention's own error allows."""
    with torch.no_grad():
        model.set_attn_implementation("eager")
        exact, own = run(copy.deepcopy(model).double()).numpy(), run(model).numpy()
        model.set_attn_implementation("mhsa")
        return max_error(exact, run(model).numpy()) / budget(exact, own, str(own.dtype))


def generated(model: Any, inputs: dict[str, Tensor], kind: str, **options: Any) -> Tensor:
    """Ten tokens by greedy search with attention of that kind."""
    model.set_attn_implementation(kind)
    return ten_tokens(model, inputs, **options)


def ten_tokens(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    """What ten steps of greedy search give: their tokens, behind those of `inputs`."""
    with torch.no_grad():
        tokens: Tensor = model.generate(**inputs, max_new_tokens=10, min_new_tokens=10, do_sample=False, **options)
    return tokens


CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
}

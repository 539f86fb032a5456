"""Tiny models of transformers of many families, with random weights: what conversion of their attention is tried on."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 53
SIZES = {
    "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32,
    "max_position_embeddings": 64,
}  # fmt: skip
TEXT = {**SIZES, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
GROUPED = {**TEXT, "num_key_value_heads": 2}
WINDOW = {"head_dim": 6, "sliding_window": 4}
PAIR = {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32,
}  # fmt: skip
IMAGE = {
    "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "Albert": {**TEXT, "embedding_size": 16},
    "Bert": TEXT,
    "Cohere": GROUPED,
    "Dinov2": IMAGE,
    "DistilBert": {"dim": 24, "n_heads": 4, "n_layers": 2, "hidden_dim": 32, "vocab_size": VOCABULARY},
    "Electra": {**TEXT, "embedding_size": 16},
    "GPT2": {"vocab_size": VOCABULARY, "n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "GPTNeoX": {**TEXT, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.67}},
    "Gemma": {**GROUPED, "head_dim": 10},
    "Gemma2": {
        **GROUPED, **WINDOW, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 3.0,
    },
    "Glm": {**GROUPED, "head_dim": 8},
    "Granite": {**GROUPED, "attention_multiplier": 0.37},
    "Llama": GROUPED,
    "Mistral": {**GROUPED, **WINDOW},
    "ModernBert": {**TEXT, "num_hidden_layers": 2, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 4},
    "OPT": {**TEXT, "ffn_dim": 32, "word_embed_proj_dim": 24},
    "Phi": {**TEXT, "num_attention_heads": 3},
    "Qwen2": GROUPED,
    "Roberta": TEXT,
    "T5": {"d_model": 24, "d_kv": 5, "d_ff": 32, "num_heads": 4, "num_layers": 1, "vocab_size": VOCABULARY},
    "ViT": IMAGE,
    "Whisper": {
        **PAIR, "vocab_size": VOCABULARY, "pad_token_id": 0, "decoder_start_token_id": 1, "max_source_positions": 20,
        "num_mel_bins": 8,
    },
}  # fmt: skip
"""Families whose attention can be said by an AttentionSpec."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "Bloom": ({"vocab_size": VOCABULARY, "hidden_size": 24, "n_head": 4, "n_layer": 1}, "computes"),
    "Deberta": ({**TEXT, "relative_attention": True, "pos_att_type": ["c2p"]}, "computes"),
    "Gemma3Text": ({**GROUPED, **WINDOW}, r"queries are no linear function.*q_norm \(Gemma3RMSNorm\)"),
    "Olmo2": (GROUPED, r"queries are no linear function.*q_norm \(Olmo2RMSNorm\)"),
    "Qwen3": ({**GROUPED, "head_dim": 6}, r"queries are no linear function.*q_norm \(Qwen3RMSNorm\)"),
}
"""Families whose attention cannot be said by an AttentionSpec, and what the error says."""


def built(name: str, fields: dict[str, Any]) -> Any:
    """The family's model in eval mode, with weights that make attention matter; of two parts the encoder."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**fields)).eval().float()
    for parameter_name, parameter in model.named_parameters():
        if (parameter.ndim > 1 and "embed" not in parameter_name) or "bias" in parameter_name:
            nn.init.normal_(parameter, std=0.3)
    return model.get_encoder() if model.config.is_encoder_decoder else model


def given(name: str, batch: int, length: int, hidden: int = 0) -> dict[str, Tensor]:
    """What a model is called with; the last `hidden` tokens of the last row are padding."""
    numbers = torch.Generator().manual_seed(length)
    if name in ("ViT", "Dinov2"):
        return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=numbers)}
    if name == "Whisper":
        return {"input_features": torch.randn(batch, 8, 40, generator=numbers)}
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=numbers)
    mask = torch.ones_like(ids)
    mask[-1, length - hidden :] = 0
    return {"input_ids": ids, "attention_mask": mask}

"""A small Llama, and the .gguf file that llama.cpp's converter would make of it, in several types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

TYPES = {"q_proj": "Q4_0", "k_proj": "Q4_0", "v_proj": "Q8_0", "o_proj": "Q4_0", "gate_proj": "Q4_K", "up_proj": "Q4_K",
         "down_proj": "Q6_K", "lm_head": "Q8_0", "embed_tokens": "Q8_0"}  # fmt: skip
HEADS = 4


def llama(tied: bool = False) -> Any:
    """One layer, 256 wide, whose weights are those of `write_gguf`'s file once that ran."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, vocab_size=320, tie_word_embeddings=tied, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def write_gguf(model: Any, file: Path) -> None:
    """Writes the model in `TYPES`, and gives it the weights that the package reads out of these."""
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{i}>" for i in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([1] * config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for place, parameter in model.named_parameters():
        layer = place.removesuffix(".weight")
        name, part = names.get_name(layer), layer.rpartition(".")[2]
        assert name is not None
        if part not in TYPES:
            writer.add_tensor(f"{name}.weight", parameter.detach().numpy())
            continue
        kind = gguf.GGMLQuantizationType[TYPES[part]]
        interleaved = part in ("q_proj", "k_proj")
        rows = _rows(parameter, kind, interleaved)
        writer.add_tensor(f"{name}.weight", rows, raw_dtype=kind)
        stored = gguf.dequantize(rows, kind)
        parameter.data = torch.from_numpy(_halves(stored) if interleaved else stored)
    model.tie_weights()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _rows(parameter: nn.Parameter, kind: Any, interleaved: bool) -> np.ndarray:
    """The rows of a weight in a type, as bytes; any numbers where the package only reads it."""
    import gguf

    weight = parameter.detach().numpy()
    if interleaved:  # the rows of both halves of a head in turns
        weight = weight.reshape(HEADS, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    if kind.name in ("Q4_0", "Q8_0"):
        rows: np.ndarray = gguf.quantize(np.ascontiguousarray(weight), kind)
        return rows
    terms, size = gguf.GGML_QUANT_SIZES[kind]
    drawn = np.random.default_rng(0)
    blocks = drawn.integers(0, 256, (len(weight), weight.shape[1] // terms, size), dtype=np.uint8)
    scale = np.array([2e-4 if kind.name == "Q4_K" else 3e-6], np.float16).view(np.uint8)
    if kind.name == "Q4_K":
        blocks[..., :4] = np.concatenate([scale, np.array([1.5e-3], np.float16).view(np.uint8)])
    else:
        blocks[..., -2:] = scale
    return blocks.reshape(len(weight), -1)


def _halves(weight: np.ndarray) -> np.ndarray:
    """Rows as transformers has them, where llama.cpp has those of both halves of a head in turns."""
    return np.ascontiguousarray(weight.reshape(HEADS, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape))

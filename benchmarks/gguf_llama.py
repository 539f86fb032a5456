"""A Llama of transformers as a GGUF file, which llama.cpp reads: weights in one of its types, norms in float32."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

_LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_TYPES = {"float32": Type.F32, "bfloat16": Type.BF16, "q8_0": Type.Q8_0, "q4_0": Type.Q4_0}
_OF_TABLE = {Type.Q4_0: Type.Q8_0}
"""What llama.cpp's own quantiser stores the head as, which is the table of embeddings here, beside four bits."""


def write_gguf(path: Path, weights: Mapping[str, np.ndarray], config: Any, kind: str) -> None:
    """Writes transformers' weights of a LlamaConfig; `kind` is float32, bfloat16, q8_0 or q4_0."""
    stored = _TYPES[kind]
    writer = gguf.GGUFWriter(str(path), "llama")
    _write_words(writer, config)

    def add(name: str, array: np.ndarray, type_: Type) -> None:
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), type_), raw_dtype=type_)

    add("token_embd.weight", weights["model.embed_tokens.weight"], _OF_TABLE.get(stored, stored))
    add("output_norm.weight", weights["model.norm.weight"], Type.F32)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for layer in range(config.num_hidden_layers):
        theirs, own = f"model.layers.{layer}", f"blk.{layer}"
        add(f"{own}.attn_norm.weight", weights[f"{theirs}.input_layernorm.weight"], Type.F32)
        add(f"{own}.ffn_norm.weight", weights[f"{theirs}.post_attention_layernorm.weight"], Type.F32)
        for linear, name in _LINEARS.items():
            array = weights[f"{theirs}.{linear}.weight"]
            add(f"{own}.{name}.weight", _neighbours(array, heads[name]) if name in heads else array, stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_words(writer: Any, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")


def _neighbours(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows of W_Q or W_K in the order of llama.cpp, which rotates neighbours where transformers rotates halves."""
    halves = array.reshape(heads, 2, -1, array.shape[1])
    return halves.swapaxes(1, 2).reshape(array.shape)

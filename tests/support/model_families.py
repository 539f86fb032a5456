"""Families of transformers, each as a tiny model of random weights: what `campaigns/models.py` and the tests compile.

A family is a whole model, or its attention module alone where the rest chooses experts; that module is given what the
model around it gives it. Nothing is downloaded.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import mhsa_compile as mhsa
from mhsa_compile.frontend.export.export import export
from mhsa_compile.frontend.export.module_calls import TensorModule
from mhsa_compile.frontend.export.nested_values import NestedArguments, taken_apart
from mhsa_compile.runtime.artifact.manifest import AttentionCoverage
from mhsa_compile.verification.error_budget import budget, max_error
from support.cpu_time import cpu_seconds

VOCABULARY = 101
EXPORTED, UNSEEN = (2, 7), ((3, 13), (1, 5))
"""(batch, length) of the example, and of the calls that are judged."""
CALLS = 3
Inputs = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """`model` of `config` with `fields`; `part`: the submodule that is compiled, "" for the whole.

    `free`: input -> {axis: symbol} where that is not what `export` takes for granted; `refused`: with what words, where
    there is a reason that is no fault of ours. `generates`: the class that generates tokens, if one does.
    """

    config: str
    model: str
    inputs: Callable[[int, int], Inputs]
    fields: dict[str, Any]
    part: str = ""
    free: dict[str, dict[int, str]] | None = None
    refused: str = ""
    generates: str = ""

    def build(self, kind: str) -> nn.Module:
        """The model with attention of that kind, "eager" or "sdpa". Raises ValueError where the model knows no such
        kind."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(attn_implementation=kind, **self.fields)
        model: nn.Module = getattr(transformers, self.model)(config).eval()
        for name, parameter in model.named_parameters():
            if "bias" in name:  # they begin as zeros
                nn.init.normal_(parameter, std=0.1)
        return model


@dataclass(frozen=True)
class Outcome:
    """What became of the attentions, the largest error as a share of its budget, and the CPU seconds of compiling."""

    blocks: tuple[AttentionCoverage, ...]
    worst: float
    seconds: float


class Held(nn.Module):
    """A module with arguments that are no tensors, as its model hands them over."""

    def __init__(self, module: nn.Module, state: Inputs) -> None:
        super().__init__()
        self.module, self.held = module, state

    def forward(self, **inputs: Any) -> Tensor:
        result: Tensor = self.module(**inputs, **copy.copy(self.held))[0]
        return result


def run(family: Family, kind: str, threads: int = 2) -> Outcome:
    """Compiles with free batch and length, and holds calls at sizes never exported against the module in float64."""
    model = family.build(kind)
    module, examples = _subject(family, model, EXPORTED)
    began = cpu_seconds()
    artifact = mhsa.compile(export(module, example_inputs=examples, dynamic_shapes=family.free))
    seconds = cpu_seconds() - began
    compiled, exact, worst = mhsa.load(artifact, threads=threads), copy.deepcopy(module).double(), 0.0
    for sizes in UNSEEN:
        inputs, nested = taken_apart(module, _subject(family, model, sizes)[1])
        wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
        expected, own = _results(exact, wide, nested), _results(module, inputs, nested)
        for _ in range(CALLS):
            results = compiled(**{name: value.numpy() for name, value in inputs.items()})
            results = results if isinstance(results, tuple) else (results,)
            for truth, yardstick, result in zip(expected, own, results, strict=True):
                worst = max(worst, max_error(truth, result) / budget(truth, yardstick, str(yardstick.dtype)))
    return Outcome(artifact.manifest.attention, worst, seconds)


def _subject(family: Family, model: nn.Module, sizes: tuple[int, int]) -> tuple[nn.Module, Inputs]:
    """What is compiled, and its inputs at these sizes."""
    torch.manual_seed(sum(sizes))
    inputs = family.inputs(*sizes)
    if not family.part:
        return model, inputs
    arguments: Inputs = {}
    module = model.get_submodule(family.part)
    hook = module.register_forward_pre_hook(lambda _, positional, named: arguments.update(named), with_kwargs=True)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor | tuple)}
    tensors.pop("position_ids", None)  # which nothing reads
    state = {name: value for name, value in arguments.items() if name == "shared_kv_states"}
    return (Held(module, state) if state else module), tensors


def _results(module: nn.Module, inputs: dict[str, Tensor], nested: NestedArguments) -> list[np.ndarray]:
    with torch.no_grad():
        return [value.numpy() for value in TensorModule(module, nested)(inputs)]


def ids(batch: int, length: int) -> Inputs:
    """Token ids, and a mask that hides the end of the last row."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[-1, length - 2 :] = 0  # in every batch: a mask that hides nothing is none to some models
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, length)), "attention_mask": mask}


def ids_alone(batch: int, length: int) -> Inputs:
    return {"input_ids": torch.randint(0, VOCABULARY, (batch, length))}


def two_sequences(batch: int, length: int) -> Inputs:
    decoder = torch.randint(0, VOCABULARY, (batch, length + 1))
    return ids(batch, length) | {"decoder_input_ids": decoder}


def pixels(batch: int, length: int) -> Inputs:
    """Random images, whose number of patches is the model's."""
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def sound(batch: int, length: int) -> Inputs:
    """Random sound, whose number of frames is the model's, and a text, whose length is free."""
    return {"input_features": torch.randn(batch, 8, 40), "decoder_input_ids": ids(batch, length)["input_ids"]}


TOKENS = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
DECODER = {**TOKENS, "use_cache": False}
PLAIN = {
    "hidden_size": 60, "intermediate_size": 70, "num_hidden_layers": 2, "num_attention_heads": 3,
    "max_position_embeddings": 64,
}  # fmt: skip
ENCODER = {**PLAIN, "vocab_size": VOCABULARY}
GROUPED = {**PLAIN, **DECODER, "num_attention_heads": 6, "num_key_value_heads": 2}
WINDOW = {"head_dim": 10, "sliding_window": 4}
EXPERTS = {
    **GROUPED, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_local_experts": 4,
    "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    **GROUPED, "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12, "v_head_dim": 10, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
GEMMA3N = {
    **GROUPED, **WINDOW, "intermediate_size": [70, 70], "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"], "vocab_size_per_layer_input": VOCABULARY,
    "laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0],
}  # fmt: skip
GPT2 = {**DECODER, "n_embd": 60, "n_head": 3, "n_layer": 2, "n_positions": 64}
IMAGES = {"pixel_values": {0: "B"}}
IMAGE = {**{k: v for k, v in PLAIN.items() if k != "max_position_embeddings"}, "image_size": 32, "patch_size": 8}
PAIR = {
    **DECODER, "d_model": 60, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 70, "decoder_ffn_dim": 70,
}  # fmt: skip
ATTENTION = "layers.0.self_attn"


def _same(name: str, fields: dict[str, Any], **more: Any) -> Family:
    """A family whose model is called after its config."""
    return Family(f"{name}Config", f"{name}Model", ids, {**fields, **more})


def _decoder(name: str, fields: dict[str, Any], part: str = "", **more: Any) -> Family:
    """A family whose model and class for generating are called after its config."""
    return Family(f"{name}Config", f"{name}Model", ids, {**fields, **more}, part, generates=f"{name}ForCausalLM")


FAMILIES = {
    "gpt2": Family("GPT2Config", "GPT2Model", ids, GPT2, generates="GPT2LMHeadModel"),
    "gpt2, no mask": Family("GPT2Config", "GPT2Model", ids_alone, GPT2, generates="GPT2LMHeadModel"),
    "whisper": Family(
        "WhisperConfig", "WhisperModel", sound,
        {**PAIR, "max_source_positions": 20, "max_target_positions": 30, "num_mel_bins": 8,
         "decoder_start_token_id": 1},
        free={"input_features": {0: "B"}, "decoder_input_ids": {0: "B", 1: "L"}},
        generates="WhisperForConditionalGeneration",
    ),
    "deberta_v2": Family(
        "DebertaV2Config", "DebertaV2Model", ids,
        {**ENCODER, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 16,
         "norm_rel_ebd": "layer_norm", "share_att_key": True},
    ),
    "mpt": Family(
        "MptConfig", "MptModel", ids,
        {"d_model": 60, "n_heads": 3, "n_layers": 2, "max_seq_len": 64, "vocab_size": VOCABULARY, "use_cache": False},
        generates="MptForCausalLM",
    ),
    "bloom": _decoder("Bloom", DECODER, hidden_size=60, n_head=3, n_layer=2),
    "falcon": _decoder("Falcon", {**PLAIN, **DECODER}),
    "falcon, alibi": _decoder("Falcon", {**PLAIN, **DECODER}, hidden_size=64, num_attention_heads=4, alibi=True),
    "bert": _same("Bert", ENCODER),
    "roberta": _same("Roberta", ENCODER, pad_token_id=1),
    "mixtral": _decoder("Mixtral", {**EXPERTS, "sliding_window": 4}, ATTENTION),
    "deepseek_v3": _decoder("DeepseekV3", LATENT, ATTENTION),
    "llama4": Family(
        "Llama4TextConfig", "Llama4TextModel", ids,
        {**EXPERTS, "head_dim": 10, "intermediate_size_mlp": 70, "attention_chunk_size": 4}, ATTENTION,
        refused="position_embeddings: expected real numbers", generates="Llama4ForCausalLM",
    ),
    "cohere2": _decoder("Cohere2", {**GROUPED, **WINDOW}),
    "gemma3n, window": Family(
        "Gemma3nTextConfig", "Gemma3nTextModel", ids, GEMMA3N, ATTENTION, generates="Gemma3nForCausalLM"
    ),
    "gemma3n, full": Family(
        "Gemma3nTextConfig", "Gemma3nTextModel", ids, GEMMA3N, "layers.1.self_attn", generates="Gemma3nForCausalLM"
    ),
    "gpt_oss": _decoder("GptOss", {**EXPERTS, **WINDOW}, ATTENTION),
    "mistral": _decoder("Mistral", {**GROUPED, **WINDOW}),
    "qwen2": _decoder("Qwen2", GROUPED),
    "qwen3": _decoder("Qwen3", GROUPED),
    "qwen3_moe": _decoder(
        "Qwen3Moe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, ATTENTION
    ),
    "olmo2": _decoder("Olmo2", GROUPED),
    "phi3": _decoder("Phi3", GROUPED),
    "stablelm": _decoder("StableLm", GROUPED),
    "gpt_neox": _decoder("GPTNeoX", {**PLAIN, **DECODER}),
    "gptj": _decoder("GPTJ", GPT2, rotary_dim=8),
    "opt": _decoder("OPT", {**PLAIN, **DECODER}, ffn_dim=70, word_embed_proj_dim=60),
    "t5": Family(
        "T5Config", "T5Model", two_sequences,
        {"d_model": 60, "d_kv": 14, "d_ff": 70, "num_heads": 3, "num_layers": 1, "vocab_size": VOCABULARY,
         "use_cache": False, "decoder_start_token_id": 0},
        generates="T5ForConditionalGeneration",
    ),
    "bart": Family(
        "BartConfig", "BartModel", two_sequences, {**PAIR, "max_position_embeddings": 64},
        generates="BartForConditionalGeneration",
    ),
    "granite": _decoder("Granite", GROUPED),
    "gemma2": _decoder("Gemma2", {**GROUPED, **WINDOW}),
    "gemma3": Family(
        "Gemma3TextConfig", "Gemma3TextModel", ids,
        {**GROUPED, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]}, generates="Gemma3ForCausalLM",
    ),
    "nemotron": _decoder("Nemotron", GROUPED),
    "llama": _decoder("Llama", GROUPED),
    "modernbert": Family(
        "ModernBertConfig", "ModernBertModel", ids,
        {**ENCODER, **TOKENS, "num_hidden_layers": 3, "cls_token_id": 1, "sep_token_id": 2, "local_attention": 8},
    ),
    "electra": _same("Electra", ENCODER, embedding_size=30),
    "vit": Family("ViTConfig", "ViTModel", pixels, IMAGE, free=IMAGES),
    "clip, text": Family("CLIPTextConfig", "CLIPTextModel", ids, {**PLAIN, **TOKENS}),
    "clip, vision": Family("CLIPVisionConfig", "CLIPVisionModel", pixels, IMAGE, free=IMAGES),
    "siglip, vision": Family("SiglipVisionConfig", "SiglipVisionModel", pixels, IMAGE, free=IMAGES),
}  # fmt: skip

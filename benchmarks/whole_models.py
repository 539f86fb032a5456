"""Whole models of transformers, of their real sizes and with random weights, and what each is called with."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported

import numpy as np
import torch
import transformers
from torch import Tensor, nn

Arrays = dict[str, np.ndarray]
OPSET = 18


@dataclass(frozen=True)
class Model:
    """A model and its inputs.

    build      the module, by how attention is computed ("eager" or "sdpa") and how many layers it has (None: all)
    draw       inputs, by name, in the order of `forward`
    optimizer  what ONNX Runtime's transformer optimizer calls it, and its heads and width; None where it has no word
    """

    build: Callable[[str, int | None], nn.Module]
    draw: Callable[[np.random.Generator], Arrays]
    optimizer: tuple[str, int, int] | None = None

    def inputs(self, seed: int) -> Arrays:
        return self.draw(np.random.default_rng(seed))


class _Called(nn.Module):
    """A model called by the names of its inputs; its last hidden state."""

    def __init__(self, model: nn.Module, names: tuple[str, ...], **more: Any) -> None:
        super().__init__()
        self.model, self.names, self.more = model.eval(), names, more

    def forward(self, *tensors: Tensor) -> Tensor:
        state: Tensor = self.model(**dict(zip(self.names, tensors, strict=True)), **self.more).last_hidden_state
        return state


class _Step(nn.Module):
    """GPT-2 on one token more: its keys and values of all tokens before are inputs."""

    def __init__(self, model: Any, layers: int) -> None:
        super().__init__()
        self.model, self.layers = model.eval(), layers

    def forward(self, input_ids: Tensor, *past: Tensor) -> Tensor:
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache()
        for layer in range(self.layers):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        state: Tensor = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True).last_hidden_state
        return state


def _made(kind: str, attention: str, layers: int | None, layers_field: str = "num_hidden_layers", **fields: Any) -> Any:
    """A model of transformers by the name of its class, with random weights."""
    config_class = getattr(transformers, kind).config_class
    config = config_class(**fields | ({} if layers is None else {layers_field: layers}))
    torch.manual_seed(0)
    return getattr(transformers, kind)._from_config(config, attn_implementation=attention)


def _encoder(kind: str, **fields: Any) -> Callable[[str, int | None], nn.Module]:
    names = ("input_ids", "attention_mask")
    return lambda attention, layers: _Called(_made(kind, attention, layers, **fields), names)


def _tokens(length: int, vocabulary: int, *, masked: bool = True) -> Callable[[np.random.Generator], Arrays]:
    def draw(rng: np.random.Generator) -> Arrays:
        ids = rng.integers(0, vocabulary, (1, length))
        return {"input_ids": ids} | ({"attention_mask": np.ones_like(ids)} if masked else {})

    return draw


def _floats(name: str, *shape: int) -> Callable[[np.random.Generator], Arrays]:
    return lambda rng: {name: rng.standard_normal(shape, np.float32)}


def _gpt2(attention: str, layers: int | None) -> nn.Module:
    return _Called(_made("GPT2Model", attention, layers), ("input_ids",), use_cache=False)


def _gpt2_step(attention: str, layers: int | None) -> nn.Module:
    return _Step(_made("GPT2Model", attention, layers), layers or 12)


def _step_inputs(rng: np.random.Generator) -> Arrays:
    past = {f"past_{i}": rng.standard_normal((1, 12, 256, 64), np.float32) for i in range(24)}
    return {"input_ids": rng.integers(0, 50257, (1, 1))} | past


def _vit(attention: str, layers: int | None) -> nn.Module:
    return _Called(_made("ViTModel", attention, layers, add_pooling=False), ("pixel_values",))


def _whisper(attention: str, layers: int | None) -> nn.Module:
    sizes = {"d_model": 384, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536, "decoder_layers": 1}
    whole = _made("WhisperModel", attention, layers or 4, "encoder_layers", **sizes)
    return _Called(whole.encoder, ("input_features",))


def _t5(attention: str, layers: int | None) -> nn.Module:
    """A T5 with random weights. SDPA is eager here: T5's does not export (a view of strides that do not fit)."""
    attention = "eager" if attention == "sdpa" else attention
    encoder = _made("T5EncoderModel", attention, layers or 6, "num_layers", d_kv=64, d_ff=2048, num_heads=8)
    return _Called(encoder, ("input_ids", "attention_mask"))


_MINILM = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}

MODELS: dict[str, Model] = {
    "minilm": Model(_encoder("BertModel", **_MINILM), _tokens(128, 30522), ("bert", 12, 384)),
    "bert": Model(_encoder("BertModel"), _tokens(128, 30522), ("bert", 12, 768)),
    "distilbert": Model(_encoder("DistilBertModel"), _tokens(128, 30522), ("bert", 12, 768)),
    "gpt2-prefill": Model(_gpt2, _tokens(256, 50257, masked=False), ("gpt2", 12, 768)),
    "gpt2-step": Model(_gpt2_step, _step_inputs, ("gpt2", 12, 768)),
    "vit": Model(_vit, _floats("pixel_values", 1, 3, 224, 224), ("vit", 12, 768)),
    "whisper": Model(_whisper, _floats("input_features", 1, 80, 3000), ("bart", 6, 384)),
    "t5": Model(_t5, _tokens(128, 32128), ("t5", 8, 512)),
    "clip-text": Model(_encoder("CLIPTextModel"), _tokens(77, 49408), ("clip", 8, 512)),
}


def export(module: nn.Module, inputs: Arrays, path: Path) -> None:
    """Writes a module as an ONNX file; sizes are those of the inputs."""
    tensors = tuple(map(torch.from_numpy, inputs.values()))
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, tensors, input_names=list(inputs), output_names=["y"], opset_version=OPSET, dynamo=True,
            verbose=False,
        )  # fmt: skip
        assert program is not None
        program.save(path, external_data=True)

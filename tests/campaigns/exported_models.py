"""Small models of transformers, one layer of random weights each, as files of PyTorch's two exporters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

WORDS, WIDTH, HEADS = 97, 64, 4
KINDS = {"whisper": "bart", "whisper decoder": "bart", "t5 decoder": "t5", "distilbert": "bert", "clip vision": "vit"}
"""What ONNX Runtime's optimiser calls a model, where it is not the first word of its name here."""

Feeds = dict[str, np.ndarray]


class Encoder(nn.Module):
    """A model that gives its last hidden state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.model(*inputs).last_hidden_state


class Prompt(Encoder):
    """A decoder of a prompt, without a past."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state


class CrossDecoder(Encoder):
    """A decoder without a past, over the rows of an encoder."""

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        return self.model(input_ids=ids, encoder_hidden_states=rows, use_cache=False).last_hidden_state


class Decoder(nn.Module):
    """A decoder of one layer with a past and a mask over past and new keys."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()

    def forward(self, ids: Tensor, mask: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cache = transformers.DynamicCache()
        cache.update(key, value, 0)
        result = self.model(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True)
        (layer,) = result.past_key_values.layers
        return result.logits, layer.keys, layer.values


def texts(rng: np.random.Generator, batch: int, length: int) -> Feeds:
    mask = np.ones((batch, length), np.int64)
    mask[0, length // 2 + 1 :] = 0
    return {"ids": rng.integers(0, WORDS, (batch, length)), "mask": mask}


def floats(name: str, *dims: int) -> Callable[[np.random.Generator, int, int], Feeds]:
    return lambda rng, batch, _: {name: rng.standard_normal((batch, *dims)).astype(np.float32)}


def steps(groups: int) -> Callable[[np.random.Generator, int, int], Feeds]:
    def feeds(rng: np.random.Generator, batch: int, length: int) -> Feeds:
        past = {n: rng.standard_normal((batch, groups, 5, WIDTH // HEADS)).astype(np.float32) for n in ("key", "value")}
        mask = np.ones((batch, 5 + length), np.int64)
        mask[0, :2] = 0
        return {"ids": rng.integers(0, WORDS, (batch, length)), "mask": mask, **past}

    return feeds


def crossed(rng: np.random.Generator, batch: int, length: int) -> Feeds:
    rows = rng.standard_normal((batch, 6, WIDTH)).astype(np.float32)
    return {"ids": rng.integers(0, WORDS, (batch, length)), "rows": rows}


def models() -> dict[str, tuple[nn.Module, Callable[..., Feeds]]]:
    torch.manual_seed(0)
    whisper = transformers.models.whisper.modeling_whisper.WhisperEncoder
    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    layer = {**sizes, "intermediate_size": 4 * WIDTH, "initializer_range": 0.2, "attn_implementation": "eager"}
    vit = {**layer, "image_size": 32, "patch_size": 8}
    llama = {**layer, "num_key_value_heads": 2, "max_position_embeddings": 128}
    gpt2 = {"n_embd": WIDTH, "n_layer": 1, "n_head": HEADS, "n_positions": 128, "attn_implementation": "eager"}
    sounds = {"d_model": WIDTH, "encoder_layers": 1, "encoder_attention_heads": HEADS, "num_mel_bins": 20}
    clip = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS}
    clip |= {"intermediate_size": 4 * WIDTH, "max_position_embeddings": 64, "attn_implementation": "eager"}
    t5 = {"vocab_size": WORDS, "d_model": WIDTH, "d_kv": 16, "num_layers": 1, "num_heads": HEADS, "d_ff": 4 * WIDTH}
    t5["attn_implementation"] = "eager"
    spoken = {**sounds, "vocab_size": WORDS, "decoder_layers": 1, "decoder_attention_heads": HEADS}
    spoken |= {"max_source_positions": 50, "max_target_positions": 64, "attn_implementation": "eager"}
    pictures = {**clip, "image_size": 32, "patch_size": 8}
    distilled = {"vocab_size": WORDS, "dim": WIDTH, "n_layers": 1, "n_heads": HEADS, "hidden_dim": 4 * WIDTH}
    distilled["attn_implementation"] = "eager"
    tf = transformers
    return {
        "bert": (Encoder(tf.BertModel(tf.BertConfig(**layer))), texts),
        "vit": (Encoder(tf.ViTModel(tf.ViTConfig(**vit))), floats("pixels", 3, 32, 32)),
        "whisper": (
            Encoder(whisper(tf.WhisperConfig(**sounds, max_source_positions=50, attn_implementation="eager"))),
            floats("features", 20, 100),
        ),
        "t5": (Encoder(tf.T5EncoderModel(tf.T5Config(**t5))), texts),
        "t5 decoder": (
            CrossDecoder(tf.T5ForConditionalGeneration(tf.T5Config(**t5, num_decoder_layers=1)).get_decoder()),
            crossed,
        ),
        "whisper decoder": (
            CrossDecoder(
                transformers.models.whisper.modeling_whisper.WhisperDecoder(
                    tf.WhisperConfig(**spoken, pad_token_id=0, bos_token_id=1, eos_token_id=2)
                )
            ),
            crossed,
        ),
        "distilbert": (Encoder(tf.DistilBertModel(tf.DistilBertConfig(**distilled))), texts),
        "clip vision": (Encoder(tf.CLIPVisionModel(tf.CLIPVisionConfig(**pictures))), floats("pixels", 3, 32, 32)),
        "clip": (Encoder(tf.CLIPTextModel(tf.CLIPTextConfig(**clip))), texts),
        "gpt2 prompt": (Prompt(tf.GPT2Model(tf.GPT2Config(vocab_size=WORDS, use_cache=False, **gpt2))), texts),
        "gpt2": (Decoder(tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=WORDS, **gpt2))), steps(HEADS)),
        "llama": (Decoder(tf.LlamaForCausalLM(tf.LlamaConfig(**llama))), steps(2)),
    }


EXPORTS = ("dynamo 18", "torchscript 17", "dynamo 23", "torchscript 13", "dynamo 21")


def export(model: nn.Module, feeds: Feeds, path: Path, how: str = "dynamo 18") -> None:
    """The model as a file by one of PyTorch's exporters, in an opset, with free batches and lengths."""
    model.eval()  # which TorchScript's exporter puts back
    exporter, opset = how.split()
    free = {"ids": (0, 1), "mask": (0, 1), "key": (0, 2), "value": (0, 2), "rows": (0, 1)}
    tensors = tuple(map(torch.from_numpy, feeds.values()))
    words: dict[str, Any] = {"opset_version": int(opset), "verbose": False, "input_names": list(feeds)}
    if exporter == "torchscript":
        axes = {name: {axis: f"{name}_{axis}" for axis in free.get(name, (0,))} for name in feeds}
        torch.onnx.export(model, tensors, path, dynamo=False, dynamic_axes=axes, **words)
        return
    dims = {name: dict.fromkeys(free.get(name, (0,)), torch.export.Dim.DYNAMIC) for name in feeds}
    of_any_number = isinstance(model, Encoder) and not isinstance(model, CrossDecoder | Prompt)
    shapes = (tuple(dims.values()),) if of_any_number else tuple(dims.values())
    torch.onnx.export(model, tensors, path, dynamo=True, dynamic_shapes=shapes, external_data=False, **words)

"""Compiles a BERT that embeds sentences, whole: `python -m minilm.compile_model FOLDER`, PyTorch's side of the apps.

It writes what `encoder.py` beside it loads without PyTorch: `sentences.mhsa`, which takes padded batches, `pairs.mhsa`,
which gives the attention of every head of every layer for a query and a passage, and the tokenizer.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn
from transformers import BertModel

import mhsa_compile as mhsa
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.runtime.artifact.artifact import Artifact
from minilm.encoder import PAIRS, SENTENCES, TOKENIZER
from minilm.trained import load_reference, model_folder, sentence_vectors

LENGTH = torch.export.Dim("length", max=512)
BATCH = torch.export.Dim("batch")
Say = Callable[[str], None]


class Sentences(nn.Module):
    """ids (B, L) int64, valid (B, L) int64: 1 takes part -> (B, D), each of length 1."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.bert = bert

    def forward(self, ids: Tensor, valid: Tensor) -> Tensor:
        return sentence_vectors(self.bert(input_ids=ids, attention_mask=valid).last_hidden_state, valid)


class Pairs(nn.Module):
    """ids (1, L) int64, types (1, L) int64: 0 query, 1 passage -> every head's weights (layers, H, L, L)."""

    def __init__(self, bert: BertModel) -> None:
        super().__init__()
        self.embeddings, self.layers = bert.embeddings, bert.encoder.layer
        self.attentions = nn.ModuleList(with_weights(layer.attention) for layer in bert.encoder.layer)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        hidden, weights_of_layers = self.embeddings(input_ids=ids, token_type_ids=types), []
        for layer, attention in zip(self.layers, self.attentions, strict=True):
            y, weights = attention(hidden)
            weights_of_layers.append(weights[0])
            attended = layer.attention.output.LayerNorm(y + hidden)
            hidden = layer.output(layer.intermediate(attended), attended)
        return torch.stack(weights_of_layers)


def with_weights(attention: nn.Module) -> MultiHeadAttention:
    """A BertAttention's projections in a module that also gives its weights; it takes no mask."""
    plain = mhsa.from_bert(attention)
    module = MultiHeadAttention(msgspec.structs.replace(plain.spec, mask=None, outputs=("y", "weights")))
    module.load_state_dict(plain.state_dict())
    return module


def compile_sentences(bert: BertModel, target: str = "native") -> Artifact:
    """The encoder of sentences, compiled for any batch and any length up to the model's."""
    examples = (torch.arange(1, 35).reshape(2, 17), torch.ones(2, 17, dtype=torch.int64))
    free = {0: BATCH, 1: LENGTH}
    return mhsa.compile(Sentences(bert).eval(), target, example_inputs=examples, dynamic_shapes=(free, free))


def compile_pairs(bert: BertModel) -> Artifact:
    """The encoder of pairs, compiled for one pair of any length up to the model's."""
    examples = (torch.arange(1, 18)[None], torch.zeros(1, 17, dtype=torch.int64))
    free = {1: LENGTH}
    return mhsa.compile(Pairs(bert).eval(), example_inputs=examples, dynamic_shapes=(free, free))


def save(bert: BertModel, tokenizer: Path, folder: Path, say: Say = lambda _: None) -> None:
    """Everything that the apps load, written to a folder; the tokenizer comes last, and says that the rest is there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, compiled in ((SENTENCES, compile_sentences), (PAIRS, compile_pairs)):
        say(f"Compiling {name}")
        compiled(bert).save(folder / name, force=True)
    shutil.copyfile(tokenizer, folder / TOKENIZER)


if __name__ == "__main__":
    source = model_folder()
    save(load_reference(source), source / TOKENIZER, Path(sys.argv[1]), lambda line: print(f"  {line} ...", flush=True))

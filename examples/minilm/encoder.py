"""The compiled model, loaded and called: NumPy and a tokenizer, no PyTorch, no compiler.

The folder it loads is what `python -m minilm.compile_model FOLDER` writes.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer

import mhsa_compile as mhsa

SENTENCES, PAIRS, TOKENIZER = "sentences.mhsa", "pairs.mhsa", "tokenizer.json"
EXAMPLES = Path(__file__).parents[1]


@dataclass(frozen=True)
class Token:
    """A token of a pair: its text, and what it is of: "query", "passage" or "mark" ([CLS] and [SEP])."""

    text: str
    of: str


def compiled_folder(folder: Path) -> Path:
    """The folder, compiled in a process of its own where it is not there yet: PyTorch's memory goes with that."""
    if not (folder / TOKENIZER).exists():
        print("Compiling all-MiniLM-L6-v2, once: about a minute", flush=True)
        command = [sys.executable, "-m", "minilm.compile_model", str(folder.resolve())]
        if subprocess.run(command, cwd=EXAMPLES, check=False).returncode != 0:
            sys.exit("The model was not compiled; what is above says why.")
    return folder


class Tokens:
    """The model's tokenizer, without the padding and the cut that its file asks for."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / TOKENIZER))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()

    def of(self, text: str) -> Encoding:
        """The tokens of a text, with [CLS] before them and [SEP] behind."""
        return self._tokenizer.encode(text)

    def of_each(self, texts: Sequence[str]) -> list[Encoding]:
        return self._tokenizer.encode_batch(list(texts))

    def spans(self, text: str) -> list[tuple[int, int]]:
        """The places at which each token of a text begins and ends, without [CLS] and [SEP]."""
        return self._tokenizer.encode(text, add_special_tokens=False).offsets

    def of_pair(self, query: str, passage: str) -> Encoding:
        return self._tokenizer.encode(query, passage)


class SentenceEncoder:
    """Texts in, vectors of length 1 out. Any number of threads may call it."""

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        self._compiled = mhsa.load(folder / SENTENCES, threads=threads)
        self._tokens = Tokens(folder)

    @property
    def threads(self) -> int:
        return self._compiled.threads

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """The vectors of texts, (texts, D) float32. Raises MhsaError."""
        return self.of_rows([self.row(text) for text in texts])

    def row(self, text: str) -> list[int]:
        """The ids of a text's tokens."""
        return self._tokens.of(text).ids

    def of_rows(self, rows: Sequence[Sequence[int]]) -> np.ndarray:
        """One batch of ids of different lengths, padded to the longest and masked: (rows, D) float32."""
        lengths = np.array([len(row) for row in rows])
        valid = np.arange(lengths.max()) < lengths[:, None]
        ids = np.zeros(valid.shape, np.int64)
        ids[valid] = np.concatenate(rows)
        return self._compiled(ids, valid.astype(np.int64))


class PairEncoder:
    """What the heads of the model attend to, for a query and a passage that it reads as one text."""

    def __init__(self, folder: Path, threads: int | None = None) -> None:
        self._compiled = mhsa.load(folder / PAIRS, threads=threads)
        self._tokens = Tokens(folder)

    def __call__(self, query: str, passage: str) -> tuple[list[Token], np.ndarray]:
        """The L tokens, and the weights (layers, H, L, L): each row is a token that attends, and its sum is 1."""
        pair = self._tokens.of_pair(query, passage)
        of = {None: "mark", 0: "query", 1: "passage"}
        tokens = [Token(text, of[part]) for text, part in zip(pair.tokens, pair.sequence_ids, strict=True)]
        ids, types = (np.array([row], np.int64) for row in (pair.ids, pair.type_ids))
        return tokens, self._compiled(ids, types)

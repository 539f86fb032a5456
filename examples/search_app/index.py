"""The index: passages with their vectors, in memory. Searches see it before a change or after, never in between."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from threading import Lock

import numpy as np


@dataclass(frozen=True)
class Passage:
    id: int
    file: str
    text: str


@dataclass(frozen=True)
class Hit:
    """A passage, and the cosine between it and the query."""

    passage: Passage
    score: float


@dataclass(frozen=True)
class _State:
    passages: tuple[Passage, ...]
    vectors: np.ndarray
    """(passages, D) float32, each of length 1."""


class Index:
    def __init__(self, dim: int) -> None:
        self._state = _State((), np.zeros((0, dim), np.float32))
        self._changes = Lock()
        self._ids = count()

    def __len__(self) -> int:
        return len(self._state.passages)

    def files(self) -> dict[str, int]:
        """How many passages each file has, in the order they came."""
        sizes: dict[str, int] = {}
        for passage in self._state.passages:
            sizes[passage.file] = sizes.get(passage.file, 0) + 1
        return sizes

    def put(self, file: str, texts: list[str], vectors: np.ndarray, most: int) -> bool:
        """The passages of a file, instead of those it had; False, and nothing done, if all were over `most`."""
        with self._changes:
            others = self._without(file)
            if len(others.passages) + len(texts) > most:
                return False
            new = tuple(Passage(next(self._ids), file, text) for text in texts)
            self._state = _State(others.passages + new, np.concatenate([others.vectors, vectors]))
            return True

    def remove(self, file: str) -> None:
        with self._changes:
            self._state = self._without(file)

    def passage(self, id: int) -> Passage | None:
        return next((passage for passage in self._state.passages if passage.id == id), None)

    def search(self, query: np.ndarray, most: int) -> list[Hit]:
        """The passages nearest to a vector (D,) of length 1, the nearest first."""
        state = self._state
        scores = state.vectors @ query
        best = np.argsort(-scores, kind="stable")[:most]
        return [Hit(state.passages[i], float(scores[i])) for i in best]

    def _without(self, file: str) -> _State:
        state = self._state
        others = [i for i, passage in enumerate(state.passages) if passage.file != file]
        return _State(tuple(state.passages[i] for i in others), state.vectors[others])

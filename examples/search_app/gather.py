"""What several clients ask at the same time, embedded as one padded batch.

One thread computes. It takes all queries that wait, up to a batch; passages of files that are being read come when no
query waits, a few at a time, so that a search does not wait for a file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread

import numpy as np

Embed = Callable[[Sequence[str]], np.ndarray]
PASSAGES = 8
"""Passages of a batch: what a query may have to wait for."""


@dataclass(frozen=True)
class _Asked:
    """Texts that stay together, and their vectors (texts, D) to come."""

    texts: list[str]
    vectors: Future[np.ndarray] = field(default_factory=Future)


class Gatherer:
    def __init__(self, embed: Embed, most: int) -> None:
        """`most` queries share a batch; 1 gathers nothing."""
        self._embed, self._most = embed, most
        self._queries: deque[_Asked] = deque()
        self._passages: deque[_Asked] = deque()
        self._closed = False
        self._changed = Condition()
        self._thread = Thread(target=self._run, name="embeds", daemon=True)
        self._thread.start()

    def query(self, text: str) -> np.ndarray:
        """(D,), when its batch is computed. Raises what embedding raises."""
        return self._put(self._queries, [_Asked([text])])[0][0]

    def passages(self, texts: list[str]) -> np.ndarray:
        """(texts, D), in their order; texts of about one length share a batch, so that little of it is padding."""
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        batches = [order[i : i + PASSAGES] for i in range(0, len(order), PASSAGES)]
        vectors = np.concatenate(self._put(self._passages, [_Asked([texts[i] for i in batch]) for batch in batches]))
        placed = np.empty_like(vectors)
        placed[order] = vectors
        return placed

    def close(self) -> None:
        """Computes what was asked before, then ends."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _put(self, waiting: deque[_Asked], asked: list[_Asked]) -> list[np.ndarray]:
        with self._changed:
            if self._closed:
                raise RuntimeError("the server is closing")
            waiting.extend(asked)
            self._changed.notify()
        return [one.vectors.result() for one in asked]

    def _run(self) -> None:
        while taken := self._taken():
            texts = [text for asked in taken for text in asked.texts]
            try:
                vectors = np.split(self._embed(texts), np.cumsum([len(asked.texts) for asked in taken])[:-1])
            except BaseException as error:  # whoever asked gets it
                for asked in taken:
                    asked.vectors.set_exception(error)
            else:
                for asked, found in zip(taken, vectors, strict=True):
                    asked.vectors.set_result(found)

    def _taken(self) -> list[_Asked]:
        """The next batch; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queries or self._passages or self._closed)
            waiting, most = (self._queries, self._most) if self._queries else (self._passages, 1)
            return [waiting.popleft() for _ in range(min(most, len(waiting)))]

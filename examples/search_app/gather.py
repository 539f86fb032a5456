"""What several clients ask at the same time, embedded in batches of texts of about one length.

A call costs something by itself and something for each token, padding included. So a batch is the query that has waited
longest, with those whose lengths are near its own. Passages of files that are being read come when no query waits, a
few at a time: a search does not wait for a file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Condition, Thread

import numpy as np
from minilm.ragged import little_padding

Row = Sequence[int]
"""The ids of a text's tokens."""
Embed = Callable[[list[Row]], np.ndarray]
PASSAGES = 4
"""Passages of a batch: what a query may have to wait for."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Rows that stay together, and their vectors (rows, D) to come."""

    rows: list[Row]
    vectors: Future[np.ndarray] = field(default_factory=Future)

    @property
    def longest(self) -> int:
        return max(map(len, self.rows))


class Gatherer:
    """Any number of threads ask; `workers` threads compute."""

    def __init__(self, embed: Embed, most: int, workers: int = 1) -> None:
        """`most` queries share a batch; 1 gathers nothing."""
        self._embed, self._most = embed, most
        self._queries: deque[Asked] = deque()
        self._passages: deque[Asked] = deque()
        self._closed = False
        self._changed = Condition()
        self._workers = [Thread(target=self._run, name=f"embeds {i}", daemon=True) for i in range(workers)]
        for worker in self._workers:
            worker.start()

    def query(self, row: Row) -> np.ndarray:
        """The vector (D,) of a query, when its batch is computed. Raises what embedding raises."""
        return self._put(self._queries, [Asked([row])])[0][0]

    def passages(self, rows: list[Row]) -> np.ndarray:
        """The vectors (rows, D) of passages, in their order; rows of about one length share a batch."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        batches = [order[i : i + PASSAGES] for i in range(0, len(order), PASSAGES)]
        vectors = np.concatenate(self._put(self._passages, [Asked([rows[i] for i in batch]) for batch in batches]))
        placed = np.empty_like(vectors)
        placed[order] = vectors
        return placed

    def close(self) -> None:
        """Computes what was asked before, then ends."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for worker in self._workers:
            worker.join()

    def _put(self, waiting: deque[Asked], asked: list[Asked]) -> list[np.ndarray]:
        with self._changed:
            if self._closed:
                raise RuntimeError("the server is closing")
            waiting.extend(asked)
            self._changed.notify(len(asked))
        return [one.vectors.result() for one in asked]

    def _run(self) -> None:
        while taken := self._taken():
            rows = [row for asked in taken for row in asked.rows]
            try:
                vectors = np.split(self._embed(rows), np.cumsum([len(asked.rows) for asked in taken])[:-1])
            except BaseException as error:  # whoever asked gets it
                for asked in taken:
                    asked.vectors.set_exception(error)
            else:
                for asked, vector in zip(taken, vectors, strict=True):
                    asked.vectors.set_result(vector)

    def _taken(self) -> list[Asked]:
        """The next batch; empty at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queries or self._passages or self._closed)
            if not self._queries:
                return [self._passages.popleft()] if self._passages else []
            batch = fitting(list(self._queries), self._most)
            for asked in batch:
                self._queries.remove(asked)
            return batch


def fitting(waiting: list[Asked], most: int) -> list[Asked]:
    """The first that waits, and those of lengths near its own, as long as little of the batch is padding."""
    near = sorted(waiting, key=lambda asked: abs(asked.longest - waiting[0].longest))[:most]
    sizes = [asked.longest for asked in near]
    return near[: max(size for size in range(1, len(near) + 1) if little_padding(sizes[:size]))]

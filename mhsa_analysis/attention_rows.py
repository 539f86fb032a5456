"""What heads look at: sums over rows of attention weights, batch by batch.

A row is what one query spreads over the keys. Notation: B batch, L query length, S key length, H heads.
"""

from __future__ import annotations

import numpy as np

PLACES = ("previous", "next", "self", "first", "last", "separator")
"""Keys that a head may be for: beside the query, the query itself, the ends of its sequence, separators that are named.
A query that is itself the first, the last or a separator does not count for that place."""
_MOST = 1 << 22  # numbers of rows that are compared together


class RowSums:
    """Sums over the rows of valid queries that see something; `rows` of them so far."""

    def __init__(self, heads: int, has_rest: bool = False) -> None:
        """has_rest: a row may sum to less than 1, as a score of no key has the rest."""
        self._has_rest = has_rest
        self.rows = 0
        self.entropy = np.zeros(heads)
        self.choices = 0
        self.share = np.zeros(heads)
        """The sum of entropy / ln(number of keys with a weight), over the `choices` rows with more than one."""
        self.distance = np.zeros(heads)
        self.apart = np.zeros((heads, heads))
        """The sum of Jensen-Shannon distances."""
        self.on = {place: np.zeros(heads) for place in PLACES}
        self.queries = dict.fromkeys(PLACES, 0)
        """The weights on each place, `on`, and how many queries have that place."""

    def add(
        self,
        weights: np.ndarray,
        entropy: np.ndarray | None,
        valid: np.ndarray,
        separators: np.ndarray | None,
        is_self_attention: bool,
    ) -> None:
        """weights (B, H, L, S); entropy (B, H, L); valid, separators (B, L) bool; is_self_attention: queries and keys
        are of one sequence, so that places mean something."""
        seeing = valid & (weights.sum(axis=3) > 0).all(axis=1)
        rows = weights.transpose(0, 2, 1, 3)[seeing].astype(np.float64)  # (n, H, S)
        total = rows.sum(axis=-1, keepdims=True)
        rest = np.maximum(1.0 - total, 0.0) if self._has_rest else np.zeros_like(total)
        entropies = _entropy(rows) + _entropy(rest) if entropy is None else entropy.transpose(0, 2, 1)[seeing]
        keys = (rows > 0).sum(axis=-1) + (rest[..., 0] > 0)
        several = (keys > 1).all(axis=-1)
        self.rows += len(rows)
        self.entropy += entropies.sum(axis=0)
        self.choices += int(several.sum())
        self.share += (entropies[several] / np.log(keys[several])).sum(axis=0)
        rows /= np.where(total > 0, total, 1.0)
        step = max(_MOST // max(rows[0].size, 1), 1) if len(rows) else 1
        for first in range(0, len(rows), step):
            self.apart += _jensen_shannon(rows[first : first + step])
        if is_self_attention:
            self._add_places(weights, seeing, valid, separators)

    def _add_places(
        self, weights: np.ndarray, seeing: np.ndarray, valid: np.ndarray, separators: np.ndarray | None
    ) -> None:
        L = valid.shape[1]
        places = np.arange(L)
        away = np.abs(places[:, None] - places)
        total = weights.sum(axis=-1, dtype=np.float64)
        distance = np.einsum("bhls,ls->bhl", weights, away, dtype=np.float64) / np.where(total > 0, total, 1.0)
        self.distance += _masked_sum(distance, seeing)
        ends = {"first": valid.argmax(axis=1), "last": L - 1 - valid[:, ::-1].argmax(axis=1)}
        self._place("self", np.diagonal(weights, 0, 2, 3), seeing)
        beside = valid[:, 1:] & valid[:, :-1]
        self._place("previous", np.diagonal(weights, -1, 2, 3), seeing[:, 1:] & beside)
        self._place("next", np.diagonal(weights, 1, 2, 3), seeing[:, :-1] & beside)
        for place, key in ends.items():
            on = np.take_along_axis(weights, key[:, None, None, None], axis=3)[..., 0]
            self._place(place, on, seeing & (places != key[:, None]))
        if separators is not None:
            on = np.einsum("bhls,bs->bhl", weights, separators)
            self._place("separator", on, seeing & ~separators & separators.any(axis=1, keepdims=True))

    def _place(self, place: str, on: np.ndarray, queries: np.ndarray) -> None:
        """on (B, H, n), queries (B, n)."""
        self.on[place] += _masked_sum(on, queries)
        self.queries[place] += int(queries.sum())


def _masked_sum(values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """(B, H, n) over the queries (B, n) that count: (H,)."""
    total: np.ndarray = values.transpose(0, 2, 1)[queries].sum(axis=0, dtype=np.float64)
    return total


def _entropy(rows: np.ndarray) -> np.ndarray:
    """-sum p ln p over the last axis, in nats; 0 ln 0 is 0."""
    entropy: np.ndarray = -(rows * np.log(np.where(rows > 0, rows, 1.0))).sum(axis=-1)
    return entropy


def _jensen_shannon(rows: np.ndarray) -> np.ndarray:
    """rows (n, H, S) that sum to 1 -> (H, H): the sum over n of sqrt(JSD / ln 2), a metric between 0 and 1.

    JSD(p, q) = H((p + q) / 2) - (H(p) + H(q)) / 2. Source: Lin, "Divergence measures based on the Shannon entropy"
    (1991); its root is a metric by Endres and Schindelin (2003).
    """
    heads = rows.shape[1]
    own = _entropy(rows)
    distances = np.zeros((heads, heads))
    for i in range(heads - 1):
        middle = _entropy((rows[:, i : i + 1] + rows[:, i + 1 :]) / 2) - (own[:, i : i + 1] + own[:, i + 1 :]) / 2
        distances[i, i + 1 :] = distances[i + 1 :, i] = np.sqrt(np.maximum(middle, 0.0) / np.log(2)).sum(axis=0)
    return distances

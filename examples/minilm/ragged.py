"""Batches of texts of different lengths: a call costs something by itself and for each token, padding included."""

from __future__ import annotations

from collections.abc import Sequence

PADDED = 1.25
"""Tokens of a batch with its padding, by those without: more costs more than a call of its own."""


def little_padding(lengths: Sequence[int]) -> bool:
    return max(lengths) * len(lengths) <= PADDED * sum(lengths)


def of_about_one_length(lengths: Sequence[int]) -> list[list[int]]:
    """The places of `lengths` in batches, each of about one length."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batches and little_padding([lengths[j] for j in (*batches[-1], i)]):
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches

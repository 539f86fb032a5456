"""The masks and score functions that are published with FlexAttention, written from their definitions.

Sources: https://pytorch.org/blog/flexattention and https://github.com/meta-pytorch/attention-gym
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

Function = Callable[..., Any]
HEADS, LONGEST = 4, 256
_GENERATOR = torch.Generator().manual_seed(5)
DOCUMENTS = torch.bucketize(torch.arange(LONGEST), torch.tensor([17, 40, 41, 90, 130, 200]), right=True)
OFFSETS = torch.tensor([0, 17, 40, 41, 90, 130, 200, LONGEST])
SLOPES = 2.0 ** (-8 * torch.arange(1, HEADS + 1) / HEADS)
DISTANCES = torch.randn(HEADS, 2 * LONGEST, generator=_GENERATOR)
BUCKETS = torch.randn(32, HEADS, generator=_GENERATOR)
IMAGES = torch.randint(0, 3, (LONGEST,), generator=_GENERATOR)


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return q - k <= 20


def prefix(b, h, q, k):
    return k < 13


def dilated(b, h, q, k):
    distance = torch.abs(q - k)
    return (distance <= 32) & ((distance % 4) == 0)


def document(b, h, q, k):
    return DOCUMENTS[q] == DOCUMENTS[k]


def document_causal(b, h, q, k):
    """The causal mask within each document, by places that are counted from its first."""
    return document(b, h, q, k) & causal(b, h, q - OFFSETS[DOCUMENTS[q]], k - OFFSETS[DOCUMENTS[k]])


def natten(b, h, q, k, width=12, kernel_x=5, kernel_y=3):
    """A window of kernel_x by kernel_y around each pixel of a picture of `width` columns and 12 rows, moved inside."""
    q_x, q_y, k_x, k_y = q % width, q // width, k % width, k // width
    center_x = q_x.clamp(kernel_x // 2, (width - 1) - kernel_x // 2)
    center_y = q_y.clamp(kernel_y // 2, 11 - kernel_y // 2)
    return ((center_x - k_x).abs() <= kernel_x // 2) & ((center_y - k_y).abs() <= kernel_y // 2)


def natten_in_tiles(b, h, q, k, tile=4, tiles=3):
    """A window of 5 by 5, moved inside as in `natten`, where pixels lie tile by tile."""

    def x_y(i):
        number, within = i // (tile * tile), i % (tile * tile)
        return (number % tiles) * tile + within % tile, (number // tiles) * tile + within // tile

    (q_x, q_y), (k_x, k_y) = x_y(q), x_y(k)
    center_x, center_y = q_x.clamp(2, tile * tiles - 3), q_y.clamp(2, tile * tiles - 3)
    return ((center_x - k_x).abs() <= 2) & ((center_y - k_y).abs() <= 2)


def natten_morton(b, h, q, k):
    """A window of 5 by 5, moved inside as in `natten`, where pixels lie along a Z: bits of the columns and rows take
    turns."""

    def bits(x):
        x = x & 0x55555555
        x = (x | (x >> 1)) & 0x33333333
        x = (x | (x >> 2)) & 0x0F0F0F0F
        return (x | (x >> 4)) & 0x00FF00FF

    center_x, center_y = bits(q).clamp(2, 13), bits(q >> 1).clamp(2, 13)
    return ((center_x - bits(k)).abs() <= 2) & ((center_y - bits(k >> 1)).abs() <= 2)


def flamingo(b, h, q, k):
    """Text sees the tokens of its own picture."""
    return (k // 16) == IMAGES[q]


def transfusion(b, h, q, k):
    """Causal, and both ways within two pictures."""
    one, other = (((q >= first) & (q < last) & (k >= first) & (k < last)) for first, last in ((10, 30), (50, 66)))
    return causal(b, h, q, k) | one | other


MASKS: dict[str, Function] = {
    "full": lambda b, h, q, k: b.new_ones((), dtype=torch.bool),
    "causal": causal,
    "sliding window": and_masks(causal, window),
    "prefix LM": or_masks(causal, prefix),
    "dilated window": dilated,
    "document": document,
    "document, causal": document_causal,
    "NATTEN": natten,
    "NATTEN in tiles": natten_in_tiles,
    "NATTEN by Morton's curve": natten_morton,
    "flamingo": flamingo,
    "transfusion": transfusion,
    "by head and entry": lambda b, h, q, k: (q + k + h + 2 * b) % 3 != 0,
}


def alibi(score, b, h, q, k):
    return score + (k - q) * SLOPES[h]


def softcap(score, b, h, q, k):
    return 5.0 * torch.tanh(score / 5.0)


def relative(score, b, h, q, k):
    """A bias that is the distance itself."""
    return score + (q - k)


def relative_table(score, b, h, q, k):
    return score + DISTANCES[h, q - k + LONGEST]


def from_the_end(score, b, h, q, k):
    """Negative indices count from the end of the table."""
    return score + DISTANCES[h, q - k]


def t5(score, b, h, q, k):
    """T5's buckets of distances: single ones first, then ever wider ones."""
    distance = torch.clamp(q - k, min=0)
    far = 16 + (torch.log(distance.float().clamp(min=1) / 16) / 2.0794415416798357 * 16).to(torch.int64)
    bucket = torch.where(distance < 16, distance, torch.minimum(far, torch.full_like(far, 31)))
    return score + BUCKETS[bucket, h]


SCORES: dict[str, Function] = {
    "identity": lambda score, b, h, q, k: score,
    "alibi": alibi,
    "soft-capping": softcap,
    "relative position": relative,
    "relative position, a table": relative_table,
    "relative position, from the end": from_the_end,
    "T5": t5,
    "tanh": lambda score, b, h, q, k: torch.tanh(score),
    "causal, as a score": lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")),
    "checkerboard": lambda score, b, h, q, k: torch.where(((q - k).abs() % 2) == 0, score * 0.5, score * 2.0),
    "head offset": lambda score, b, h, q, k: score * (1 + 2.0 ** -h.float()) - 0.25 * b,
    "functions": lambda score, b, h, q, k: (
        torch.sigmoid(score) * score.exp().sqrt() + torch.exp2(-score.abs()) + score**2
    ),
}

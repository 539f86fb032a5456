"""The first call of a kind of attention is held against PyTorch's arithmetic, in some of its rows.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mhsa_compile.integrations.first_calls import difference
from mhsa_compile.nn.functional import attend
from mhsa_compile.nn.score_features import EagerScoring

ROWS = 32
"""So many of the first queries, and of the last, are looked at: scores of all of a long call might not fit memory."""


class Operands(NamedTuple):
    """What `attention_operator.attend` is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    scale: float
    softcap: float
    causal: bool


def by_pytorch(operands: Operands, rows: Tensor | None = None) -> Tensor:
    """What `attention_operator.attend` gives, (B, L, H, F), by PyTorch's operators; of the queries `rows` alone, where
    they are stated."""
    q, k, v, mask, sinks, scale, softcap, causal = operands
    L, S = q.shape[2], k.shape[2]
    rows = torch.arange(L) if rows is None else rows
    visible = rows[:, None] >= torch.arange(S) if causal and L > 1 else None
    bias = None
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
        if mask.dtype == torch.bool:
            visible = mask if visible is None else mask & visible
        else:
            bias = mask.float()
    sinks = None if sinks is None else sinks.float()  # all in float32, as compiled attention sums
    scoring = EagerScoring(visible, bias, {"softcap": softcap} if softcap else {}, no_key=sinks)
    y = attend(q[:, :, rows].float(), k.float(), v.float(), scoring, scale)
    return y.to(q.dtype).transpose(1, 2)


def why_wrong(y: Tensor, operands: Operands) -> str:
    """How y (B, L, H, F) differs from PyTorch's by more than rounding, in the first and the last batch entry and rows;
    "" if it does not."""
    q, k, v, mask = operands[:4]
    B, L = q.shape[0], q.shape[2]
    if not y.numel():
        return ""
    entries = torch.tensor(sorted({0, B - 1}))
    rows = torch.arange(L) if L <= 2 * ROWS else torch.cat([torch.arange(ROWS), torch.arange(L - ROWS, L)])
    part = mask if mask is None or mask.shape[0] == 1 else mask[entries]
    some = operands._replace(q=q[entries], k=k[entries], v=v[entries], mask=part)
    return difference([y[entries][:, rows]], [by_pytorch(some, rows)])

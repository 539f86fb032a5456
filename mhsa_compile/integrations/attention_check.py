"""The first call of a kind of attention is held against PyTorch's arithmetic, in some of its rows.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mhsa_compile.integrations.first_calls import difference
from mhsa_compile.nn.functional import attend

ROWS = 32
"""So many of the first queries, and of the last, are looked at: scores of all of a long call might not fit memory."""


def by_pytorch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
    rows: Tensor | None = None,
) -> Tensor:
    """What `attention_operator.attend` gives, (B, L, H, F), by PyTorch's operators; of the queries `rows` alone, where
    they are stated."""
    L, S = q.shape[2], k.shape[2]
    rows = torch.arange(L) if rows is None else rows
    visible = rows[:, None] >= torch.arange(S) if causal and L > 1 else None
    bias = None
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
        if mask.dtype == torch.bool:
            visible = mask if visible is None else mask & visible
        else:
            bias = mask
    if q.dtype != torch.float32:  # as compiled attention sums
        wide = [None if tensor is None else tensor.float() for tensor in (q[:, :, rows], k, v, bias, sinks)]
        y = attend(wide[0], wide[1], wide[2], visible, wide[3], scale, softcap, wide[4])  # type: ignore[arg-type]
        return y.to(q.dtype).transpose(1, 2)
    return attend(q[:, :, rows], k, v, visible, bias, scale, softcap, sinks).transpose(1, 2)


def why_wrong(
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
) -> str:
    """How y (B, L, H, F) differs from PyTorch's by more than rounding, in the first and the last batch entry and rows;
    "" if it does not."""
    B, L = q.shape[0], q.shape[2]
    if not y.numel():
        return ""
    entries = torch.tensor(sorted({0, B - 1}))
    rows = torch.arange(L) if L <= 2 * ROWS else torch.cat([torch.arange(ROWS), torch.arange(L - ROWS, L)])
    part = mask if mask is None or mask.shape[0] == 1 else mask[entries]
    expected = by_pytorch(q[entries], k[entries], v[entries], part, sinks, scale, softcap, causal, rows)
    return difference([y[entries][:, rows]], [expected])

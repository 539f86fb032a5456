"""First calls of a kind are held against PyTorch's: what differs by more than rounding is PyTorch's from then on.

Of attention that models of transformers call, some of the rows.
Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mhsa_compile.nn.functional import attend, to_numpy
from mhsa_compile.nn.score_features import EagerScoring
from mhsa_compile.spec.float32_products import Float32Products
from mhsa_compile.verification.error_budget import coarse_budget, max_error


@dataclass
class FirstCalls:
    """The kinds of calls of one layer that were checked.

    name   what the layer is called in a warning
    is_on  whether anything is checked
    count  is told of each check
    wrong  why PyTorch computes all calls, once one differed
    products  how the layer's artifacts multiply float32: the least exact of them
    """

    name: str
    is_on: bool
    count: Callable[[], None]
    wrong: str = ""
    products: Float32Products = "ieee"
    _seen: set[Hashable] = field(default_factory=set)

    def check(self, kind: Hashable, ours: Sequence[Tensor], theirs: Callable[[], Sequence[Tensor]]) -> str:
        """Why the results are not to be had; "" if they may differ by rounding alone. `theirs` computes them anew."""
        if not self.is_on or kind in self._seen:
            return ""
        self.count()
        with torch.no_grad():
            wrong = difference(ours, theirs(), self.products)
        self.wrong = self.wrong or wrong
        self._seen.add(kind)  # not before: other threads' first calls are as unsure
        if wrong:
            warnings.warn(f"{self.name or 'the model'}: {self.wrong}; PyTorch computes its calls", stacklevel=4)
        return self.wrong


def difference(ours: Sequence[Tensor], theirs: Sequence[Tensor], products: Float32Products = "ieee") -> str:
    """How results differ by more than rounding, that of our `products` of float32 included; "" if they do not. What is
    NaN in PyTorch, as rows that see no key are, is left out."""
    for one, other in zip(ours, theirs, strict=True):
        dtype = str(other.dtype).removeprefix("torch.")
        result, expected = to_numpy(one.detach()), to_numpy(other.detach()).astype(np.float64)
        if result.shape == expected.shape:
            finite = np.isfinite(expected)
            result, expected = result[finite], expected[finite]
        if not (off := max_error(expected, result)) <= (most := coarse_budget(expected, dtype, products)):
            return f"a result is off by {off:.1e} from PyTorch's, where rounding explains {most:.1e}"
    return ""


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


def why_wrong(y: Tensor, operands: Operands, products: Float32Products = "ieee") -> str:
    """How y (B, L, H, F) differs from PyTorch's by more than rounding, in the first and the last batch entry and rows;
    "" if it does not. `products` is how it came to be."""
    q, k, v, mask = operands[:4]
    B, L = q.shape[0], q.shape[2]
    if not y.numel():
        return ""
    entries = torch.tensor(sorted({0, B - 1}))
    rows = torch.arange(L) if L <= 2 * ROWS else torch.cat([torch.arange(ROWS), torch.arange(L - ROWS, L)])
    part = mask if mask is None or mask.shape[0] == 1 else mask[entries]
    some = operands._replace(q=q[entries], k=k[entries], v=v[entries], mask=part)
    return difference([y[entries][:, rows]], [by_pytorch(some, rows)], products)

"""First calls of a kind are held against PyTorch's: what differs by more than rounding is PyTorch's from then on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mhsa_compile.nn.functional import to_numpy
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
    _kinds: set[Hashable] = field(default_factory=set)

    def check(self, kind: Hashable, ours: Sequence[Tensor], theirs: Callable[[], Sequence[Tensor]]) -> str:
        """Why the results are not to be had; "" if they may differ by rounding alone. `theirs` computes them anew."""
        if not self.is_on or kind in self._kinds:
            return ""
        self.count()
        with torch.no_grad():
            wrong = difference(ours, theirs(), self.products)
        self.wrong = self.wrong or wrong
        self._kinds.add(kind)  # not before: other threads' first calls are as unsure
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

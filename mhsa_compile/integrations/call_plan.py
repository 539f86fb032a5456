"""How operands of one shape, as they lie in memory, reach their artifact: worked out once, and then a few views a call.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from torch import Tensor

from mhsa_compile.integrations.attention_graph import Layout
from mhsa_compile.runtime.compiled_attention import CompiledAttention


class CallPlan:
    """The calls of operands with the shapes and strides of q (B, H, L, E), k (B, G, S, E) and v (B, G, S, F).

    compiled  their artifact
    layout    how it reads keys and values
    """

    def __init__(self, compiled: CompiledAttention, layout: Layout, q: Tensor, k: Tensor, v: Tensor) -> None:
        self._compiled, self._by_rows = compiled, layout == "rows"
        (B, H, L, E), F = q.shape, v.shape[3]
        self._rows, self._y = (B, L, H * E), (B, L, H, F)
        self._q = _rows_of(q)
        self._k, self._v = (_rows_of(k), _rows_of(v)) if self._by_rows else (None, None)

    def run(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None) -> Tensor:
        """y (B, L, H, F); operands as in `attention_operator.attend`."""
        q = q.transpose(1, 2).reshape(self._rows) if self._q is None else q.as_strided(*self._q)
        if self._k is not None and self._v is not None:
            k, v = k.as_strided(*self._k), v.as_strided(*self._v)
        inputs = [q, k, v]
        if mask is not None:
            inputs.append(_as_small_as_it_is(mask))
        if sinks is not None:
            inputs.append(sinks)
        y: Tensor = self._compiled(*inputs)
        return y.view(self._y)


def _rows_of(x: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The size and strides of x (B, H, L, E) as rows (B, L, H * E); None where they do not lie in memory so."""
    if not x.transpose(1, 2).is_contiguous():
        return None
    B, H, L, E = x.shape
    return (B, L, H * E), (L * H * E, H * E, 1)


def _as_small_as_it_is(mask: Tensor) -> Tensor:
    """A mask without the repetitions of an expanded one, which a call would copy."""
    for axis in range(3):
        if mask.shape[axis] > 1 and mask.stride(axis) == 0:
            mask = mask.narrow(axis, 0, 1)
    return mask

"""mhsa::attention, an operator of PyTorch's: attention on the artifacts of the call table.

torch.compile and torch.export see one operator, whose result has a known shape, which changes nothing and has no
derivative. Eager calls go to `attend` directly.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhsa_compile.errors import InputError, OutputError
from mhsa_compile.integrations.attention_graph import AttentionCall
from mhsa_compile.integrations.call_context import no_autocast, no_gradient
from mhsa_compile.integrations.call_table import IMPLEMENTATION, TABLES, CallPlan
from mhsa_compile.integrations.first_calls import difference
from mhsa_compile.integrations.weight_state import no_room
from mhsa_compile.nn import functional
from mhsa_compile.nn.score_features import EagerScoring
from mhsa_compile.spec.float32_products import Float32Products

NAME = "mhsa::attention"
_KNOWN_PLANS = 64
"""Plans that are remembered: more than a model calls with again and again, few beside a decoder's lengths."""
_ROWS = 32
"""So many of the first queries, and of the last, are held against PyTorch's: scores of all of a long call might not fit
memory."""


class Operands(NamedTuple):
    """What attention is of, as `attend` takes it."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    sinks: Tensor | None
    scale: float
    softcap: float
    causal: bool

    @property
    def limits(self) -> dict[str, float]:
        """The numbers of formulas of scores, by the names of the formulas."""
        return {"softcap": self.softcap} if self.softcap else {}

    @property
    def call(self) -> AttentionCall:
        """The kind of call that it is."""
        mask = None if self.mask is None else "bool" if self.mask.dtype == torch.bool else "additive"
        (_, H, _, E), (_, G, _, F) = self.q.shape, self.v.shape
        dtype = str(self.q.dtype).removeprefix("torch.")
        of_heads = () if self.sinks is None else ("sinks",)
        return AttentionCall(H, G, E, F, dtype, self.scale, self.causal, mask, tuple(self.limits.items()), of_heads)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    causal: bool,
    causal_unmasked: bool,
    windowed: bool,
    implementation: str = IMPLEMENTATION,
) -> Tensor:
    """q (B, H, L, E), k (B, G, S, E), v (B, G, S, F), in memory by heads or by rows -> y (B, L, H, F).

    mask               None, bool (True takes part), or of q's dtype and added; (B or 1, H or 1, L or 1, S or 1)
    sinks              (H,), of q's dtype, or None
    causal             query i sees key j iff j <= i; a single query sees every key
    causal_unmasked    what `causal` would be without a mask
    windowed           whether the layer has a window, which `mask` says where it hides something
    implementation     whose call table it is

    `causal_unmasked` and `windowed` decide what is compiled along with this kind of call: `call_table.siblings`.

    Raises InputError for what the artifact refuses.
    """
    shape_of_mask = None if mask is None else (mask.shape, mask.dtype)
    sizes = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, shape_of_mask, sinks is None)
    key = (sizes, scale, softcap, causal, causal_unmasked, windowed)
    table = TABLES[implementation]
    plans = table.plans
    if (plan := plans.get(key)) is not None:
        return plan.run(q, k, v, mask, sinks)
    _check_ranks(q, k, v, mask)
    operands = Operands(q, k, v, mask, sinks, scale, softcap, causal)
    call = operands.call
    if table.is_left(call):
        return by_pytorch(operands)
    call = call._replace(kv_layout=table.layout(call, k.transpose(1, 2), v.transpose(1, 2)))
    try:
        compiled = table.get(call, one_query=q.shape[2] == 1, causal=causal_unmasked, windowed=windowed)
    except OutputError as error:
        table.leave(call, no_room(error))
        return by_pytorch(operands)
    plan = CallPlan(compiled, call.kv_layout, q, k, v)
    y = plan.run(q, k, v, mask, sinks)
    if wrong := table.check(call, q, mask, lambda: why_wrong(y, operands, compiled.manifest.coarsest_products)):
        table.leave(call, wrong)
        return by_pytorch(operands)
    if len(plans) >= _KNOWN_PLANS:
        plans.clear()
    plans[key] = plan
    return y


def by_pytorch(operands: Operands, rows: Tensor | None = None) -> Tensor:
    """What `attend` gives, (B, L, H, F), by PyTorch's operators; of the queries `rows` alone, where they are stated. In
    float32, as compiled attention sums, whatever torch.autocast says, but what is float64."""
    q, k, v, mask, sinks, scale, _, causal = operands
    L, S = q.shape[2], k.shape[2]
    rows = torch.arange(L, device=q.device) if rows is None else rows
    wide = torch.promote_types(q.dtype, torch.float32)
    visible = rows[:, None] >= torch.arange(S, device=q.device) if causal and L > 1 else None
    bias = None
    if mask is not None:
        mask = mask if mask.shape[2] == 1 else mask[:, :, rows]
        if mask.dtype == torch.bool:
            visible = mask if visible is None else mask & visible
        else:
            bias = mask.to(wide)
    sinks = None if sinks is None else sinks.to(wide)
    scoring = EagerScoring(visible, bias, operands.limits, no_key=sinks)
    with no_autocast(q.device):
        y = functional.attend(q[:, :, rows].to(wide), k.to(wide), v.to(wide), scoring, scale)
    return y.to(q.dtype).transpose(1, 2).contiguous()  # as `_shape` has it, which torch.compile goes by


def why_wrong(y: Tensor, operands: Operands, products: Float32Products = "ieee") -> str:
    """How y (B, L, H, F) differs from PyTorch's by more than rounding, in the first and the last batch entry and rows;
    "" if it does not. `products` is how it came to be."""
    q, k, v, mask = operands[:4]
    B, L = q.shape[0], q.shape[2]
    if not y.numel():
        return ""
    entries = torch.tensor(sorted({0, B - 1}))
    rows = torch.arange(L) if L <= 2 * _ROWS else torch.cat([torch.arange(_ROWS), torch.arange(L - _ROWS, L)])
    part = mask if mask is None or mask.shape[0] == 1 else mask[entries]
    some = operands._replace(q=q[entries], k=k[entries], v=v[entries], mask=part)
    return difference([y[entries][:, rows]], [by_pytorch(some, rows)], products)


def _check_ranks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> None:
    for name, value in (("query", q), ("key", k), ("value", v), ("attention_mask", mask)):
        if value is not None and value.ndim != 4:
            raise InputError(name, "four axes: batch, heads, length, and head dim or keys", str(tuple(value.shape)))
    if q.shape[1] % max(1, k.shape[1]) or k.shape[1] != v.shape[1]:
        got = f"{q.shape[1]} query, {k.shape[1]} key and {v.shape[1]} value heads"
        raise InputError("key", "key and value heads that divide the query heads", got)


@functools.cache
def define() -> Any:
    """Makes the operator known to PyTorch, once; a program that was exported with it needs that before it runs."""
    schema = (
        "(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, float softcap, bool causal, "
        f"bool causal_unmasked, bool windowed, str implementation='{IMPLEMENTATION}') -> Tensor"
    )
    operator = torch.library.custom_op(NAME, attend, mutates_args=(), schema=schema)
    operator.register_fake(_shape)
    operator.register_autograd(_no_derivative)
    return operator


def _shape(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


def _no_derivative(context: Any, *gradients: Any) -> None:
    raise no_gradient("query")

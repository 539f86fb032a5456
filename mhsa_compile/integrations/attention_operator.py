"""mhsa::attention, an operator of PyTorch's: attention on the artifacts of the call table.

torch.compile and torch.export see one operator, whose result has a known shape, which changes nothing and has no
derivative. Eager calls go to `attend` directly.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from mhsa_compile.errors import InputError, OutputError
from mhsa_compile.integrations.attention_graph import AttentionCall
from mhsa_compile.integrations.call_table import TABLE, CallPlan
from mhsa_compile.integrations.first_calls import Operands, by_pytorch, why_wrong
from mhsa_compile.integrations.weight_state import no_room

NAME = "mhsa::attention"
_KNOWN_PLANS = 64
"""Plans that are remembered: more than a model calls with again and again, few beside a decoder's lengths."""


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
) -> Tensor:
    """q (B, H, L, E), k (B, G, S, E), v (B, G, S, F), in memory by heads or by rows -> y (B, L, H, F).

    mask               None, bool (True takes part), or of q's dtype and added; (B or 1, H or 1, L or 1, S or 1)
    sinks              (H,), of q's dtype, or None
    causal             query i sees key j iff j <= i; a single query sees every key
    causal_unmasked    what `causal` would be without a mask
    windowed           whether the layer has a window, which `mask` says where it hides something

    The last two decide what is compiled along with this kind of call: `call_table.siblings`.

    Raises InputError for what the artifact refuses.
    """
    shape_of_mask = None if mask is None else (mask.shape, mask.dtype)
    sizes = (q.shape, q.stride(), k.shape, k.stride(), v.shape, v.stride(), q.dtype, shape_of_mask, sinks is None)
    key = (sizes, scale, softcap, causal, causal_unmasked, windowed)
    plans = TABLE.plans
    if (plan := plans.get(key)) is not None:
        return plan.run(q, k, v, mask, sinks)
    _check_ranks(q, k, v, mask)
    operands = Operands(q, k, v, mask, sinks, scale, softcap, causal)
    call = _call_of(operands)
    if TABLE.is_left(call):
        return by_pytorch(operands)
    call = call._replace(kv_layout=TABLE.layout(call, k.transpose(1, 2), v.transpose(1, 2)))
    try:
        compiled = TABLE.get(call, one_query=q.shape[2] == 1, causal=causal_unmasked, windowed=windowed)
    except OutputError as error:
        TABLE.leave(call, no_room(error))
        return by_pytorch(operands)
    plan = CallPlan(compiled, call.kv_layout, q, k, v)
    y = plan.run(q, k, v, mask, sinks)
    if TABLE.is_first(call, q, mask) and (why := why_wrong(y, operands, compiled.manifest.coarsest_products)):
        TABLE.leave(call, why)
        return by_pytorch(operands)
    if len(plans) >= _KNOWN_PLANS:
        plans.clear()
    plans[key] = plan
    return y


def _call_of(operands: Operands) -> AttentionCall:
    q, k, v, mask, sinks, scale, softcap, causal = operands
    kind = "bool" if mask is not None and mask.dtype == torch.bool else None if mask is None else "additive"
    return AttentionCall(
        H=q.shape[1],
        G=k.shape[1],
        E=q.shape[3],
        F=v.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        scale=scale,
        softcap=softcap,
        causal=causal,
        mask=kind,
        sinks=sinks is not None,
    )


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
        "bool causal_unmasked, bool windowed) -> Tensor"
    )
    operator = torch.library.custom_op(NAME, attend, mutates_args=(), schema=schema)
    operator.register_fake(_shape)
    operator.register_autograd(_no_derivative)
    return operator


def _shape(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


def _no_derivative(context: Any, *gradients: Any) -> None:
    raise no_gradient("query")


def no_gradient(argument: str) -> InputError:
    """The error for a call whose gradient is wanted: compiled attention computes none."""
    expected = "a tensor without a gradient to follow: compiled attention computes none"
    hint = "Call under torch.no_grad(), or set another attention to train."
    return InputError(argument, expected, "one that requires grad", hint)


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether a gradient of the result would be asked of one of them."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_traced(q: Tensor) -> bool:
    """Whether somebody records the calls: then the operator is called, else `attend` directly."""
    return is_recorded() or type(q) not in (Tensor, torch.nn.Parameter)


def is_recorded() -> bool:
    """Whether this thread's calls become a program: an artifact's would be missing in it, or its result a constant."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]


def check_inference(layer: torch.nn.Module, argument: str, *tensors: Tensor | None) -> None:
    """Raises InputError for a replaced layer in training mode, and where a gradient is wanted of one of `tensors`."""
    if layer.training:
        raise InputError("model", "eval mode: compiled attention is for inference", "training mode", "model.eval()")
    if wants_gradient(*tensors):
        raise no_gradient(argument)

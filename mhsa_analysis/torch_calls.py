"""Calls of nn.MultiheadAttention, noted while a model of PyTorch runs.

Notation: B batch, L query length, S key length, D embed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mhsa_compile.conversion.attention_calls import bound, refusal
from mhsa_compile.conversion.from_torch import from_torch, join_masks
from mhsa_compile.conversion.visible_keys import (
    VisibleBand,
    VisibleKeys,
    bool_where_it_hides,
    constant_band,
    gives,
    mask_kind,
)
from mhsa_compile.nn.modules import MultiHeadAttention


@dataclass(frozen=True, eq=False)
class TorchCall:
    """x (B, L, D), the context (B, S, kv_embed_dim) if it is another, what is seen, and the layer's own y (B, L, D), in
    its dtype and in float64."""

    module: Any
    x: Tensor
    context: Tensor | None
    visible: VisibleKeys
    y: Tensor
    exact: Tensor


@contextmanager
def torch_calls(root: nn.Module) -> Iterator[list[TorchCall]]:
    """While it lasts, the calls of every nn.MultiheadAttention in `root`, in their order."""
    calls: list[TorchCall] = []

    def note(layer: Any, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        calls.append(_call_of(layer, bound(layer, args, keywords), result[0]))

    with ExitStack() as undo:
        for module in root.modules():
            if isinstance(module, nn.MultiheadAttention):  # a hook also keeps encoders from their one fused operator
                undo.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            elif isinstance(module, nn.TransformerEncoder):  # or padded sequences arrive as nested tensors
                undo.callback(setattr, module, "use_nested_tensor", module.use_nested_tensor)
                module.use_nested_tensor = False
        yield calls


@torch.no_grad()
def attention_of(calls: Sequence[TorchCall]) -> MultiHeadAttention:
    """The layer of these calls, after it gave the result of each. Raises ModelError."""
    masks = [call.visible for call in calls]
    cross = calls[0].context is not None
    band = constant_band(masks)
    band = VisibleBand() if band is None or (cross and band != VisibleBand()) else band
    is_band = all(one.is_band(band) for one in masks)
    attention = from_torch(
        calls[0].module,
        cross=cross,
        mask=None if is_band else mask_kind(masks),
        causal=band.causal if is_band else None,
    )
    for call in calls:
        if not gives(attention, (call.x, call.context), call.visible, call.exact):
            raise refusal(call.module, "its own result is another than that of its projections and masks")
    return attention


@torch.no_grad()
def _call_of(layer: Any, arguments: dict[str, Any], y: Tensor) -> TorchCall:
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    if query.ndim != 3 or key is not value or query.is_nested:
        why = "it is called with nested tensors, without a batch, or with keys and values of two tensors"
        raise refusal(layer, why)
    exact = _without_hooks(layer).double()(**{name: _exact(value) for name, value in arguments.items()})[0]
    context = None if key is query else key
    if not layer.batch_first:
        query, y, exact = query.transpose(0, 1), y.transpose(0, 1), exact.transpose(0, 1)
        context = None if context is None else context.transpose(0, 1)
    L, S = query.shape[1], query.shape[1] if context is None else context.shape[1]
    full = (query.shape[0], layer.num_heads, L, S)
    mask = join_masks(arguments.get("attn_mask"), arguments.get("key_padding_mask"), full, query.dtype)
    visible = VisibleKeys(bool_where_it_hides(mask), L, S)
    context = None if context is None else context.detach()
    return TorchCall(layer, query.detach(), context, visible, y.detach(), exact)


def _without_hooks(layer: nn.Module) -> nn.Module:
    """A copy of the layer, whose calls nobody notes."""
    same = copy.copy(layer)
    vars(same)["_forward_hooks"] = type(vars(layer)["_forward_hooks"])()
    return copy.deepcopy(same)


def _exact(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

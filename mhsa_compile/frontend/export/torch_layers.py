"""PyTorch's own attention layers as exporters can read them, while a module that holds some is exported.

`nn.MultiheadAttention` moves the batch behind the length, joins it with the heads, and cuts its packed projection by
indices; in an encoder layer it may be one operator that ONNX has no form for. `plain_layers` lets it compute the same
in the words that attention is found by: a projection each for queries, keys and values, heads in the second axis.

Notation: B batch, L query length, S key length, D embed, H heads, E head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mhsa_compile.conversion.from_torch import one_mask


@contextmanager
def plain_layers(module: nn.Module) -> Iterator[None]:
    """Inside, every nn.MultiheadAttention of `module` computes as `_forward` does. Afterwards all is as it was.

    One that somebody gave a forward of its own keeps that.
    """
    layers = [layer for layer in module.modules() if type(layer) is nn.MultiheadAttention]
    layers = [layer for layer in layers if "forward" not in vars(layer)]
    for layer in layers:
        vars(layer)["forward"] = MethodType(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


@contextmanager
def slow_path() -> Iterator[None]:
    """Inside, PyTorch's encoder layers are made of operators that can be exported. They are faster as a single one, but
    it gives NaN for what is masked whole, and takes padded rows out of the batch."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _forward(
    layer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention.forward` at inference."""
    if query.dim() != 3 or (is_causal and attn_mask is None):  # one sequence alone, or what it refuses
        return nn.MultiheadAttention.forward(
            layer, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )
    if not layer.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = (_heads(layer, x) for x in _project(layer, query, key, value))
    if is_causal and key_padding_mask is None and not need_weights:  # attn_mask is said to be the causal one
        attn_mask = None
    else:
        is_causal = False
    mask = _one_mask(layer, attn_mask, key_padding_mask, q)
    if need_weights:
        weights = _weights(q, k, mask)
        y = weights @ v
    else:
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
    y = layer.out_proj(y.transpose(1, 2).flatten(2))
    y = y if layer.batch_first else y.transpose(0, 1)
    if not need_weights:
        return y, None
    return y, weights.mean(1) if average_attn_weights else weights


def _heads(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """(B, L, D) as (B, H, L, E)."""
    return torch.unflatten(x, -1, (layer.num_heads, -1)).transpose(1, 2)


def _project(layer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries (B, L, D), keys and values (B, S, D), with the rows that the layer itself adds behind them."""
    separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    matrices = separate if layer.in_proj_weight is None else layer.in_proj_weight.chunk(3)
    biases = (None, None, None) if layer.in_proj_bias is None else layer.in_proj_bias.chunk(3)
    q, k, v = (F.linear(*pair) for pair in zip((query, key, value), matrices, biases, strict=True))
    if layer.bias_k is not None and layer.bias_v is not None:
        k, v = (torch.cat([x, row.expand(x.shape[0], 1, -1)], 1) for x, row in ((k, layer.bias_k), (v, layer.bias_v)))
    if layer.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return [q, k, v]


def _one_mask(
    layer: nn.MultiheadAttention, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor
) -> Tensor | None:
    """Both masks as one that is added, or a boolean one in which True takes part; rows that the layer adds do."""
    B, H, added = q.shape[0], layer.num_heads, (layer.bias_k is not None) + layer.add_zero_attn
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.view(B, H, *attn_mask.shape[1:]))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    if added:
        masks = [F.pad(mask, (0, added)) for mask in masks]
    return one_mask(masks, q.dtype)


def _weights(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """The softmax's rows (B, H, L, S)."""
    scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    rows: Tensor = scores.softmax(-1)
    return rows

"""The core of attention in PyTorch: what each query sees, and what it gets; and the same as the ONNX operator.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from mhsa_compile.errors import InputError
from mhsa_compile.patterns import Pattern
from mhsa_compile.spec import AttentionSpec


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None, scale: float, softcap: float = 0.0
) -> Tensor:
    """softmax(cap(q k^T * scale) + bias) v over the visible keys.

    q (B, H, L, E), k (B, G, S, E), v (B, G, S, F) -> (B, H, L, F)
    visible     bool, broadcastable to (B, H, L, S), or None: all are
    bias        of q's dtype, broadcastable to (B, H, L, S), or None; -inf masks
    softcap     cap(s) = softcap * tanh(s / softcap), where it is not 0

    The textbook form ("Attention Is All You Need", eq. 1; https://arxiv.org/abs/1706.03762), as PyTorch's eager one.
    """
    group = q.shape[1] // k.shape[1]
    if group > 1:  # query head h reads key/value head h // group
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q * scale) @ k.transpose(-1, -2)
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
        seen = bias != -torch.inf
        visible = seen if visible is None else visible & seen
    if visible is None:
        return scores.softmax(dim=-1) @ v
    blind = ~visible.any(dim=-1, keepdim=True)
    scores = scores.masked_fill(~visible, -torch.inf).masked_fill(blind, 0.0)  # 0: a softmax of -inf alone is NaN
    return _weighted_sum(scores.softmax(dim=-1).masked_fill(~visible, 0.0), v, visible)


def _weighted_sum(weights: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """weights v over the visible pairs only: 0 * NaN is NaN, so keys with a non-finite value are added one by one."""
    broken = ~v.isfinite().all(dim=-1).flatten(0, 1).all(dim=0)  # (S,)
    if not broken.any():
        return weights @ v
    visible = visible.expand_as(weights)
    result = weights @ v.masked_fill(broken[:, None], 0.0)
    for key in broken.nonzero().flatten().tolist():
        term = weights[..., key, None] * v[..., key, None, :]
        result = result + torch.where(visible[..., key, None], term, 0.0)
    return result


def attention(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The eager core: what each query sees is resolved, then `attend`."""
    B, H, L, S = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    mask = _checked_mask(spec, mask)
    if mask is not None:
        _check_broadcast(spec, mask, (B, H, L, S))
    visible = None if spec.mask == "additive" else mask
    bias = mask if spec.mask == "additive" else None
    stated = [] if visible is None else [visible]
    if spec.band is not None:
        stated.append(_band(L, S, *spec.band, q.device))
    if spec.static_mask is not None:
        stated.append(_static_mask(spec.static_mask, L, S).to(q.device))
    visible = functools.reduce(torch.logical_and, stated) if stated else None
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    return attend(q, k, v, visible, bias, scale)


def _band(L: int, S: int, left: int, right: int, alignment: str, device: torch.device) -> Tensor:
    """(L, S): the keys from p - left to p + right; see AttentionSpec."""
    offset = S - L if alignment == "bottom_right" else 0
    visible = torch.ones(L, S, dtype=torch.bool, device=device)
    if right >= 0:
        visible = visible.tril(offset + right)
    return visible.triu(offset - left) if left >= 0 else visible


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # or torch.compile would trace NumPy's code
def _static_mask(pattern: Pattern, L: int, S: int) -> Tensor:
    return torch.from_numpy(pattern.array(L, S))


def attention_node(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, free_lengths: bool
) -> Tensor:
    """The ONNX operator in an exported graph: the 3-D form (heads side by side) or the 4-D one, by the rank of q."""
    attributes: dict[str, Any] = {}
    if q.ndim == 3:
        attributes |= {"q_num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads}
    if spec.causal is not None:
        attributes["is_causal"] = 1
    if spec.window is not None:
        attributes |= dict(zip(("left_window_size", "right_window_size"), spec.window, strict=True))
    if spec.scale is not None:
        attributes["scale"] = spec.scale
    inputs = [q, k, v, _checked_mask(spec, mask)]
    if free_lengths and spec.causal == "bottom_right":
        # The operator's offset is nonpad_kv_seqlen - L from opset 24 on: all S keys are valid, so it is S - L.
        inputs += [None, None, _key_lengths(k)]
    version = 25 if spec.window is not None else 24 if len(inputs) > 4 else 23
    shape = (*q.shape[:-1], spec.num_heads * spec.v_head_dim if q.ndim == 3 else spec.v_head_dim)
    return torch.onnx.ops.symbolic("Attention", inputs, attributes, dtype=q.dtype, shape=shape, version=version)


def _key_lengths(k: Tensor) -> Tensor:
    """S for every batch entry, int64 (B,): as three ONNX operators, since the exporter's own form of it takes nine."""

    def dim(axis: int) -> Tensor:
        bounds: dict[str, Any] = {"start": axis, "end": axis + 1}
        return torch.onnx.ops.symbolic("Shape", (k,), bounds, dtype=torch.int64, shape=(1,), version=23)

    shape = (k.shape[0],)
    return torch.onnx.ops.symbolic("Expand", (dim(k.ndim - 2), dim(0)), dtype=torch.int64, shape=shape, version=23)


def _checked_mask(spec: AttentionSpec, mask: Tensor | None) -> Tensor | None:
    """The mask, broadcastable to (B, H, L, S), after the checks that need no sizes."""
    if spec.mask is None:
        if mask is not None:
            raise InputError("mask", "None", "a tensor", 'Set mask="bool", "additive" or "key_padding" in the spec.')
        return None
    if mask is None:
        raise InputError("mask", f'a tensor: the spec has mask="{spec.mask}"', "None")
    if spec.mask == "additive" and not mask.is_floating_point():
        raise InputError("mask", "floating point: it is additive", str(mask.dtype), 'Or set mask="bool" in the spec.')
    if spec.mask != "additive" and mask.dtype != torch.bool:
        raise InputError("mask", "bool, True takes part", str(mask.dtype))
    if spec.mask != "key_padding":
        return mask
    if mask.ndim != 2:
        raise InputError("mask", "shape (B, S): it is key_padding", str(tuple(mask.shape)))
    return mask.unsqueeze(1).unsqueeze(1)  # as an index it would export as a dozen operators


def _check_broadcast(spec: AttentionSpec, mask: Tensor, full: tuple[int, int, int, int]) -> None:
    exact = spec.mask == "key_padding" and mask.shape != (full[0], 1, 1, full[3])
    pairs = zip(reversed(mask.shape), reversed(full), strict=False)
    if exact or mask.ndim > 4 or any(size not in (1, whole) for size, whole in pairs):
        wanted = f"(B, S) = {(full[0], full[3])}" if spec.mask == "key_padding" else f"broadcastable to {full}"
        shape = (mask.shape[0], mask.shape[3]) if spec.mask == "key_padding" else tuple(mask.shape)
        raise InputError("mask", wanted, str(shape))


def to_numpy(tensor: Tensor) -> np.ndarray:
    """The values as a NumPy array; bfloat16 is the one of `ml_dtypes`, which PyTorch does not know."""
    plain = tensor.detach().cpu()
    return plain.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if plain.dtype == torch.bfloat16 else plain.numpy()


def to_torch(array: np.ndarray) -> Tensor:
    """The inverse of `to_numpy`; a copy."""
    if array.dtype == ml_dtypes.bfloat16:
        return torch.tensor(np.ascontiguousarray(array).view(np.int16)).view(torch.bfloat16)
    return torch.tensor(array)

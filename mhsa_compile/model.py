"""The graph, defined once in PyTorch. Eager calls and the exported ONNX operator mean the same, exactly:

- a masked score is selected away, never multiplied by zero or pushed down by a finite number: NaN and Inf in a masked
  key or value reach no output, in a visible one they do;
- a query that sees no key gets zeros;
- an additive mask of -inf masks.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mhsa_compile.errors import InputError, ModelError
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


class MultiHeadAttention(nn.Module):
    """Projections, attention, output projection: x (B, L, D), context (B, S, kv_embed_dim) -> y (B, L, D).

    Weights carry PyTorch's names and layouts: q_proj.weight (H*E, D), k_proj.weight (G*E, kv_embed_dim),
    v_proj.weight (G*F, kv_embed_dim), out_proj.weight (D, H*F), and their biases.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.q_proj = nn.Linear(spec.embed_dim, spec.num_heads * spec.head_dim, bias=spec.bias)
        self.k_proj = nn.Linear(spec.source_dim, spec.num_kv_heads * spec.head_dim, bias=spec.bias)
        self.v_proj = nn.Linear(spec.source_dim, spec.num_kv_heads * spec.v_head_dim, bias=spec.bias)
        self.out_proj = nn.Linear(spec.num_heads * spec.v_head_dim, spec.embed_dim, bias=spec.bias)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """`context` goes with cross-attention, `mask` with `spec.mask`. Raises InputError."""
        spec = self.spec
        source = _source(spec, x, context)
        q, k, v = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        if torch.onnx.is_in_onnx_export():
            y = _attention_node(spec, q, k, v, mask, free_lengths=spec.is_cross)
        else:
            q = q.unflatten(-1, (spec.num_heads, spec.head_dim)).transpose(1, 2)
            k = k.unflatten(-1, (spec.num_kv_heads, spec.head_dim)).transpose(1, 2)
            v = v.unflatten(-1, (spec.num_kv_heads, spec.v_head_dim)).transpose(1, 2)
            y = _attention(spec, q, k, v, mask).transpose(1, 2).flatten(2)
        return self.out_proj(y)  # type: ignore[no-any-return]


class ScaledDotProductAttention(nn.Module):
    """The core alone, without weights: q (B, H, L, E), k (B, G, S, E), v (B, G, S, F) -> y (B, H, L, F).

    L and S are free here, also for a spec without kv_embed_dim: its `causal=True` was resolved to "top_left".
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` goes with `spec.mask`. Raises InputError."""
        spec = self.spec
        widths = {
            "q": (spec.num_heads, spec.head_dim),
            "k": (spec.num_kv_heads, spec.head_dim),
            "v": (spec.num_kv_heads, spec.v_head_dim),
        }
        for (name, (heads, width)), value in zip(widths.items(), (q, k, v), strict=True):
            if value.ndim != 4 or (value.shape[1], value.shape[3]) != (heads, width):
                raise InputError(name, f"shape (B, {heads}, length, {width})", str(tuple(value.shape)))
        if torch.onnx.is_in_onnx_export():
            return _attention_node(spec, q, k, v, mask, free_lengths=True)
        return _attention(spec, q, k, v, mask)


def from_torch(
    layer: nn.MultiheadAttention, *, cross: bool = False, mask: str | None = None, causal: str | bool | None = None
) -> MultiHeadAttention:
    """The same attention as `layer(x, context, context)` at inference: dropout is left out, the weights are copied.

    cross       whether keys and values come from a second input; always so where kdim differs from embed_dim
    mask        PyTorch's True masks out, ours takes part: invert `attn_mask` and `key_padding_mask`
    batch_first is not kept: our edge is (B, L, D).

    Raises ModelError for add_bias_kv, add_zero_attn and kdim != vdim, which have no counterpart.
    """
    if layer.bias_k is not None or layer.bias_v is not None:
        raise ModelError("layer", "nn.MultiheadAttention without add_bias_kv", "add_bias_kv=True")
    if layer.add_zero_attn:
        raise ModelError("layer", "nn.MultiheadAttention without add_zero_attn", "add_zero_attn=True")
    if layer.kdim != layer.vdim:
        raise ModelError("layer", "kdim == vdim: keys and values of one context", f"{layer.kdim} and {layer.vdim}")
    cross = cross or layer.kdim != layer.embed_dim
    spec = AttentionSpec(
        embed_dim=layer.embed_dim,
        num_heads=layer.num_heads,
        kv_embed_dim=layer.kdim if cross else None,
        bias=layer.in_proj_bias is not None,
        causal=causal,
        mask=mask,
    )
    separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    projections = separate if layer.in_proj_weight is None else layer.in_proj_weight.chunk(3)
    state = {f"{name}_proj.weight": weight for name, weight in zip("qkv", projections, strict=True)}
    if spec.bias:
        state |= {f"{name}_proj.bias": bias for name, bias in zip("qkv", layer.in_proj_bias.chunk(3), strict=True)}
    state |= {f"out_proj.{name}": value for name, value in layer.out_proj.state_dict().items()}
    return _loaded(spec, state)


def from_bert(layer: nn.Module, *, mask: str | None = "key_padding") -> MultiHeadAttention:
    """The attention of a Hugging Face BertAttention (or RoBERTa, ...) at inference; the weights are copied.

    The result ends with `layer.output.dense`: dropout, residual and LayerNorm stay outside. A layer for
    cross-attention takes `context`; a causal one becomes causal.

    Raises ModelError, among others for a bare BertSelfAttention: the output projection is not in it.
    """
    core, output = getattr(layer, "self", None), getattr(layer, "output", None)
    if core is None or output is None:
        hint = "Pass the BertAttention around it: the output projection is its output.dense."
        raise ModelError("layer", "a BertAttention", type(layer).__name__, hint if hasattr(layer, "query") else "")
    position = getattr(core, "position_embedding_type", None) or "absolute"
    if position != "absolute":
        raise ModelError("layer", "absolute position embeddings", f"position_embedding_type={position!r}")
    cross = bool(getattr(layer, "is_cross_attention", False)) or core.key.in_features != core.query.in_features
    spec = AttentionSpec(
        embed_dim=core.query.in_features,
        num_heads=core.num_attention_heads,
        head_dim=core.attention_head_size,
        kv_embed_dim=core.key.in_features if cross else None,
        causal="top_left" if getattr(core, "is_causal", False) else None,
        mask=mask,
    )
    parts = {"q_proj": core.query, "k_proj": core.key, "v_proj": core.value, "out_proj": output.dense}
    state = {f"{part}.{name}": value for part, m in parts.items() for name, value in m.state_dict().items()}
    return _loaded(spec, state)


def _loaded(spec: AttentionSpec, state: dict[str, Tensor]) -> MultiHeadAttention:
    dtypes = {str(value.dtype).removeprefix("torch.") for value in state.values()}
    if dtypes != {spec.dtype}:
        raise ModelError("layer", f"{spec.dtype} weights", ", ".join(sorted(dtypes)), "Call layer.float() first.")
    module = MultiHeadAttention(spec)
    module.load_state_dict(state)
    return module.eval()


def weights(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters by their PyTorch names, in PyTorch's layouts."""
    return {name: parameter.detach().cpu().numpy() for name, parameter in module.named_parameters()}


def is_offset_causal(module: nn.Module) -> bool:
    """Whether the causal offset S - L must be stated, which takes opset 24: "bottom_right" where L and S may differ."""
    if not isinstance(module, MultiHeadAttention | ScaledDotProductAttention):
        return False
    free_lengths = module.spec.is_cross or isinstance(module, ScaledDotProductAttention)
    return free_lengths and module.spec.causal == "bottom_right"


def _attention(spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """The eager core: masks and causality resolved, then `attend`."""
    B, H, L, S = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    mask = _checked_mask(spec, mask)
    if mask is not None:
        _check_broadcast(spec, mask, (B, H, L, S))
    visible = None if spec.mask == "additive" else mask
    bias = mask if spec.mask == "additive" else None
    if spec.causal is not None:
        offset = S - L if spec.causal == "bottom_right" else 0
        band = torch.ones(L, S, dtype=torch.bool, device=q.device).tril(offset)
        visible = band if visible is None else visible & band
    scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
    return attend(q, k, v, visible, bias, scale)


def _attention_node(
    spec: AttentionSpec, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, free_lengths: bool
) -> Tensor:
    """The ONNX operator in an exported graph: the 3-D form (heads side by side) or the 4-D one, by the rank of q."""
    attributes: dict[str, Any] = {}
    if q.ndim == 3:
        attributes |= {"q_num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads}
    if spec.causal is not None:
        attributes["is_causal"] = 1
    if spec.scale is not None:
        attributes["scale"] = spec.scale
    inputs = [q, k, v, _checked_mask(spec, mask)]
    version = 23
    if free_lengths and spec.causal == "bottom_right":
        # The operator's causal offset is nonpad_kv_seqlen - L from opset 24 on: all S keys are valid, so it is S - L.
        inputs += [None, None, _key_lengths(k)]
        version = 24
    shape = (*q.shape[:-1], spec.num_heads * spec.v_head_dim if q.ndim == 3 else spec.v_head_dim)
    return torch.onnx.ops.symbolic("Attention", inputs, attributes, dtype=q.dtype, shape=shape, version=version)


def _key_lengths(k: Tensor) -> Tensor:
    """S for every batch entry, int64 (B,): as three ONNX operators, since the exporter's own form of it takes nine."""

    def dim(axis: int) -> Tensor:
        bounds: dict[str, Any] = {"start": axis, "end": axis + 1}
        return torch.onnx.ops.symbolic("Shape", (k,), bounds, dtype=torch.int64, shape=(1,), version=23)

    shape = (k.shape[0],)
    return torch.onnx.ops.symbolic("Expand", (dim(k.ndim - 2), dim(0)), dtype=torch.int64, shape=shape, version=23)


def _source(spec: AttentionSpec, x: Tensor, context: Tensor | None) -> Tensor:
    """What keys and values are projected from, after the checks of both inputs."""
    if x.ndim != 3 or x.shape[-1] != spec.embed_dim:
        raise InputError("x", f"shape (B, L, {spec.embed_dim})", str(tuple(x.shape)))
    if context is None:
        if spec.is_cross:
            raise InputError("context", f"shape (B, S, {spec.kv_embed_dim}): kv_embed_dim is set", "None")
        return x
    if not spec.is_cross:
        raise InputError("context", "None: this is self-attention", "a tensor", "Set kv_embed_dim in the spec.")
    if context.ndim != 3 or context.shape[-1] != spec.kv_embed_dim:
        raise InputError("context", f"shape (B, S, {spec.kv_embed_dim})", str(tuple(context.shape)))
    return context


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

"""The graph, defined once in PyTorch. Eager calls and the exported ONNX operator mean the same, exactly:

- a masked score is selected away, never multiplied by zero or pushed down by a finite number: NaN and Inf in a masked
  key or value reach no output, in a visible one they do;
- a query that sees no key gets zeros;
- an additive mask of -inf masks.

Notation: B batch, L query length, S key length, D embed, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from mhsa_compile.core import attention, attention_node, to_numpy
from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.spec import DTYPES, AttentionSpec


class MultiHeadAttention(nn.Module):
    """Projections, attention, output projection: x (B, L, D), context (B, S, kv_embed_dim) -> y (B, L, D).

    Weights carry PyTorch's names and layouts: q_proj.weight (H*E, D), k_proj.weight (G*E, kv_embed_dim),
    v_proj.weight (G*F, kv_embed_dim), out_proj.weight (D, H*F), and their biases.
    """

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        dtype = getattr(torch, spec.dtype)
        query, key, value = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.v_head_dim,
        )
        self.q_proj = nn.Linear(spec.embed_dim, query, bias=spec.bias, dtype=dtype)
        self.k_proj = nn.Linear(spec.source_dim, key, bias=spec.bias, dtype=dtype)
        self.v_proj = nn.Linear(spec.source_dim, value, bias=spec.bias, dtype=dtype)
        self.out_proj = nn.Linear(spec.num_heads * spec.v_head_dim, spec.embed_dim, bias=spec.bias, dtype=dtype)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """`context` goes with cross-attention, `mask` with `spec.mask`. Raises InputError."""
        spec = self.spec
        source = _source(spec, x, context)
        q, k, v = self.q_proj(x), self.k_proj(source), self.v_proj(source)
        if torch.onnx.is_in_onnx_export():
            y = attention_node(spec, q, k, v, mask, free_lengths=spec.is_cross)
        else:
            q = q.unflatten(-1, (spec.num_heads, spec.head_dim)).transpose(1, 2)
            k = k.unflatten(-1, (spec.num_kv_heads, spec.head_dim)).transpose(1, 2)
            v = v.unflatten(-1, (spec.num_kv_heads, spec.v_head_dim)).transpose(1, 2)
            y = attention(spec, q, k, v, mask).transpose(1, 2).flatten(2)
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
            return attention_node(spec, q, k, v, mask, free_lengths=True)
        return attention(spec, q, k, v, mask)


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
        dtype=_dtype_of(layer.out_proj.weight),
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
        dtype=_dtype_of(core.query.weight),
        causal="top_left" if getattr(core, "is_causal", False) else None,
        mask=mask,
    )
    parts = {"q_proj": core.query, "k_proj": core.key, "v_proj": core.value, "out_proj": output.dense}
    state = {f"{part}.{name}": value for part, m in parts.items() for name, value in m.state_dict().items()}
    return _loaded(spec, state)


def _dtype_of(weight: Tensor) -> str:
    dtype = str(weight.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError("layer", f"weights of {', '.join(DTYPES)}", dtype, "Call layer.float() first.")
    return dtype


def _loaded(spec: AttentionSpec, state: dict[str, Tensor]) -> MultiHeadAttention:
    dtypes = {_dtype_of(value) for value in state.values()}
    if dtypes != {spec.dtype}:
        raise ModelError("layer", f"{spec.dtype} weights", ", ".join(sorted(dtypes)), "Call layer.float() first.")
    module = MultiHeadAttention(spec)
    module.load_state_dict(state)
    return module.eval()


def weights(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters by their PyTorch names, in PyTorch's layouts."""
    return {name: to_numpy(parameter) for name, parameter in module.named_parameters()}


def opset(module: nn.Module) -> int:
    """The first opset that has the words for what `module` does."""
    if not isinstance(module, MultiHeadAttention | ScaledDotProductAttention):
        return 23
    if module.spec.window is not None:
        return 25
    free_lengths = module.spec.is_cross or isinstance(module, ScaledDotProductAttention)
    return 24 if free_lengths and module.spec.causal == "bottom_right" else 23


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

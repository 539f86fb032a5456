"""MultiHeadAttention from PyTorch's own layer; the weights are copied."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mhsa_compile.errors import InputError, ModelError
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.checks import DTYPES


def from_torch(
    layer: nn.MultiheadAttention,
    *,
    cross: bool = False,
    separate_values: bool = False,
    mask: str | None = None,
    causal: str | bool | None = None,
    outputs: Sequence[str] = ("y",),
) -> MultiHeadAttention:
    """The same attention as `layer(x, x, x)` at inference: dropout is left out, the weights are copied.

    cross            whether keys and values come from a second input, `layer(x, context, context)`; always so where
                     kdim differs from embed_dim
    separate_values  whether each has an input of its own, `layer(x, key, value)`; always so where kdim differs from
                     vdim
    mask             PyTorch's True masks out, ours takes part: invert `attn_mask` and `key_padding_mask`
    outputs          what a call returns: see AttentionSpec
    batch_first is not kept: our edge is (B, L, D).

    Raises ModelError for add_bias_kv and add_zero_attn, which have no counterpart, for a quantised out_proj, for
    weights that are elsewhere (on the meta device, or sharded), and for a subclass with a forward of its own, which may
    compute something else.

    >>> layer = nn.MultiheadAttention(64, 4, batch_first=True)
    >>> from_torch(layer, mask="key_padding").spec.mask
    'key_padding'
    >>> spec = from_torch(nn.MultiheadAttention(64, 4, kdim=48, vdim=32)).spec
    >>> spec.kv_embed_dim, spec.v_embed_dim
    (48, 32)
    """
    _check_layer(layer)
    separate_values = separate_values or layer.kdim != layer.vdim
    cross = cross or separate_values or layer.kdim != layer.embed_dim
    spec = AttentionSpec(
        embed_dim=layer.embed_dim,
        num_heads=layer.num_heads,
        kv_embed_dim=layer.kdim if cross else None,
        v_embed_dim=layer.vdim if separate_values else None,
        bias=layer.in_proj_bias is not None or layer.out_proj.bias is not None,
        dtype=dtype_of(layer.out_proj.weight),
        causal=causal,
        mask=mask,
        outputs=tuple(outputs),
    )
    return loaded(spec, _weights_of(layer) | (_biases_of(layer) if spec.bias else {}))


def _check_layer(layer: nn.MultiheadAttention) -> None:
    """Raises ModelError for a layer that has no counterpart."""
    if not isinstance(layer, nn.MultiheadAttention) or type(layer).forward is not nn.MultiheadAttention.forward:
        got = f"a {type(layer).__name__}, with a forward of its own"
        raise ModelError("layer", "an nn.MultiheadAttention", got, "mhsa.compile takes it with example_inputs.")
    if layer.bias_k is not None or layer.bias_v is not None:
        raise ModelError("layer", "nn.MultiheadAttention without add_bias_kv", "add_bias_kv=True")
    if layer.add_zero_attn:
        raise ModelError("layer", "nn.MultiheadAttention without add_zero_attn", "add_zero_attn=True")
    if not isinstance(layer.out_proj, nn.Linear):
        raise ModelError("layer", "an out_proj that is an nn.Linear", type(layer.out_proj).__name__)


def _weights_of(layer: nn.MultiheadAttention) -> dict[str, Tensor]:
    separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    projections = separate if layer.in_proj_weight is None else layer.in_proj_weight.chunk(3)
    weights = {f"{name}_proj.weight": weight for name, weight in zip("qkv", projections, strict=True)}
    return weights | {"out_proj.weight": layer.out_proj.weight}  # what it is after a parametrization, too


def _biases_of(layer: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Zeros where the layer has none on one side."""
    zeros = torch.zeros(3 * layer.embed_dim, dtype=layer.out_proj.weight.dtype, device="cpu")
    inner: Tensor = zeros if layer.in_proj_bias is None else layer.in_proj_bias
    outer: Tensor = zeros[: layer.embed_dim] if layer.out_proj.bias is None else layer.out_proj.bias
    biases = {f"{name}_proj.bias": bias for name, bias in zip("qkv", inner.chunk(3), strict=True)}
    return biases | {"out_proj.bias": outer}


def join_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, full: tuple[int, int, int, int], dtype: torch.dtype
) -> Tensor | None:
    """PyTorch's two masks as one of ours, broadcastable to `full` = (B, H, L, S): bool, True takes part, or added.

    attn_mask         (L, S) or (B * H, L, S); key_padding_mask (B, S). In a boolean one True is hidden. Raises
                      InputError for other shapes.
    """
    B, H, L, S = full
    masks = []
    if attn_mask is not None:
        if tuple(attn_mask.shape) not in ((L, S), (B * H, L, S)):
            raise InputError("attn_mask", f"shape {(L, S)} or {(B * H, L, S)}", str(tuple(attn_mask.shape)))
        masks.append(attn_mask.view(1, 1, L, S) if attn_mask.ndim == 2 else attn_mask.reshape(full))
    if key_padding_mask is not None:
        if tuple(key_padding_mask.shape) != (B, S):
            raise InputError("key_padding_mask", f"shape {(B, S)}", str(tuple(key_padding_mask.shape)))
        masks.append(key_padding_mask.reshape(B, 1, 1, S))
    return one_mask(masks, dtype)


def one_mask(masks: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Masks as PyTorch's layers take them, True is hidden, as one: bool, True takes part, or added."""
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return functools.reduce(torch.logical_and, [mask.logical_not() for mask in masks])
    added = [
        torch.zeros_like(m, dtype=dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m.to(dtype)
        for m in masks
    ]
    return functools.reduce(torch.add, added)


def dtype_of(weight: Tensor) -> str:
    """The dtype of a weight, by the name that a spec has for it. Raises ModelError for one that no spec has."""
    dtype = str(weight.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError("layer", f"weights of {', '.join(DTYPES)}", dtype, "Call layer.float() first.")
    return dtype


def _check_at_hand(name: str, value: Tensor) -> None:
    """Raises ModelError for a weight that has no numbers here."""
    kind = "a tensor on the meta device" if value.is_meta else f"a {type(value).__name__}"
    if value.is_meta or type(value) not in (Tensor, nn.Parameter):
        hint = "Load the weights first, or gather them: model.load_state_dict(full_state_dict)."
        raise ModelError("layer", f"a plain tensor as {name}", kind, hint)


def loaded(spec: AttentionSpec, state: dict[str, Tensor]) -> MultiHeadAttention:
    """A module with these weights, for inference. Raises ModelError for weights that are elsewhere, or of another dtype
    than the spec's."""
    for name, value in state.items():
        _check_at_hand(name, value)
    dtypes = {dtype_of(value) for value in state.values()}
    if dtypes != {spec.dtype}:
        raise ModelError("layer", f"{spec.dtype} weights", ", ".join(sorted(dtypes)), "Call layer.float() first.")
    module = MultiHeadAttention(spec)
    module.load_state_dict(state)
    return module.eval()

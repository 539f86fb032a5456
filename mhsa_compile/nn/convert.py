"""MultiHeadAttention from the attention layers of PyTorch and Hugging Face; the weights are copied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mhsa_compile.errors import ModelError
from mhsa_compile.nn.modules import MultiHeadAttention
from mhsa_compile.spec.attention_spec import AttentionSpec
from mhsa_compile.spec.checks import DTYPES
from mhsa_compile.spec.position_encoding import SCALINGS, Rope


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

    Raises ModelError for add_bias_kv and add_zero_attn, which have no counterpart, for a quantised out_proj, and for
    weights that are elsewhere: on the meta device, or sharded.

    >>> layer = nn.MultiheadAttention(64, 4, batch_first=True)
    >>> from_torch(layer, mask="key_padding").spec.mask
    'key_padding'
    >>> spec = from_torch(nn.MultiheadAttention(64, 4, kdim=48, vdim=32)).spec
    >>> spec.kv_embed_dim, spec.v_embed_dim
    (48, 32)
    """
    if layer.bias_k is not None or layer.bias_v is not None:
        raise ModelError("layer", "nn.MultiheadAttention without add_bias_kv", "add_bias_kv=True")
    if layer.add_zero_attn:
        raise ModelError("layer", "nn.MultiheadAttention without add_zero_attn", "add_zero_attn=True")
    if not isinstance(layer.out_proj, nn.Linear):
        raise ModelError("layer", "an out_proj that is an nn.Linear", type(layer.out_proj).__name__)
    separate_values = separate_values or layer.kdim != layer.vdim
    cross = cross or separate_values or layer.kdim != layer.embed_dim
    spec = AttentionSpec(
        embed_dim=layer.embed_dim,
        num_heads=layer.num_heads,
        kv_embed_dim=layer.kdim if cross else None,
        v_embed_dim=layer.vdim if separate_values else None,
        bias=layer.in_proj_bias is not None,
        dtype=_dtype_of(layer.out_proj.weight),
        causal=causal,
        mask=mask,
        outputs=tuple(outputs),
    )
    separate = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    projections = separate if layer.in_proj_weight is None else layer.in_proj_weight.chunk(3)
    state = {f"{name}_proj.weight": weight for name, weight in zip("qkv", projections, strict=True)}
    if spec.bias:
        state |= {f"{name}_proj.bias": bias for name, bias in zip("qkv", layer.in_proj_bias.chunk(3), strict=True)}
        state["out_proj.bias"] = layer.out_proj.bias
    state["out_proj.weight"] = layer.out_proj.weight  # what it is after a parametrization, too
    return _loaded(spec, state)


def from_bert(
    layer: nn.Module, *, mask: str | None = "key_padding", outputs: Sequence[str] = ("y",)
) -> MultiHeadAttention:
    """The attention of a Hugging Face BertAttention (or RoBERTa, ...) at inference; the weights are copied.

    The result ends with `layer.output.dense`: dropout, residual and LayerNorm stay outside. A layer for
    cross-attention takes `context`; a causal one becomes causal. `outputs` is what a call returns: see AttentionSpec.

    Raises ModelError, among others for a bare BertSelfAttention: the output projection is not in it.

    >>> from transformers.models.bert import modeling_bert
    >>> config = modeling_bert.BertConfig(hidden_size=64, num_attention_heads=4)
    >>> from_bert(modeling_bert.BertAttention(config)).spec.head_dim
    16
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
        outputs=tuple(outputs),
    )
    parts = {"q_proj": core.query, "k_proj": core.key, "v_proj": core.value, "out_proj": output.dense}
    state = {f"{part}.{name}": value for part, m in parts.items() for name, value in m.state_dict().items()}
    return _loaded(spec, state)


def from_llama(
    layer: nn.Module,
    *,
    kv_cache: bool = False,
    max_length: int | None = None,
    window: tuple[int, int] | None = None,
    outputs: Sequence[str] = ("y",),
) -> MultiHeadAttention:
    """The attention of a Hugging Face LlamaAttention (or Mistral, Qwen2, ...) at inference; the weights are copied.

    kv_cache     whether calls write into a cache
    max_length   positions of the rotary tables; by default the config's max_position_embeddings
    window       of layers that have one, which their config says
    outputs      what a call returns: see AttentionSpec

    Positions are 0, 1, ... (behind the cache's), as in one sequence without padding. Raises ModelError: projections of
    other names, norms of queries and keys, and scalings of positions but those of `position_encoding.SCALINGS`.

    >>> from transformers.models.llama import modeling_llama
    >>> config = modeling_llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    >>> from_llama(modeling_llama.LlamaAttention(config, layer_idx=0), kv_cache=True).spec.num_kv_heads
    2
    """
    named = ((name, getattr(layer, name, None)) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    parts = {name: part for name, part in named if isinstance(part, nn.Linear)}
    config: Any = getattr(layer, "config", None)
    if config is None or len(parts) < 4:
        raise ModelError("layer", "a LlamaAttention: q_proj, k_proj, v_proj, o_proj and a config", type(layer).__name__)
    if norms := [name for name in ("q_norm", "k_norm") if hasattr(layer, name)]:
        raise ModelError("layer", "queries and keys without norms of their own", ", ".join(norms))
    head_dim = parts["q_proj"].out_features // config.num_attention_heads
    spec = AttentionSpec(
        embed_dim=parts["q_proj"].in_features,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=head_dim,
        bias=any(part.bias is not None for part in parts.values()),
        dtype=_dtype_of(parts["q_proj"].weight),
        causal=True,
        window=window,
        scale=float(getattr(layer, "scaling", head_dim**-0.5)),
        rope=_rope_of(layer, config, head_dim, max_length),
        kv_cache=kv_cache,
        outputs=tuple(outputs),
    )
    state = {}
    for name, part in parts.items():
        ours = "out_proj" if name == "o_proj" else name
        state[f"{ours}.weight"] = part.weight
        if spec.bias:  # some models have it in three of the four
            state[f"{ours}.bias"] = part.weight.new_zeros(part.out_features) if part.bias is None else part.bias
    return _loaded(spec, state)


def _rope_of(layer: nn.Module, config: Any, head_dim: int, max_length: int | None) -> Rope:
    """The rotary embedding that a config of transformers describes, in the words of version 5 or before."""
    said = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    if kinds := [name for name, value in said.items() if isinstance(value, Mapping)]:
        kind = getattr(layer, "layer_type", None)
        if kind not in kinds:
            raise ModelError("layer", f"a layer_type among {', '.join(kinds)}, as its config has", repr(kind))
        said = dict(said[kind])
    share = float(said.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", None) or 1.0))
    return Rope(
        theta=float(said.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        rotary_dim=int(head_dim * share),
        max_length=config.max_position_embeddings if max_length is None else max_length,
        **_scaling_of(config, said),
    )


def _scaling_of(config: Any, said: dict[str, Any]) -> dict[str, Any]:
    """The fields of a Rope that scale it. Source: transformers' modeling_rope_utils, ROPE_INIT_FUNCTIONS."""
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "default":
        return {}
    if kind not in SCALINGS:
        expected = f"rotary positions as they are, or scaled by a table that no call changes: {', '.join(SCALINGS)}"
        raise ModelError("layer", expected, f"rope_type={kind!r}")
    if kind == "linear":
        return {"factor": float(said.get("factor", 1.0))}
    longest = config.max_position_embeddings
    trained = said.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    fields = {"scaling": kind, "original_max_length": int(trained or longest)}
    fields["factor"] = float(said.get("factor") or longest / fields["original_max_length"])
    fields |= {name: said[name] for name in SCALINGS[kind] if said.get(name) is not None}
    mscales = [float(said.get(name) or 0) for name in ("mscale", "mscale_all_dim")]
    if kind == "yarn" and said.get("attention_factor") is None and all(mscales):
        over, under = (0.1 * mscale * math.log(max(fields["factor"], 1.0)) + 1.0 for mscale in mscales)
        fields["attention_factor"] = over / under
    return fields


def _dtype_of(weight: Tensor) -> str:
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


def _loaded(spec: AttentionSpec, state: dict[str, Tensor]) -> MultiHeadAttention:
    for name, value in state.items():
        _check_at_hand(name, value)
    dtypes = {_dtype_of(value) for value in state.values()}
    if dtypes != {spec.dtype}:
        raise ModelError("layer", f"{spec.dtype} weights", ", ".join(sorted(dtypes)), "Call layer.float() first.")
    module = MultiHeadAttention(spec)
    module.load_state_dict(state)
    return module.eval()

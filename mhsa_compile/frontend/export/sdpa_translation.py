"""How torch.onnx.export writes `F.scaled_dot_product_attention` as the operator Attention, in all forms modules use.

PyTorch's own translation refuses heads that broadcast (Falcon's one head of keys), `enable_gqa` where the numbers of
heads are equal, and three axes.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from typing import Any

from onnxscript import opset23 as op

GraphValue = Any  # a tensor of the graph that is being written


def scaled_dot_product_attention(
    query: GraphValue,
    key: GraphValue,
    value: GraphValue,
    attn_mask: GraphValue | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> GraphValue:
    """Attention of query (B, H, L, E), key (B, G, S, E) and value (B, G, S, F), or all of them without B or H; G may be
    1.

    The export is of a module at inference: nothing is dropped. Raises ValueError for what Attention has no words for.
    """
    ranks, axis = {len(tensor.shape) for tensor in (query, key, value)}, op.Constant(value_ints=[1])
    if ranks == {3}:
        if attn_mask is not None and len(attn_mask.shape) == 3:
            attn_mask = op.Unsqueeze(attn_mask, axis)
        query, key, value = (op.Unsqueeze(tensor, axis) for tensor in (query, key, value))
    elif ranks != {4}:
        raise ValueError(f"queries, keys and values of {', '.join(map(str, sorted(ranks)))} axes")
    else:
        heads = [tensor.shape[1] for tensor in (query, key, value)]
        if heads[1] != heads[2] or not all(isinstance(count, int) for count in heads) or heads[0] % heads[1]:
            raise ValueError("queries, keys and values of {}, {} and {} heads".format(*heads))
        if heads[1] not in (1, heads[0]) and not enable_gqa:
            raise ValueError(f"{heads[0]} heads of queries and {heads[1]} of keys without enable_gqa")
    y, *_ = op.Attention(query, key, value, attn_mask, is_causal=int(is_causal), scale=scale)
    return op.Squeeze(y, axis) if ranks == {3} else y

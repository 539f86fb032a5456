"""Microsoft's Attention and MultiHeadAttention in the standard's words.

Both add their masks: `mask_filter_value` (-10000 if not given) where a key is padding. So it is added here as well,
never taken for -inf: over a row that is padding only, the softmax is that of the scores as they are.
Notation: B batch, L query length, S key length of this call, P of the past, T = P + S, D embed, H heads, E head dim.
"""

from __future__ import annotations

import numpy as np

from mhsa_compile.frontend.canonicalize.microsoft.node import MicrosoftNode


def attention(node: MicrosoftNode) -> None:
    """x (B, L, D), weights (D, 3HE), bias, mask, past (2, B, H, P, E), attention_bias -> y, present (2, B, H, T, E)."""
    x, weights, bias, mask, past, attention_bias = node.inputs[:6]
    array = node.array(weights)
    sizes = node.attrs.get("qkv_hidden_sizes") or [array.shape[1] // 3] * 3
    projections = _projections(node, x, array, node.array(bias) if bias else None, sizes)
    of_projections(node, projections, mask, past, attention_bias, node.dtype(weights, x))


def of_projections(
    node: MicrosoftNode, projections: list[str], mask: str, past: str, attention_bias: str, dtype: str
) -> None:
    """Attention of queries, keys and values (B, L, HE), as an Attention of theirs says it -> y, present."""
    x, heads = node.inputs[0], node.attrs["num_heads"]
    halves = _halves(node, past) if past else ("", "")
    parts = [(halves[0], 2), (x, 1)] if past else [(x, 1)]
    bias_of_scores = _bias_of_scores(node, mask, attention_bias, dtype, parts)
    presents = [node.rewriter.fresh("present") for _ in "kv"] if node.outputs[1] else []
    attrs = {
        "q_num_heads": heads,
        "kv_num_heads": heads,
        "is_causal": node.attrs.get("unidirectional", 0),
        **node.scale,
    }
    node.rewriter.nodes("Attention", (*projections, bias_of_scores, *halves), [node.outputs[0], *presents], **attrs)
    if presents:
        both = [node.write("Unsqueeze", name, node.ints(0)) for name in presents]
        node.write("Concat", *both, output=node.outputs[1], axis=0)


def _projections(
    node: MicrosoftNode, x: str, weight: np.ndarray, bias: np.ndarray | None, sizes: list[int]
) -> list[str]:
    """Queries, keys and values as three linears: what is side by side in the file is cut."""
    results, cuts = [], np.cumsum(sizes)[:-1]
    biases = np.split(bias, cuts) if bias is not None else [None] * 3
    source = node.inputs[1]
    for role, part, offset in zip(("query", "key", "value"), np.split(weight, cuts, axis=1), biases, strict=True):
        constant = node.constant(np.ascontiguousarray(part), hint=f"{source}.{role}")
        product = node.write("MatMul", x, constant)
        if offset is not None:
            product = node.write("Add", product, node.constant(offset, hint=f"{node.inputs[2]}.{role}"))
        results.append(product)
    return results


def _halves(node: MicrosoftNode, past: str) -> tuple[str, str]:
    first, second = (node.write("Gather", past, node.constant(i, "int64"), axis=0) for i in (0, 1))
    return first, second


def multi_head_attention(node: MicrosoftNode) -> None:
    """query (B, L, D), key and value (B, S, D) or (B, H, S, E), or packed; bias; mask; attention_bias; past.

    Packed are query and key and value as (B, L, H, 3, E), or key and value as (B, S, H, 2, E).
    """
    query, key, value, bias, mask, attention_bias, past_key, past_value = node.inputs[:8]
    heads, dtype = node.attrs["num_heads"], node.dtype(query, bias)
    if node.attrs.get("unidirectional", 0) and key:
        lengths = [node.dims(query)[1], node.dims(key)[2 if len(node.dims(key)) == 4 else 1]]
        if lengths[0] != lengths[1]:  # from a single query ONNX Runtime hides nothing then, from several it does
            raise node.refused("unidirectional=0, or as many keys as queries", f"unidirectional=1 of {lengths}")
    attrs = {"is_causal": node.attrs.get("unidirectional", 0), **node.scale}
    apart = len(node.dims(query)) == 5 or not value or len(node.dims(key)) == 4
    if apart:
        query, key, value = _heads(node, query, key, value)
    else:
        query, key, value = _with_bias(node, query, key, value)
        attrs |= {"q_num_heads": heads, "kv_num_heads": heads}
    parts = [*([(past_key, 2)] if past_key else []), (key, 2 if apart else 1)]
    bias_of_scores = _bias_of_scores(node, mask, attention_bias, dtype, parts)
    outputs = [node.rewriter.fresh("heads") if apart else node.outputs[0], *node.outputs[1:3]]
    while not outputs[-1]:
        outputs.pop()
    node.rewriter.nodes("Attention", (query, key, value, bias_of_scores, past_key, past_value), outputs, **attrs)
    if apart:
        node.heads_together(outputs[0], node.outputs[0])


def _with_bias(node: MicrosoftNode, *values: str) -> list[str]:
    bias = node.inputs[3]
    if not bias:
        return list(values)
    sizes = [node.size(name, -1) for name in values]
    parts = np.split(node.array(bias), np.cumsum(sizes)[:-1])
    constants = [node.constant(part, hint=f"{bias}.{role}") for part, role in zip(parts, "qkv", strict=True)]
    return [node.write("Add", name, part) for name, part in zip(values, constants, strict=True)]


def _heads(node: MicrosoftNode, query: str, key: str, value: str) -> list[str]:
    """Queries, keys and values as (B, H, length, E), from whatever form they have."""
    heads, bias = node.attrs["num_heads"], node.inputs[3]
    if len(node.dims(query)) == 5 or not value:
        if bias:
            raise node.refused("no bias beside packed keys and values", repr(bias))
        if len(node.dims(query)) == 5:
            return [_unpack(node, query, i) for i in range(3)]
        return [node.heads_apart(query, heads), *(_unpack(node, key, i) for i in range(2))]
    if bias:  # keys and values are those of a cache, and have theirs already
        width = node.size(query, -1)
        query = node.write("Add", query, node.constant(node.array(bias)[:width], hint=f"{bias}.q"))
    return [node.heads_apart(query, heads), key, value]


def _unpack(node: MicrosoftNode, packed: str, place: int) -> str:
    """(B, length, H, n, E)[:, :, :, place] -> (B, H, length, E)"""
    index = node.constant(place, "int64")
    return node.write("Transpose", node.write("Gather", packed, index, axis=3), perm=[0, 2, 1, 3])


def _bias_of_scores(
    node: MicrosoftNode, mask: str, attention_bias: str, dtype: str, keys: list[tuple[str, int]]
) -> str:
    """What is added to the scores: the bias, and the padding, (B, 1, 1 or L, T); "" where there is neither.

    The mask says 1 for a key that counts, (B, T) or (B, L, T); or the end of each row, (B,), or ends and starts, (2B,).
    `keys`: values that hold them, each with the axis of its length.
    """
    if not mask:
        return attention_bias
    dims = node.dims(mask)
    if len(dims) in (2, 3):
        visible = node.write("Greater", mask, node.constant(0, node.dtype(mask)))
        visible = node.write("Unsqueeze", visible, node.ints(*((1, 2) if len(dims) == 2 else (1,))))
    else:
        bounds = [node.write("Reshape", node.write("Cast", name, to=7), node.ints(-1, 1, 1, 1)) for name in
                  _ends_and_starts(node, mask)]  # fmt: skip
        places = node.positions(*keys)
        visible = node.write("Less", places, bounds[0])
        if len(bounds) == 2:
            visible = node.write("And", visible, node.write("GreaterOrEqual", places, bounds[1]))
    fill = node.constant(node.attrs.get("mask_filter_value", -10000.0), dtype)
    padding = node.write("Where", visible, node.constant(0, dtype), fill)
    return node.write("Add", padding, attention_bias) if attention_bias else padding


def _ends_and_starts(node: MicrosoftNode, mask: str) -> list[str]:
    """The end of each row, (B,), and its start where a mask says that as well; Raises ModelError."""
    dims, batch = node.dims(mask), node.dims(node.inputs[0])[0]
    counts = node.rewriter.producer(mask, "ReduceSum")  # of EmbedLayerNormalization, whatever a file calls its batch
    if len(dims) == 1 and (dims[0] == batch or (counts is not None and len(node.dims(counts.input[0])) == 2)):
        return [mask]
    parts = node.rewriter.producer(mask, "Concat")
    if parts is not None and [node.dims(part) for part in parts.input] == [(batch,)] * 2:
        return list(parts.input)
    if len(dims) == 1 and isinstance(batch, int) and dims[0] == 2 * batch:
        outputs = [node.rewriter.fresh(role) for role in ("ends", "starts")]
        return node.rewriter.nodes("Split", (mask,), outputs, num_outputs=2)
    expected = "a mask of (B, T), (B, L, T), the end of each row (B,), or ends and starts (2B,), B fixed or two joined"
    if len(dims) == 1:  # (3B + 2,) adds where rows begin in tensors without padding, of which no shape tells
        expected += "; of one that also says where packed rows begin, the first B are the ends"
    raise node.refused(expected, f"{mask!r} of {dims}")

"""Microsoft's GroupQueryAttention and RotaryEmbedding in the standard's words.

Notation: B batch, L length of this call, P length of the past's buffer, H heads, G key/value heads, E head dim.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from onnx import helper
from onnx.helper import np_dtype_to_tensor_dtype

from mhsa_compile.frontend.canonicalize.microsoft.node import MicrosoftNode, NotYet
from mhsa_compile.kernels.interface.ops import INT4_ZERO

_FLOAT, _UINT8, _INT64 = 1, 2, 7


def rotary_embedding(node: MicrosoftNode) -> None:
    """x (B, L, D) or (B, H, L, E), position_ids (B, L) or one offset, cos and sin (positions, E / 2) -> as x."""
    x, position_ids, cos, sin = node.inputs[:4]
    if len(node.dims(position_ids)) == 1:
        axis = 1 if len(node.dims(x)) == 3 else 2
        offset = node.write("Reshape", position_ids, node.ints(1, 1))
        places = node.write("Add", offset, node.positions((x, axis)))
        batch = node.write("Shape", x, start=0, end=1)
        shape = node.write("Concat", batch, node.ints(1), axis=0)
        position_ids = node.write("Expand", places, shape)
    _rotate(node, x, position_ids, cos, sin, node.attrs.get("num_heads", 0), node.outputs[0])


def _rotate(node: MicrosoftNode, x: str, positions: str, cos: str, sin: str, heads: int, output: str = "") -> str:
    attrs: dict[str, Any] = {"interleaved": node.attrs.get("rotary_interleaved", node.attrs.get("interleaved", 0))}
    dims = node.dims(x)
    if len(dims) == 3:
        partial = node.attrs.get("rotary_embedding_dim", 0)
        if not heads:
            heads = node.size(x, -1) // (2 * node.size(cos, -1))
        if not partial and node.size(x, -1) // heads != 2 * node.size(cos, -1):
            partial = 2 * node.size(cos, -1)
        attrs |= {"num_heads": heads, "rotary_embedding_dim": partial}
    elif node.attrs.get("rotary_embedding_dim"):
        attrs["rotary_embedding_dim"] = node.attrs["rotary_embedding_dim"]
    return node.write("RotaryEmbedding", x, cos, sin, positions, output=output, **attrs)


def group_query_attention(node: MicrosoftNode) -> None:
    """query (B, L, HE) or all three packed, key and value (B, L, GE), past_key and past_value (B, G, P, E), seqlens_k
    (B,), total_sequence_length, cos_cache, sin_cache, position_ids, attention_bias, head_sink (H,) -> y, present_key,
    present_value, and the scores or what the softmax gives, as `qk_output` says.

    Causal, unless it says that it is not. The keys and values of row b of the batch stand behind the
    seqlens_k[b] + 1 - L that it has already, or from 0 on where the call brings them all (a first prompt, whose rows
    may end in padding). Past and present of eight or four bits have k_scale and v_scale, of all numbers or of each
    channel: queries are multiplied by the one, y by the other. Of four bits a byte has two, the first in its lower
    half, 8 above what they are. Scales are of float32, as is then all that lies between them.
    """
    query, key, value, past_key, past_value, last, _, cos, sin, position_ids = node.inputs[:10]
    bits = node.attrs.get("kv_cache_bit_width", 0)
    heads, groups = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    shape_of = query
    if not key:
        query, key, value = _split(node, query, heads, groups)
    length = node.write("Shape", shape_of, start=1, end=2)
    whole = node.write("Reshape", node.write("Cast", last, to=_INT64), node.ints(-1))
    whole = node.write("Max", node.write("Add", whole, node.ints(1)), length)
    before = node.write("Sub", whole, length)
    if node.attrs.get("do_rotary", 0):
        if not position_ids:
            position_ids = node.write("Unsqueeze", before, node.ints(1))
            position_ids = node.write("Add", position_ids, node.positions((shape_of, 1)))
        query = _rotate_heads(node, query, position_ids, cos, sin, heads)
        key = _rotate_heads(node, key, position_ids, cos, sin, groups)
    if bits:
        query, key, value = (_as_scales(node, rows) for rows in (query, key, value))
        query = node.write("Mul", query, _of_query_heads(node, node.inputs[12], past_key))
        key, value = (_rounded(node, rows, scale) for rows, scale in zip((key, value), node.inputs[12:14], strict=True))
    query = node.heads_apart(query, heads)
    key, value = (node.heads_apart(name, groups) for name in (key, value))
    if bits == 4:
        key, value = (_packed(node, name) for name in (key, value))
    presents = [name or node.rewriter.fresh("present") for name in node.outputs[1:3]]
    lengths = whole if past_key else ""
    if node.attrs.get("sliding_window_cache", 0):
        window = _Window(node, whole, before, length)
        lengths, append = window.filled, window.append
    else:
        append = functools.partial(_append, node, before=before)
    key, value = (
        append(new, past, present=present)
        for new, past, present in zip((key, value), (past_key, past_value), presents, strict=True)
    )
    if bits:
        floats = _unpacked if bits == 4 else _cast
        key, value = (floats(node, name) for name in (key, value))
    y = _attention(node, query, key, value, lengths, before)
    if not bits:
        node.heads_together(y, node.outputs[0])
        return
    rows = node.rewriter.fresh("rows")
    node.heads_together(y, rows)
    dtype = node.dtype(node.inputs[0])
    product = node.outputs[0] if dtype == "float32" else node.rewriter.fresh("product")
    node.write("Mul", rows, _of_query_heads(node, node.inputs[13], past_value), output=product)
    if product != node.outputs[0]:
        node.write("Cast", product, output=node.outputs[0], to=np_dtype_to_tensor_dtype(np.dtype(dtype)))


def _attention(node: MicrosoftNode, query: str, key: str, value: str, lengths: str, before: str) -> str:
    """y (B, H, L, E): the standard's Attention, or ours where heads have sinks."""
    bias, sinks = node.inputs[10:12]
    attrs: dict[str, Any] = {"is_causal": node.attrs.get("causal", 1), **node.scale}
    if node.attrs.get("softcap"):
        attrs["softcap"] = node.attrs["softcap"]
    if node.attrs.get("local_window_size", -1) > 0:
        attrs["left_window_size"] = node.attrs["local_window_size"] - 1  # theirs counts the query itself
    if node.attrs.get("smooth_softmax", 0) > 0 and not sinks:
        sinks = node.constant(np.zeros(node.attrs["num_heads"]), node.dtype(node.inputs[0]))
    if node.attrs.get("kv_cache_bit_width", 0):
        bias, sinks = (name and _as_scales(node, name) for name in (bias, sinks))
    inputs, outputs = [query, key, value, bias, "", "", lengths], [node.rewriter.fresh("attention")]
    if node.outputs[3] and (kind := node.attrs.get("qk_output", 0)):
        outputs += ["", "", node.rewriter.fresh("scores")]
        attrs["qk_matmul_output_mode"] = _STAGES[kind]
    if sinks:
        attention = helper.make_node("Attention", [*inputs, sinks], outputs, **attrs)
        node.definitions.define(attention, bool_mask=False)
        node.rewriter.append(attention)
    else:
        node.rewriter.nodes("Attention", tuple(inputs), outputs, **attrs)
    if len(outputs) > 1:
        _scores(node, outputs[3], key, bias, before)
    return outputs[0]


_STAGES = {1: 1, 2: 3}
"""Their qk_output -> the standard's qk_matmul_output_mode: capped scores, which masks have not seen; weights."""


def _scores(node: MicrosoftNode, scores: str, key: str, bias: str, before: str) -> None:
    """Their output_qk, of total_sequence_length keys: scores with the bias, 0 where a query does not see a key, or
    weights."""
    total = node.write("Reshape", node.write("Cast", node.inputs[6], to=_INT64), node.ints(-1))
    if node.attrs["qk_output"] == 1:
        if bias:
            scores = node.write("Add", scores, bias)
        visible = _visible(node, key, before)
        scores = node.write("Where", visible, scores, node.constant(0, node.dtype(node.inputs[0])))
    node.write("Slice", scores, node.ints(0), total, node.ints(3), output=node.outputs[3])


def _visible(node: MicrosoftNode, key: str, before: str) -> str:
    """(B, 1, L, S): the keys up to a query's own, of a window if there is one."""
    rows = node.write("Add", node.write("Unsqueeze", before, node.ints(1)), node.positions((node.inputs[0], 1)))
    own, places = node.write("Unsqueeze", rows, node.ints(1, 3)), node.positions((key, 2))
    visible = node.write("LessOrEqual", places, own)
    if (window := node.attrs.get("local_window_size", -1)) <= 0:
        return visible
    return node.write("And", visible, node.write("Greater", places, node.write("Sub", own, node.ints(window))))


def _as_scales(node: MicrosoftNode, name: str) -> str:
    """A value of the node's dtype in float32."""
    return name if node.dtype(node.inputs[0]) == "float32" else _cast(node, name)


def _cast(node: MicrosoftNode, name: str) -> str:
    return node.write("Cast", name, to=_FLOAT)


def _is_one(node: MicrosoftNode, scale: str) -> bool:
    return all(size == 1 for size in node.dims(scale))


def _of_query_heads(node: MicrosoftNode, scale: str, past: str) -> str:
    """A scale of all numbers, or of each channel of each key head as a row of all query heads."""
    if _is_one(node, scale):
        return node.write("Reshape", scale, node.ints(1))
    heads, groups = node.attrs["num_heads"], node.attrs["kv_num_heads"]
    size = node.size(past, 3) * 8 // node.attrs["kv_cache_bit_width"]
    each = node.write("Reshape", scale, node.ints(groups, 1, size))
    spread = node.write("Expand", each, node.ints(groups, heads // groups, size))
    return node.write("Reshape", spread, node.ints(heads * size))


def _rounded(node: MicrosoftNode, rows: str, scale: str) -> str:
    """Rows (B, L, GE) in steps of a scale, or of one for each column."""
    if _is_one(node, scale):
        number = node.write("Squeeze", scale) if node.dims(scale) else scale
        return node.write("QuantizeLinear", rows, number, node.constant(0, "int8"))
    columns = math.prod(size for size in node.dims(scale) if isinstance(size, int))
    vector = node.write("Reshape", scale, node.ints(columns))
    return node.write("QuantizeLinear", rows, vector, node.constant([0] * columns, "int8"), axis=2)


def _packed(node: MicrosoftNode, rows: str) -> str:
    """Numbers of eight bits (B, G, L, E) brought into four, two to a byte: (B, G, L, E / 2) uint8."""
    least, most = (node.constant(number, "int8") for number in (-INT4_ZERO, 15 - INT4_ZERO))
    whole = node.write("Add", node.write("Clip", rows, least, most), node.constant(INT4_ZERO, "int8"))
    halves = node.write("Cast", whole, to=_UINT8)
    pairs = node.write("Reshape", halves, node.ints(0, 0, 0, -1, 2))
    lower, upper = (node.write("Gather", pairs, node.constant(half, "int64"), axis=4) for half in range(2))
    return node.write("BitwiseOr", lower, node.write("BitShift", upper, node.constant(4, "uint8"), direction="LEFT"))


def _unpacked(node: MicrosoftNode, cache: str) -> str:
    """The numbers of a cache of four bits, (B, G, C, E). `fusion.stored_rows` looks through these nodes."""
    lower = node.write("BitwiseAnd", cache, node.constant(15, "uint8"))
    upper = node.write("BitShift", cache, node.constant(4, "uint8"), direction="RIGHT")
    last = node.ints(4)
    pairs = node.write("Concat", *(node.write("Unsqueeze", half, last) for half in (lower, upper)), axis=4)
    halves = node.write("Cast", node.write("Reshape", pairs, node.ints(0, 0, 0, -1)), to=_FLOAT)
    return node.write("Sub", halves, node.constant(INT4_ZERO, "float32"))


def _split(node: MicrosoftNode, packed: str, heads: int, groups: int) -> list[str]:
    head = node.size(packed, -1) // (heads + 2 * groups)
    outputs = [node.rewriter.fresh(role) for role in ("query", "key", "value")]
    sizes = node.ints(heads * head, groups * head, groups * head)
    return node.rewriter.nodes("Split", (packed, sizes), outputs, axis=2)


def _rotate_heads(node: MicrosoftNode, rows: str, positions: str, cos: str, sin: str, heads: int) -> str:
    width = node.size(node.inputs[0], -1)
    kinds = node.attrs["num_heads"] + (0 if node.inputs[1] else 2 * node.attrs["kv_num_heads"])
    partial = 2 * node.size(cos, -1)
    attrs = {"interleaved": node.attrs.get("rotary_interleaved", 0), "num_heads": heads}
    if partial != width // kinds:
        attrs["rotary_embedding_dim"] = partial
    return node.write("RotaryEmbedding", rows, cos, sin, positions, **attrs)


def _append(node: MicrosoftNode, new: str, past: str, *, before: str, present: str) -> str:
    """The keys (or values) of this call behind those of the past, as `present`: where the past's buffer has room for
    them, in it; else in one that is longer by what is new."""
    if not past:
        return node.write("Identity", new, output=present)
    room = past if _is_buffer(node, past, present) else node.write("Concat", past, new, axis=2)
    return node.write("TensorScatter", room, new, before, output=present, axis=2)


class _Window:
    """A cache of C keys that holds the last ones of each row of the batch, at least those of the window, from its
    first place on. Behind T tokens it holds L(T) = T up to T = C; then G = C - window + 1 leave at a time."""

    def __init__(self, node: MicrosoftNode, whole: str, before: str, length: str) -> None:
        self._node, self._length = node, length
        self._capacity = node.write("Shape", node.inputs[3], start=2, end=3)
        self._leaving = node.write("Sub", self._capacity, node.ints(node.attrs["local_window_size"] - 1))
        self._before = self._held(before)
        self.filled = node.write("Add", self._before, length)
        first = node.write("Sub", self.filled, self._held(whole))
        places = node.write("Add", node.write("Unsqueeze", first, node.ints(1)), node.positions((node.inputs[3], 2)))
        last = node.write("Sub", node.write("Add", self._capacity, length), node.ints(1))
        self._kept = node.write("Unsqueeze", node.write("Min", places, last), node.ints(2))

    def _held(self, tokens: str) -> str:
        """L(T) of each row."""
        node, zero = self._node, self._node.ints(0)
        beyond = node.write("Max", node.write("Sub", tokens, self._capacity), zero)
        above = node.write("Sub", node.write("Add", beyond, self._leaving), node.ints(1))
        times = node.write("Div", above, self._leaving)
        return node.write("Sub", tokens, node.write("Mul", times, self._leaving))

    def append(self, new: str, past: str, present: str) -> str:
        """The keys (or values) that this call reads; those that are kept are `present`."""
        node = self._node
        room = node.write("Concat", past, new, axis=2)
        rows = node.write("TensorScatter", room, new, self._before, axis=2)
        by_place = node.write("Transpose", rows, perm=[0, 2, 1, 3])
        kept = node.write("GatherND", by_place, self._kept, batch_dims=1)
        node.write("Transpose", kept, output=present, perm=[0, 2, 1, 3])
        return rows


def _is_buffer(node: MicrosoftNode, past: str, present: str) -> bool:
    """Whether the present is the past's buffer, with what is new in it: where the file says one length of both.

    Where it says none of the present, a past of a fixed length is a buffer if it can hold what the call brings, and
    one of a free length grows.
    """
    length, declared = node.dims(past)[2], node.rewriter.graph.shape(present)
    if length is None:
        raise NotYet(f"{past!r} of unknown length")
    if declared is not None and declared[2] is not None:
        return declared[2] == length
    brought = node.dims(node.inputs[0])[1]
    buffer = isinstance(length, int) and length >= (brought if isinstance(brought, int) else 1)
    guess = "the buffer of" if buffer else "longer than"
    node.note = f"{present!r} has no length in the file: taken to be {guess} {past!r}"
    return buffer

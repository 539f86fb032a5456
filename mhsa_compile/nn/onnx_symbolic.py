"""ONNX operators as an exported graph holds them, written by name instead of being traced.

What ONNX Attention has no word for is one operator of the domain "mhsa", also named Attention: inputs 0 to 6,
attributes and outputs 0 to 3 as the standard's, then inputs by `mhsa_operator.INPUTS`, and from FIRST_TENSOR on what
functions of scores capture; `mhsa_operator` says the rest, and defines it for everybody else.

Notation: B batch, L query length, S key length, C capacity of a cache, H heads, G key/value heads, E head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.onnx.ops import symbolic, symbolic_multi_out

from mhsa_compile.nn import mhsa_operator
from mhsa_compile.nn.score_features import FEATURES, FeatureTensors, limits_of
from mhsa_compile.spec.attention_spec import DOMAIN, AttentionSpec
from mhsa_compile.spec.outputs import SoftmaxOutputs, inside_of
from mhsa_compile.spec.position_encoding import Rope


def attention_opset(spec: AttentionSpec, *, free_lengths: bool) -> int:
    """The first opset that has the words for `spec`."""
    numbered = inside_of(spec.outputs).names or (free_lengths and spec.causal == "bottom_right")
    return max(24 if numbered else 23, *(feature.opset(spec) for feature in FEATURES))


def attention_node(
    spec: AttentionSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    tensors: FeatureTensors,
    *,
    lengths: Tensor | None = None,
    free_lengths: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Attention in the 3-D form (heads side by side) or the 4-D one, by the rank of q; and what `spec.outputs` wants of
    its softmax.

    tensors        what the module holds for the features of scores
    lengths        how many of the keys are valid, int64 (B,)
    free_lengths   whether S may differ from L
    """
    attributes: dict[str, Any] = {}
    if q.ndim == 3:
        attributes |= {"q_num_heads": spec.num_heads, "kv_num_heads": spec.num_kv_heads}
    if spec.scale is not None:
        attributes["scale"] = spec.scale
    attributes |= limits_of(spec)
    for feature in FEATURES:
        attributes |= feature.words(spec)
    if lengths is None and free_lengths and spec.causal == "bottom_right":
        # The operator's offset is nonpad_kv_seqlen - L from opset 24 on: all S keys are valid, so it is S - L.
        lengths = _key_lengths(k)
    tensors = {**tensors, "mask": mask, "lengths": lengths}
    places: dict[str, Tensor | None] = {"Q": q, "K": k, "V": v}
    places |= {feature.role: feature.input(spec, tensors) for feature in FEATURES if feature.role}
    captures = [tensor for feature in FEATURES for tensor in feature.captures(spec, tensors)]
    inputs = [places.get(role) for role in mhsa_operator.INPUTS]
    inputs += [None] * (mhsa_operator.FIRST_TENSOR - len(inputs))
    inputs += captures
    while inputs[-1] is None and len(inputs) > 4:
        inputs.pop()
    outputs = inside_of(spec.outputs)
    own = outputs.names != () or not mhsa_operator.is_standard(attributes, inputs)
    name = f"{DOMAIN}::Attention" if own else "Attention"
    version = 1 if own else attention_opset(spec, free_lengths=free_lengths)
    shape = (*q.shape[:-1], spec.num_heads * spec.v_head_dim if q.ndim == 3 else spec.v_head_dim)
    if not outputs.names:
        return symbolic(name, inputs, attributes, dtype=q.dtype, shape=shape, version=version), {}
    attributes |= mhsa_operator.attributes_of(outputs)
    extra = _inside_shapes(spec, outputs, B=q.shape[0], L=q.shape[-2], S=k.shape[-2])
    dtypes = [q.dtype if name == "weights" else _INSIDE_DTYPES.get(name, torch.float32) for name in extra]
    # They come side by side, without places for outputs that are not there: `mhsa_operator.put_in_place`.
    y, *arrays = symbolic_multi_out(
        name, inputs, attributes, dtypes=[q.dtype, *dtypes], shapes=[shape, *extra.values()], version=version
    )
    return y, dict(zip(extra, arrays, strict=True))


_INSIDE_DTYPES = {"top_k_keys": torch.int64}


def _inside_shapes(
    spec: AttentionSpec, outputs: SoftmaxOutputs, *, B: int, L: int, S: int
) -> dict[str, tuple[int, ...]]:
    rows = (B, spec.num_heads, L)
    heads, queries = (count if indices is None else len(indices)
                      for count, indices in ((spec.num_heads, outputs.heads), (L, outputs.rows)))  # fmt: skip
    shapes = {
        "lse": rows,
        "entropy": rows,
        "top_k_weights": (*rows, outputs.top_k),
        "top_k_keys": (*rows, outputs.top_k),
        "weights": (B, heads, queries, S),
    }
    return {name: shapes[name] for name in outputs.names}


def rotary_node(rope: Rope, rows: Tensor, heads: int, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """RotaryEmbedding of rows (B, L, heads * E) at positions, int64 (B, L)."""
    attributes: dict[str, Any] = {"num_heads": heads, "interleaved": int(rope.interleaved)}
    if rope.rotary_dim != rows.shape[-1] // heads:
        attributes["rotary_embedding_dim"] = rope.rotary_dim
    inputs = (rows, cos, sin, positions)
    return symbolic("RotaryEmbedding", inputs, attributes, dtype=rows.dtype, shape=rows.shape, version=23)


def scatter_node(cache: Tensor, rows: Tensor, first: Tensor) -> Tensor:
    """TensorScatter: `cache` (B, G, C, E) with rows (B, G, L, E) from position first[b] on."""
    inputs = (cache, rows, first)
    return symbolic("TensorScatter", inputs, {"axis": 2}, dtype=cache.dtype, shape=cache.shape, version=24)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast, where x is of another dtype."""
    if x.dtype == dtype:
        return x
    attrs: dict[str, Any] = {"to": _CODES[dtype]}
    return symbolic("Cast", (x,), attrs, dtype=dtype, shape=x.shape, version=23)


_CODES = {torch.float32: 1, torch.float16: 10, torch.bfloat16: 16}
"""ONNX's numbers of dtypes."""


def quantised_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """mhsa.QuantizeRows: rows (B, G, L, E) in int8, and their steps (B, G, L) float32."""
    dtypes, shapes = [torch.int8, torch.float32], [rows.shape, rows.shape[:-1]]
    q, steps = symbolic_multi_out(f"{DOMAIN}::QuantizeRows", (rows,), dtypes=dtypes, shapes=shapes, version=1)
    return q, steps


def dequantised_rows(q: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """mhsa.DequantizeRows: what `quantised_rows` stored."""
    attrs: dict[str, Any] = {"to": _CODES[dtype]}
    return symbolic(f"{DOMAIN}::DequantizeRows", (q, steps), attrs, dtype=dtype, shape=q.shape, version=1)


def split_heads(rows: Tensor, heads: int) -> Tensor:
    """(B, L, heads * E) -> (B, heads, L, E)."""
    B, L, width = rows.shape
    inputs = (rows, _integers(0, 0, heads, width // heads))
    split = symbolic("Reshape", inputs, dtype=rows.dtype, shape=(B, L, heads, width // heads), version=23)
    return split.transpose(1, 2)


def join_heads(y: Tensor) -> Tensor:
    """(B, H, L, F) -> (B, L, H * F)."""
    B, H, L, F = y.shape
    inputs = (y.transpose(1, 2), _integers(0, 0, H * F))
    return symbolic("Reshape", inputs, dtype=y.dtype, shape=(B, L, H * F), version=23)


def places(x: Tensor, length: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """(positions of x (B, L, D), int64 (B, L), and how many keys there are then, (B,)) behind `length` (B,) others.

    Without `length` they begin at 0, and there is no count.
    """
    B, L = x.shape[:2]
    integer = torch.int64
    count = symbolic("Squeeze", (_dims(x, 1, 2), _integers(0)), dtype=integer, shape=(), version=23)
    steps = symbolic("Range", (_integer(0), count, _integer(1)), dtype=integer, shape=(L,), version=11)
    if length is None:
        return symbolic("Expand", (steps, _dims(x, 0, 2)), dtype=integer, shape=(B, L), version=23), None
    return length.unsqueeze(1) + steps, length + count


def _integer(value: int) -> Tensor:
    """A Constant node, int64 ()."""
    attrs: dict[str, Any] = {"value_int": value}
    return symbolic("Constant", (), attrs, dtype=torch.int64, shape=(), version=23)


def _integers(*values: int) -> Tensor:
    """A Constant node, int64 (n,)."""
    attrs: dict[str, Any] = {"value_ints": list(values)}
    return symbolic("Constant", (), attrs, dtype=torch.int64, shape=(len(values),), version=23)


def _key_lengths(k: Tensor) -> Tensor:
    """S for every batch entry, int64 (B,): as three ONNX operators, since the exporter's own form of it takes nine."""
    axis, shape = k.ndim - 2, (k.shape[0],)
    inputs = (_dims(k, axis, axis + 1), _dims(k, 0, 1))
    return symbolic("Expand", inputs, dtype=torch.int64, shape=shape, version=23)


def _dims(x: Tensor, start: int, end: int) -> Tensor:
    bounds: dict[str, Any] = {"start": start, "end": end}
    return symbolic("Shape", (x,), bounds, dtype=torch.int64, shape=(end - start,), version=23)

"""Two evaluations of an ONNX graph that the compiled one is held against.

`oracle` is the reference evaluator of the `onnx` package in float64, its Attention replaced by one that selects masked
positions away; `eager` is the same graph at its own dtype with PyTorch's arithmetic. Both take a block of queries at a
time, and of the keys those between the first and the last that the block sees: no L x S array is ever made.
Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from torch import Tensor

from mhsa_compile import operator_inside, reference_inside
from mhsa_compile.core import attend, look_inside, to_numpy, to_torch
from mhsa_compile.outputs import Inside
from mhsa_compile.spec import DOMAIN

Array = np.ndarray
Arrays = Mapping[str, Array]
_QUERIES = 256  # that are evaluated together
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


def oracle(model: onnx.ModelProto, inputs: Arrays) -> list[Array]:
    """The graph's outputs in float64; weights and floating inputs are promoted first, integers stay."""
    wide = {name: array if array.dtype.kind in "biu" else array.astype(np.float64) for name, array in inputs.items()}
    operators = [_GatherElements, *_attention_operators(_attend_exactly, _look_exactly)]
    evaluator = ReferenceEvaluator(promoted(model), new_ops=operators)
    with np.errstate(all="ignore"):  # NaN and Inf may come, and are carried as IEEE says
        return [np.asarray(output) for output in evaluator.run(None, wide)]


def eager(model: onnx.ModelProto, inputs: Arrays, *, int8_weights: bool = False) -> list[Array]:
    """The graph's outputs at its own dtype, matrix products and attention by PyTorch: the yardstick of the budget.

    `int8_weights`: products with a weight round it and the activations to eight bits first, see `_product_in_int8`.
    """
    operators = [
        _GatherElements,
        *_attention_operators(_attend_in_torch, _look_in_torch),
        _Int8MatMul if int8_weights else _MatMul,
        _Gemm,
    ]
    evaluator = ReferenceEvaluator(model, new_ops=operators)
    with np.errstate(all="ignore"):
        return [np.asarray(output) for output in evaluator.run(None, dict(inputs))]


def promoted(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy whose floating constants and casts are float64."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for graph in (wide.graph, *wide.functions):
        _promote(graph)
    return wide


def _promote(graph: Any) -> None:
    """Makes every floating constant, cast and input of a graph or function float64."""
    for tensor in getattr(graph, "initializer", ()):
        _promote_tensor(tensor)
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                _promote_tensor(attribute.t)
            elif attribute.type == onnx.AttributeProto.GRAPH:
                _promote(attribute.g)
            elif node.op_type == "Cast" and attribute.name == "to" and attribute.i in FLOATS:
                attribute.i = onnx.TensorProto.DOUBLE


def _promote_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in FLOATS:
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name))


def _attention_operators(attend: Callable[..., Array], look_inside: Callable[..., dict[str, Array]]) -> list[type]:
    """ONNX Attention (23 to 25) and the one of our domain, which has more inputs and outputs, for the evaluator.

    Around `attend(q, k, v, visible, bias, scale, softcap, sinks)` and `look_inside(q, k, visible, ..., wanted)`. Here
    our operator has an input 9, int64 (B, H, L, n), and an output 9: the weights of these keys, 0 for the key -1.
    """

    class Attention(OpRun):  # type: ignore[misc]  # the evaluator goes by this name
        def _run(
            self,
            q: Array,
            k: Array,
            v: Array,
            mask: Array | None = None,
            past_key: Array | None = None,
            past_value: Array | None = None,
            lengths: Array | None = None,
            sinks: Array | None = None,
            slopes: Array | None = None,
            probe: Array | None = None,
            **attributes: Any,
        ) -> tuple[Array, ...]:
            merged = q.ndim == 3
            if merged:
                q = _split_heads(q, attributes["q_num_heads"])
                k, v = (_split_heads(array, attributes["kv_num_heads"]) for array in (k, v))
            offset = 0 if lengths is None else lengths.reshape(-1, 1, 1, 1) - q.shape[2]
            if past_key is not None and past_value is not None:
                offset = past_key.shape[2]
                k, v = np.concatenate((past_key, k), axis=2), np.concatenate((past_value, v), axis=2)
            if mask is not None:
                mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
                mask = _padded(mask, k.shape[2]) if self.run_params["opsets"][""] >= 24 else mask
            stated = attributes.get("scale")
            scale = q.shape[3] ** -0.5 if stated is None else stated
            softcap = attributes.get("softcap") or 0.0
            L, S = q.shape[2], k.shape[2]

            def seen(rows: slice) -> tuple[Array, Array | None]:
                visible, bias = _seen(rows, S, offset, lengths, mask, attributes)
                return visible, bias if slopes is None else _with_slopes(bias, rows, S, offset, slopes)

            def seen_keys(rows: slice) -> tuple[slice, tuple[Any, ...]]:
                """(the keys between the first and the last that these queries see, and what makes their weights)."""
                visible, bias = seen(rows)
                keys = _between_first_and_last(visible)
                return keys, (visible[..., keys], None if bias is None else _take(bias, 3, keys), scale, softcap, sinks)

            def look(rows: slice, wanted: Inside) -> tuple[dict[str, Array], int]:
                keys, made = seen_keys(rows)
                return look_inside(q[:, :, rows], k[:, :, keys], *made, wanted), keys.start

            parts = []
            for rows in _blocks(L):
                keys, made = seen_keys(rows)
                parts.append(attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], *made))
            y = np.concatenate(parts, axis=2)
            y = y.swapaxes(1, 2).reshape(*q.shape[0:3:2], -1) if merged else y
            names = self.onnx_node.output
            if len(names) < 4:
                return y, k, v
            nothing = np.zeros(0)
            stage = nothing
            if names[3]:
                stage = _stages(q, k, *seen(slice(0, L)), scale, softcap, sinks)[attributes["qk_matmul_output_mode"]]
            inside = reference_inside.collected(look, list(_blocks(L)), L, S, operator_inside.wanted_of(self.onnx_node))
            if probe is not None:
                inside["probe"] = reference_inside.probed(look, list(_blocks(L)), S, probe)
            outputs = (y, k, v, stage, *(inside.get(name, nothing) for name in (*operator_inside.NAMES, "probe")))
            return outputs[: len(names)]

    return [Attention, type("Attention", (Attention,), {"op_domain": DOMAIN})]


def _with_slopes(bias: Array | None, rows: slice, S: int, offset: int | Array, slopes: Array) -> Array:
    """The bias with slope * (key - place of the query) on top, (1 or B, H, rows, S); summed at least in float32."""
    wide = slopes.astype(np.promote_types(np.float32, slopes.dtype))
    alibi = (wide.reshape(-1, 1, 1) * -_distance(rows, S, offset)).astype(slopes.dtype)
    result: Array = alibi if bias is None else bias + alibi
    return result


def _distance(rows: slice, S: int, offset: int | Array) -> Array:
    """(1 or B, 1, rows, S): how far query i, which stands at i + offset among the keys, is behind each key."""
    distance: Array = np.arange(rows.start, rows.stop)[:, np.newaxis] + offset - np.arange(S)
    return distance if distance.ndim == 4 else distance[np.newaxis, np.newaxis]


def _split_heads(array: Array, heads: int) -> Array:
    return array.reshape(*array.shape[:2], heads, -1).swapaxes(1, 2)


def _blocks(L: int) -> Iterator[slice]:
    for first in range(0, max(L, 1), _QUERIES):  # none at all is a block, too: its shape is the result's
        yield slice(first, min(first + _QUERIES, L))


def _seen(
    rows: slice,
    S: int,
    offset: int | Array,
    lengths: Array | None,
    mask: Array | None,
    attributes: Mapping[str, Any],
) -> tuple[Array, Array | None]:
    """What these queries see, bool (1 or B, 1 or H, rows, S), and what is added to their scores."""
    visible = _band(rows, S, offset, attributes)
    if lengths is not None:
        visible = visible & (np.arange(S) < lengths.reshape(-1, 1, 1, 1))
    if mask is None:
        return visible, None
    mask = _take(mask, 2, rows)
    return (visible & mask, None) if mask.dtype == np.bool_ else (visible, mask)


def _take(array: Array, axis: int, part: slice) -> Array:
    """A part of an axis, or all of it where it broadcasts."""
    return array if array.shape[axis] == 1 else array[(slice(None),) * axis + (part,)]


def _between_first_and_last(visible: Array) -> slice:
    seen = np.flatnonzero(visible.any(axis=(0, 1, 2)))
    return slice(seen[0], seen[-1] + 1) if seen.size else slice(0, 1)


def _band(rows: slice, S: int, offset: int | Array, attributes: Mapping[str, Any]) -> Array:
    """Causality and windows, (1 or B, 1, rows, S)."""
    distance = _distance(rows, S, offset)
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    visible = np.ones((1, 1, *distance.shape[-2:]), dtype=np.bool_)
    if attributes.get("is_causal"):
        visible = visible & (distance >= 0)
    if left is not None and left >= 0:
        visible = visible & (distance <= left)
    if right is not None and right >= 0:
        visible = visible & (-distance <= right)
    return visible


def _padded(mask: Array, S: int) -> Array:
    """From opset 24 on, a mask over fewer than S keys masks the rest."""
    widths = [(0, 0)] * (mask.ndim - 1) + [(0, S - mask.shape[-1])]
    return np.pad(mask, widths, constant_values=False if mask.dtype == np.bool_ else -np.inf)


def _stages(
    q: Array,
    k: Array,
    visible: Array,
    bias: Array | None,
    scale: float,
    softcap: float,
    sinks: Array | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Scores, capped, with bias and masked, and as weights: the operator's qk_matmul_output 0 to 3; (B, H, L, S)."""
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf may come, and are carried as IEEE says
        raw = (q * q.dtype.type(scale)) @ np.repeat(k, q.shape[1] // k.shape[1], axis=1).swapaxes(2, 3)
        capped = np.tanh(raw / q.dtype.type(softcap)) * q.dtype.type(softcap) if softcap else raw
        biased = np.where(visible, capped if bias is None else capped + bias, -np.inf)
        if bias is not None:
            biased = np.where(np.isneginf(bias), -np.inf, biased)
        seen = visible if bias is None else visible & ~np.isneginf(bias)
        sighted = seen.any(axis=-1, keepdims=True)
        largest = np.where(sighted, biased.max(axis=-1, keepdims=True, initial=-np.inf), 0)
        if sinks is not None:
            largest = np.maximum(largest, sinks.reshape(-1, 1, 1))
        exponents = np.exp(biased - largest)
        total = exponents.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + np.exp(sinks.reshape(-1, 1, 1) - largest)
        weights = np.where(seen, exponents / np.where(sighted, total, 1), 0)
    return raw.astype(q.dtype), capped.astype(q.dtype), biased.astype(q.dtype), weights.astype(q.dtype)


def _attend_exactly(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    bias: Array | None,
    scale: float,
    softcap: float,
    sinks: Array | None,
) -> Array:
    """Attention in the arrays' own dtype; a non-finite value is added key by key, to the queries that see it."""
    weights = _stages(q, k, visible, bias, scale, softcap, sinks)[3]
    v = np.repeat(v, q.shape[1] // v.shape[1], axis=1)
    seen = np.broadcast_to(visible if bias is None else visible & ~np.isneginf(bias), weights.shape)
    broken = ~np.isfinite(v).all(axis=(0, 1, 3))
    y = weights @ np.where(broken[:, np.newaxis], 0, v)
    with np.errstate(invalid="ignore"):
        for key in np.flatnonzero(broken):
            term = weights[..., key, np.newaxis] * v[..., key, np.newaxis, :]
            y = y + np.where(seen[..., key, np.newaxis], term, 0)
    return np.asarray(y)


def _attend_in_torch(
    q: Array,
    k: Array,
    v: Array,
    visible: Array,
    bias: Array | None,
    scale: float,
    softcap: float,
    sinks: Array | None,
) -> Array:
    added, extra = (None if array is None else to_torch(array) for array in (bias, sinks))
    return to_numpy(attend(to_torch(q), to_torch(k), to_torch(v), to_torch(visible), added, scale, softcap, extra))


def _look_exactly(q: Array, k: Array, *made: Any) -> dict[str, Array]:
    visible, bias, scale, softcap, sinks, wanted = made
    return reference_inside.of_rows(_stages(q, k, visible, bias, scale, softcap, sinks)[2], sinks, wanted)


def _look_in_torch(q: Array, k: Array, *made: Any) -> dict[str, Array]:
    visible, bias, scale, softcap, sinks, wanted = made
    arrays = (None if array is None else to_torch(array) for array in (visible, bias, sinks))
    visible, bias, sinks = arrays
    found = look_inside(to_torch(q), to_torch(k), visible, bias, scale, softcap, sinks, wanted)
    return {name: to_numpy(tensor) for name, tensor in found.items()}


class _MatMul(OpRun):  # type: ignore[misc]
    def _run(self, a: Array, b: Array) -> tuple[Array]:
        return (to_numpy(to_torch(a) @ to_torch(b)),)


class _Int8MatMul(OpRun):  # type: ignore[misc]
    def _run(self, a: Array, b: Array) -> tuple[Array]:
        x, w = to_torch(a), to_torch(b)
        return (to_numpy(_product_in_int8(x, w) if w.ndim == 2 else x @ w),)


def _product_in_int8(x: Tensor, w: Tensor) -> Tensor:
    """x (..., K) times w (K, N), each in steps of its largest value / 127: of a row of x, and of a column of w."""
    x_steps, w_steps = _steps(x.float(), -1), _steps(w.float(), 0)
    product = torch.round(x.float() / x_steps) @ torch.round(w.float() / w_steps)
    return (product * x_steps * w_steps).to(x.dtype)


def _steps(values: Tensor, dim: int) -> Tensor:
    steps = values.abs().amax(dim, keepdim=True) / 127
    return torch.where(steps > 0, steps, 1.0)


class _Gemm(OpRun):  # type: ignore[misc]
    def _run(self, a: Array, b: Array, c: Array | None = None, **attributes: Any) -> tuple[Array]:
        left = to_torch(a.T if attributes["transA"] else a)
        right = to_torch(b.T if attributes["transB"] else b)
        product = attributes["alpha"] * (left @ right)
        return (to_numpy(product if c is None else product + attributes["beta"] * to_torch(c)),)


class _GatherElements(OpRun):  # type: ignore[misc]  # onnx's own fails on one row of indices
    def _run(self, data: Array, indices: Array, axis: int | None = None) -> tuple[Array]:
        along = axis or 0
        others = tuple(slice(None) if i == along % data.ndim else slice(n) for i, n in enumerate(indices.shape))
        return (np.take_along_axis(data[others], indices, along),)


_GatherElements.__name__ = "GatherElements"
_MatMul.__name__ = _Int8MatMul.__name__ = "MatMul"  # the evaluator goes by these names
_Gemm.__name__ = "Gemm"

"""The ONNX graph of one attention as models call it: strided operands read where they lie, and the result by rows.

Models make queries, keys and values as rows (B, L, H * E) and look at them as (B, H, L, E); a cache joins keys and
values to (B, G, S, E). The kernels read either, so the graph says which one it is, and nothing is copied.

Notation: B batch, L query length, S key length, H heads, G key/value heads, E head dim, F value head dim.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mhsa_compile.nn.mhsa_operator import INPUTS, attention_function
from mhsa_compile.spec.attention_spec import DOMAIN

Layout = Literal["rows", "heads"]
_OPSET = 24
_TYPES = {"float32": TensorProto.FLOAT, "bfloat16": TensorProto.BFLOAT16, "float16": TensorProto.FLOAT16}


class AttentionCall(NamedTuple):
    """What is compiled once: all that a call fixes but the batch and the lengths.

    H, G, E, F      heads, key/value heads, head dim, value head dim
    dtype           of all inputs but a bool mask: float32, bfloat16, float16
    scale           of the scores
    causal          query i sees key j iff j <= i
    mask            None, "bool" (True takes part) or "additive", broadcastable to (B, H, L, S)
    limits          what else a node Attention says of its scores, numbers by the names of its attributes
    of_heads        inputs of the operator mhsa.Attention, by their names, of one number a head, (H,)
    kv_layout       how keys and values lie: rows (B, S, G * E), or heads (B, G, S, E)
    """

    H: int
    G: int
    E: int
    F: int
    dtype: str
    scale: float
    causal: bool = False
    mask: str | None = None
    limits: tuple[tuple[str, float], ...] = ()
    of_heads: tuple[str, ...] = ()
    kv_layout: Layout = "heads"

    @property
    def of_one_query(self) -> AttentionCall:
        """The same call for a single query, which sees every key."""
        return self._replace(causal=False)


def graph_of(call: AttentionCall, *, one_query: bool = False) -> onnx.ModelProto:
    """q (B, L, H * E), k and v as `kv_layout` says, mask, `of_heads` -> y (B, L, H * F); L is 1 with `one_query`."""
    L: Any = 1 if one_query else "L"
    dtype = _TYPES[call.dtype]
    nodes, constants = [], []

    def by_heads(name: str, heads: int, size: int) -> str:
        constants.append(_integers(f"{name}_split", 0, 0, heads, size))
        nodes.append(helper.make_node("Reshape", [name, f"{name}_split"], [f"{name}_rows"]))
        nodes.append(helper.make_node("Transpose", [f"{name}_rows"], [f"{name}_heads"], perm=[0, 2, 1, 3]))
        return f"{name}_heads"

    inputs = [helper.make_tensor_value_info("q", dtype, ("B", L, call.H * call.E))]
    operands = [by_heads("q", call.H, call.E)]
    for name, size in (("k", call.E), ("v", call.F)):
        rows = call.kv_layout == "rows"
        shape: tuple[Any, ...] = ("B", "S", call.G * size) if rows else ("B", call.G, "S", size)
        inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        operands.append(by_heads(name, call.G, size) if rows else name)
    if call.mask is not None:
        axes = ("mask_B", "mask_H" if call.H > 1 else 1, 1 if one_query else "mask_L", "S")
        kind = TensorProto.BOOL if call.mask == "bool" else dtype
        inputs.append(helper.make_tensor_value_info("mask", kind, axes))
    inputs += [helper.make_tensor_value_info(name, dtype, (call.H,)) for name in call.of_heads]
    nodes.append(_attention(call, operands))
    nodes.append(helper.make_node("Transpose", ["y_heads"], ["y_rows"], perm=[0, 2, 1, 3]))
    constants.append(_integers("y_join", 0, 0, call.H * call.F))
    nodes.append(helper.make_node("Reshape", ["y_rows", "y_join"], ["y"]))
    y = helper.make_tensor_value_info("y", dtype, ("B", L, call.H * call.F))
    graph = helper.make_graph(nodes, "attention", inputs, [y], constants)
    opsets = [helper.make_opsetid("", _OPSET), *([helper.make_opsetid(DOMAIN, 1)] if call.of_heads else [])]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=11)
    if call.of_heads:
        node = next(node for node in nodes if node.op_type == "Attention")
        model.functions.append(attention_function(node, _OPSET, bool_mask=call.mask != "additive"))
    return model


def _attention(call: AttentionCall, operands: list[str]) -> onnx.NodeProto:
    inputs = [*operands, "mask" if call.mask is not None else ""]
    inputs += [name if name in call.of_heads else "" for name in INPUTS[len(inputs) :]]
    while not inputs[-1]:
        inputs.pop()
    attributes: dict[str, Any] = {"scale": call.scale, **dict(call.limits)}
    if call.causal:
        attributes["is_causal"] = 1
    return helper.make_node(
        "Attention", inputs, ["y_heads"], name="attention", domain=DOMAIN if call.of_heads else "", **attributes
    )


def _integers(name: str, *values: int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.array(values, np.int64), name)

"""Encoders of ONNX Runtime's own operators, as its optimizer for transformers writes them: ids -> rows."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = "com.microsoft"


def fused_encoder(
    width: int, heads: int, hidden: int, *, layers: int = 1, words: int = 50, positions: int = 16, embeds: bool = True
) -> onnx.ModelProto:
    """EmbedLayerNormalization of ids (B, L), or x (B, L, width), with a mask (B, L) of keys; then for each layer
    Attention, a linear, SkipLayerNormalization, a linear, BiasGelu, a linear, SkipLayerNormalization -> y."""
    rng, tensors, nodes = np.random.default_rng(0), list[onnx.TensorProto](), list[onnx.NodeProto]()

    def weight(name: str, *shape: int, size: float = 0.0, about: float = 0.0) -> str:
        array = rng.standard_normal(shape) * (size or shape[0] ** -0.5) + about
        tensors.append(numpy_helper.from_array(array.astype(np.float32), name))
        return name

    def node(op_type: str, inputs: list[str], output: str, domain: str = MICROSOFT, **words: object) -> str:
        more = ["lengths"] if op_type.startswith("Embed") else []
        nodes.append(helper.make_node(op_type, inputs, [output, *more], name=output, domain=domain, **words))
        return output

    def norms(name: str) -> list[str]:
        return [weight(f"{name}.gamma", width, size=0.1, about=1), weight(f"{name}.beta", width, size=0.1)]

    x = "x"
    if embeds:
        tables = [weight("words", words, width, size=1), weight("positions", positions, width, size=1)]
        segments = weight("segments", 2, width, size=1)
        x = node("EmbedLayerNormalization", ["ids", "kinds", *tables, segments, *norms("first"), "mask"], "embedded")
    for i in range(layers):
        projections = [weight(f"{i}.qkv", width, 3 * width), weight(f"{i}.qkv_bias", 3 * width, size=0.1)]
        y = node("Attention", [x, *projections, "mask"], f"{i}.attention", num_heads=heads)
        y = node("MatMul", [y, weight(f"{i}.out", width, width)], f"{i}.joined", "")
        x = node(
            "SkipLayerNormalization", [y, x, *norms(f"{i}.a"), weight(f"{i}.bias", width, size=0.1)], f"{i}.middle"
        )
        y = node("MatMul", [x, weight(f"{i}.up", width, hidden)], f"{i}.wide", "")
        y = node("BiasGelu", [y, weight(f"{i}.up_bias", hidden, size=0.1)], f"{i}.gelu")
        y = node("MatMul", [y, weight(f"{i}.down", hidden, width)], f"{i}.narrow", "")
        last = "y" if i == layers - 1 else f"{i}.y"
        x = node("SkipLayerNormalization", [y, x, *norms(f"{i}.b"), weight(f"{i}.last", width, size=0.1)], last)
    ids = [helper.make_tensor_value_info(name, TensorProto.INT32, ["B", "L"]) for name in ("ids", "kinds", "mask")]
    rows = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", "L", width]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ids if embeds else [rows[0], ids[2]], rows[1:], tensors)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=10)

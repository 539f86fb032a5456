"""Blocks of values, each with a scale and a zero point: QuantizeLinear and DequantizeLinear of what a call computes.

    QuantizeLinear(x, s, z)    ->  Round(x / s') + z', cut to what the bytes hold
    DequantizeLinear(q, s, z)  ->  (q - z') s'

s' and z' have what each element has, so the last block of an axis may be shorter. Weights by blocks are
`packed_weights`.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphView, attributes, is_standard

_WHOLE = ("int8", "uint8", "int16", "uint16")


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such nodes in other words; those of sizes that only a call knows, or of four bits, stay."""
    rewriter = Rewriter(model)
    graph = rewriter.graph
    for node in graph.nodes:
        if is_standard(node, "QuantizeLinear", "DequantizeLinear") and attributes(node).get("block_size", 0):
            places = _blocks(graph, node)
            stored = _stored_dtype(graph, node)
            if places is None or stored not in _WHOLE or graph.dtype(node.input[1]) != "float32":
                continue
            axis = attributes(node).get("axis", 1) % len(graph.dims(node.input[0]))
            write = _quantised if node.op_type == "QuantizeLinear" else _floats
            write(rewriter, node, places, axis, stored)
            rewriter.place(node)
    return rewriter.finished()


def _stored_dtype(graph: GraphView, node: onnx.NodeProto) -> str | None:
    """The dtype of the numbers that are stored."""
    if node.op_type == "DequantizeLinear":
        return graph.dtype(node.input[0])
    if len(node.input) > 2 and node.input[2]:
        return graph.dtype(node.input[2])
    kind = attributes(node).get("output_dtype", 0) or TensorProto.UINT8
    return str(helper.tensor_dtype_to_np_dtype(kind))


def _blocks(graph: GraphView, node: onnx.NodeProto) -> np.ndarray | None:
    """The block of each element along the axis; None where it is not known, or is none of its scales'."""
    dims, scales, block = graph.dims(node.input[0]), graph.dims(node.input[1]), attributes(node)["block_size"]
    axis = attributes(node).get("axis", 1)
    if len(dims) != len(scales) or not -len(dims) <= axis < len(dims) or not isinstance(dims[axis], int):
        return None
    places: np.ndarray = np.arange(dims[axis]) // block
    return places if places.size and scales[axis] == places[-1] + 1 else None


def _spread(rewriter: Rewriter, name: str, places: np.ndarray, axis: int) -> str:
    return rewriter.node("Gather", name, rewriter.constant(places, "int64"), axis=axis)


def _quantised(rewriter: Rewriter, node: onnx.NodeProto, places: np.ndarray, axis: int, stored: str) -> None:
    x, scale, zero = [*node.input, ""][:3]
    y = rewriter.node("Round", rewriter.node("Div", x, _spread(rewriter, scale, places, axis)))
    if zero:
        points = rewriter.node("Cast", _spread(rewriter, zero, places, axis), to=TensorProto.FLOAT)
        y = rewriter.node("Add", y, points)
    bounds = np.iinfo(stored)
    cut = rewriter.node("Clip", y, *(rewriter.constant(bound, "float32") for bound in (bounds.min, bounds.max)))
    rewriter.node("Cast", cut, output=node.output[0], to=helper.np_dtype_to_tensor_dtype(np.dtype(stored)))


def _floats(rewriter: Rewriter, node: onnx.NodeProto, places: np.ndarray, axis: int, stored: str) -> None:
    q, scale, zero = [*node.input, ""][:3]
    numbers = rewriter.node("Cast", q, to=TensorProto.FLOAT)
    if zero:
        points = rewriter.node("Cast", _spread(rewriter, zero, places, axis), to=TensorProto.FLOAT)
        numbers = rewriter.node("Sub", numbers, points)
    kind = attributes(node).get("output_dtype", 0)
    is_narrow = kind not in (0, TensorProto.FLOAT)
    y = rewriter.node(
        "Mul", numbers, _spread(rewriter, scale, places, axis), output="" if is_narrow else node.output[0]
    )
    if is_narrow:
        rewriter.node("Cast", y, output=node.output[0], to=kind)

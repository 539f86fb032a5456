"""A tensor cut into a sequence whose entries are then taken by number, as PyTorch's `chunk` and `split` are exported.

SequenceAt(SplitToSequence(x, sizes), i)  ->  output i of Split(x, sizes)
"""

from __future__ import annotations

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import attributes


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such sequences as outputs of a Split."""
    if not any(node.op_type == "SplitToSequence" for node in model.graph.node):
        return model
    rewriter = Rewriter(model)
    graph = rewriter.graph
    for node in graph.nodes:
        if node.op_type != "SplitToSequence" or node.output[0] in graph.outputs:
            continue
        sizes, takers = _sizes(graph, node), graph.consumers(node.output[0])
        places = [graph.scalar(taker.input[1]) if taker.op_type == "SequenceAt" else None for taker in takers]
        if sizes is None or any(place is None or not -len(sizes) <= place < len(sizes) for place in places):
            continue
        parts = [rewriter.fresh(f"{node.output[0]}/{i}") for i in range(len(sizes))]
        axis = attributes(node).get("axis", 0)
        rewriter.nodes("Split", (node.input[0], rewriter.constant(sizes, "int64")), parts, axis=axis)
        rewriter.place(node)
        for taker, place in zip(takers, places, strict=True):
            rewriter.node("Identity", parts[int(place or 0)], output=taker.output[0])
            rewriter.place(taker)
    return rewriter.finished()


def _sizes(graph: KnownGraph, node: onnx.NodeProto) -> list[int] | None:
    """The length of each part of a sequence; None where that is not known."""
    attrs, dims = attributes(node), graph.dims(node.input[0])
    if len(node.input) < 2 or not dims:
        return None
    size, lengths = dims[attrs.get("axis", 0)], graph.array(node.input[1])
    if lengths is None or not isinstance(size, int):
        return None
    if lengths.ndim:
        return [int(part) for part in lengths]
    step = int(lengths)
    return [min(step, size - start) for start in range(0, size, step)] if step > 0 else None

"""Rows of a table that are looked up element by element, as GPT-J's positions are, by one Gather.

GatherElements(Tile(table, [B, 1, 1]), Tile(Unsqueeze(places, -1), [1, 1, R]), axis=1)  ->  Gather(table, places)
"""

from __future__ import annotations

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with (B, L) places of a table (1, P, R) looked up by rows."""
    if not any(node.op_type == "GatherElements" for node in model.graph.node):
        return model
    rewriter = Rewriter(model)
    graph = rewriter.graph
    for node in graph.nodes:
        if node.op_type != "GatherElements" or attributes(node).get("axis", 0) != 1:
            continue
        table, places = (_before_repeating(graph, name) for name in node.input)
        column = graph.producer(places, "Unsqueeze")
        shape, index = graph.dims(table), graph.dims(places)
        dims = [graph.dims(name) for name in node.input]
        rows = len(shape) == 3 and shape[0] == 1 and len(index) == 3 and index[2] == 1
        if column is None or not rows or [d[2:] for d in dims] != [shape[2:]] * 2 or dims[1][:2] != index[:2]:
            continue
        flat = rewriter.node("Squeeze", table, rewriter.constant([0], "int64"))
        rewriter.node("Gather", flat, column.input[0], output=node.output[0], axis=0)
        rewriter.place(node)
    return rewriter.finished()


def _before_repeating(graph: GraphView, name: str) -> str:
    """The value whose axes of 1 were repeated, others being as they were."""
    while (node := graph.producer(name)) is not None and node.op_type in ("Tile", "Expand"):
        before, after = graph.shape(node.input[0]), graph.shape(name)
        if before is None or after is None or len(before) != len(after) or not _repeats(before, after):
            break
        name = node.input[0]
    return name


def _repeats(before: tuple[GraphDim, ...], after: tuple[GraphDim, ...]) -> bool:
    return all(one in (1, other) and one is not None for one, other in zip(before, after, strict=True))

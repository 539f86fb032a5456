"""A table that is the Transpose of a product's weight, as onnxruntime-genai writes tied embeddings, is read by columns.

    Gather(Transpose(w), ids)  ->  Transpose(Gather(w, ids, axis=1)),  beside MatMul(x, w)

A turned copy of w would lie in memory beside w as it is packed, and all three while they are made: of a small decoder's
weights a fifth. By columns 576 elements take 4 us in the place of 0.4.
"""

from __future__ import annotations

import math

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphView, attributes, is_standard

_LARGE = 1 << 22
"""Elements from which on a copy costs more than columns do."""


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such tables read by columns, where nothing else reads their Transpose."""
    rewriter = Rewriter(model)
    graph = rewriter.graph
    for node in graph.nodes:
        if not _reads_rows(node):
            continue
        table, ids = node.input
        weight, rank = _turned(graph, table), len(graph.shape(ids) or ())
        if weight is not None and graph.shape(ids) is not None:
            columns = rewriter.node("Gather", weight, ids, axis=1)
            rewriter.node("Transpose", columns, output=node.output[0], perm=[*range(1, rank + 1), 0])
            rewriter.place(node)
    return rewriter.finished()


def _reads_rows(node: onnx.NodeProto) -> bool:
    """Whether a node picks rows of a table."""
    return is_standard(node, "Gather") and attributes(node).get("axis", 0) == 0


def _turned(graph: GraphView, table: str) -> str | None:
    """The large weight of a product whose Transpose a table is, which Gathers of rows alone read."""
    transpose = graph.producer(table, "Transpose")
    if transpose is None or table in graph.outputs or attributes(transpose).get("perm") != [1, 0]:
        return None
    weight = transpose.input[0]
    of_rows = all(_reads_rows(reader) and reader.input[0] == table for reader in graph.consumers(table))
    sizes = [size for size in graph.dims(weight) if isinstance(size, int)]
    is_large = graph.is_weight(weight) and len(sizes) == 2 and math.prod(sizes) >= _LARGE
    products = [r for r in graph.consumers(weight) if is_standard(r, "MatMul") and r.input[1] == weight]
    return str(weight) if of_rows and is_large and products else None

"""The end of a table that is as long as the sequence, as MPT takes it of its position biases.

Slice(table, Max(0, N - L), to the end) of an axis of N  ->  Slice(table, N - L, N), which is L long; N is L's limit.

A longer sequence would get the whole axis, which fits nothing that has its length: such a call is refused.
"""

from __future__ import annotations

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphDim

_VIEWS = ("Reshape", "Unsqueeze", "Squeeze", "Identity", "Cast")


def rewrite(model: onnx.ModelProto, limits: dict[str, int]) -> onnx.ModelProto:
    """The model with such slices. `limits` is told the largest size of each symbol that they count by."""
    rewriter = Rewriter(model)
    graph = rewriter.graph
    cut: dict[str, list[GraphDim]] = {}
    for node in graph.nodes:
        if node.op_type != "Slice" or (axis := _axis_to_the_end(graph, node)) is None:
            continue
        dims = list(cut.get(node.input[0], graph.dims(node.input[0])))
        size = dims[axis]
        difference = _counted_back(graph, node.input[1], size)
        if difference is None or not isinstance(size, int):
            continue
        symbol, rest = difference
        start, end = (rewriter.constant([number], "int64") for number in (0, size))
        if size > 1:  # else nothing is cut off, as no length is below 1
            start = rewriter.node("Reshape", rest, rewriter.constant([1], "int64"))
            limits[symbol] = min(size, limits.get(symbol, size))
            dims[axis] = symbol
        rewriter.node("Slice", node.input[0], start, end, node.input[3], output=node.output[0])
        rewriter.hint(node.output[0], dims)
        rewriter.place(node)
        cut[node.output[0]] = dims
    return rewriter.finished()


def _axis_to_the_end(graph: KnownGraph, node: onnx.NodeProto) -> int | None:
    """The one axis of which a Slice by steps of one takes all from somewhere on."""
    if len(node.input) < 4 or graph.shape(node.input[0]) is None:
        return None
    ends, axes = (graph.array(name) for name in node.input[2:4])
    steps = graph.array(node.input[4]) if len(node.input) > 4 and node.input[4] else None
    if ends is None or axes is None or ends.size != 1 or axes.size != 1 or (steps is not None and steps.item() != 1):
        return None
    axis = int(axes.item()) % len(graph.dims(node.input[0]))
    size = graph.dims(node.input[0])[axis]
    whole = ends.item() >= (size if isinstance(size, int) else 1 << 30)
    return axis if whole and (len(node.input) < 5 or not node.input[4] or steps is not None) else None


def _counted_back(graph: KnownGraph, name: str, size: GraphDim) -> tuple[str, str] | None:
    """(L, the value N - L) of Max(0, N - L), N being `size`."""
    node = graph.producer(name)
    while node is not None and node.op_type in _VIEWS:
        node = graph.producer(node.input[0])
    if node is None or node.op_type != "Max" or len(node.input) != 2:
        return None
    zeros = [name for name in node.input if graph.scalar(name) == 0]
    rests = [name for name in node.input if name not in zeros]
    symbol = _taken_from(graph, rests[0], size) if len(rests) == 1 else None
    return None if symbol is None else (symbol, rests[0])


def _taken_from(graph: KnownGraph, name: str, size: GraphDim) -> str | None:
    """L of N - L, or of N + -1 * L."""
    node = graph.producer(name)
    if node is None or node.op_type not in ("Add", "Sub"):
        return None
    first, second = node.input
    if node.op_type == "Add" and graph.scalar(second) == size:
        first, second = second, first
    if graph.scalar(first) != size:
        return None
    if node.op_type == "Add":
        negative = graph.producer(second, "Mul")
        factors = [] if negative is None else [name for name in negative.input if graph.scalar(name) != -1]
        if len(factors) != 1:
            return None
        second = factors[0]
    entry = graph.partial(second)
    symbol = None if entry is None or entry.size != 1 else entry.item()
    return symbol if isinstance(symbol, str) and symbol.isidentifier() else None

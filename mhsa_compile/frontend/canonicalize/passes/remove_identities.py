"""Nodes that pass a value on as it is: Identity of a weight that layers share, Dropout at inference, views and casts
that leave shape and dtype as they are."""

from __future__ import annotations

import copy

import onnx

from mhsa_compile.frontend.onnx_graph import GraphView, attributes, is_standard, live_nodes, replace


def without_aliases(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model whose readers read the values themselves; what is an output of the graph keeps its node."""
    graph = GraphView(model)
    source: dict[str, str] = {}
    for node in graph.nodes:
        if node.op_type == "Identity" or any(is_idle(graph, node) for is_idle in _IDLE):
            source[node.output[0]] = source.get(node.input[0], node.input[0])
    if not source:
        return model
    result = copy.deepcopy(model)
    for node in result.graph.node:
        for i, name in enumerate(node.input):
            node.input[i] = source.get(name, name)
    replace(result.graph.node, live_nodes(result.graph.node, graph.outputs))
    return result


def _is_idle_dropout(graph: GraphView, node: onnx.NodeProto) -> bool:
    """Whether a Dropout does nothing: it is not told to train, and nobody reads its mask."""
    if node.op_type != "Dropout" or any(graph.consumers(name) or name in graph.outputs for name in node.output[1:]):
        return False
    training = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else False
    return training is not None and not bool(training)


def _is_idle_view(graph: GraphView, node: onnx.NodeProto) -> bool:
    """Whether a Reshape, an Expand or a Slice forwards leaves the shape as it is."""
    if node.op_type == "Slice" and len(node.input) > 4 and node.input[4]:
        steps = graph.constant(node.input[4])
        if steps is None or (steps != 1).any():
            return False
    elif node.op_type not in ("Reshape", "Expand", "Slice"):
        return False
    before, after = graph.shape(node.input[0]), graph.shape(node.output[0])
    return before is not None and before == after and None not in before


def _is_idle_cast(graph: GraphView, node: onnx.NodeProto) -> bool:
    return is_standard(node, "Cast") and graph.elem_type(node.input[0]) == attributes(node)["to"]


_IDLE = (_is_idle_dropout, _is_idle_view, _is_idle_cast)

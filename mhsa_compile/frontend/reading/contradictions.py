"""A graph whose shapes or dtypes contradict each other, as an error that names the node and what it reads.

ONNX's inference says which rule was broken, and neither the shapes nor, where a node has no name, which node it was.
"""

from __future__ import annotations

import copy
import re

import numpy as np
import onnx
from onnx import shape_inference

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.detach_weights import without_contents
from mhsa_compile.frontend.onnx_graph import GraphView, attributes, dims_text, node_error, replace

InferenceError = shape_inference.InferenceError

_TAGS = re.compile(r"\[\w*Error\]|Inference error\(s\):|\(op_type:[^)]*\):")
_SHOWN = 8  # so many elements of a constant a message has room for
_LONGEST = 200


def check_shapes(model: onnx.ModelProto) -> None:
    """Raises ModelError for the first node whose inputs, attributes and declared outputs do not go together."""
    try:
        shape_inference.infer_shapes(without_contents(model), strict_mode=True)
    except InferenceError as error:
        raise contradiction(model, error) from error


def contradiction(model: onnx.ModelProto, error: Exception) -> ModelError:
    """The error for a graph of which ONNX's inference says `error`."""
    graph = without_contents(model)
    least, most = 0, len(graph.graph.node)
    while least < most:  # the fewest nodes that contradict each other
        middle = (least + most) // 2
        if _inference_error(_beginning(graph, middle)) is None:
            least = middle + 1
        else:
            most = middle
    reason = _inference_error(_beginning(graph, most)) if most else None
    if reason is None:
        hint = "Correct the shapes that the file declares, or leave them out."
        return ModelError("model", "shapes that ONNX can infer", _plain(str(error)), hint)
    node = graph.graph.node[most - 1]
    view = GraphView(_beginning(graph, most - 1))
    if _inference_error(_beginning(graph, most, declared=False)) is None:
        inferred = GraphView(_beginning(graph, most, declared=False))
        declared = GraphView(graph)
        pairs = [(_kind(declared, name), _kind(inferred, name), name) for name in node.output if name]
        declared_kind, inferred_kind, name = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
        expected = f"its output {name!r} as the file declares it, {declared_kind}"
        hint = f"Correct what the file declares, or leave it out. The node reads {_reads(view, node)}."
        return node_error(node, expected, inferred_kind, hint)
    expected = "inputs and attributes that go together"
    return node_error(node, expected, _reads(view, node), f"In ONNX's words: {_plain(reason)}.")


def _inference_error(model: onnx.ModelProto) -> str | None:
    """What ONNX's inference finds wrong."""
    try:
        shape_inference.infer_shapes(model, strict_mode=True)
    except InferenceError as error:
        return str(error)
    return None


def _beginning(model: onnx.ModelProto, count: int, *, declared: bool = True) -> onnx.ModelProto:
    """The first nodes of a model, and what is declared of their values; without `declared`, not of the last one's."""
    result, graph = copy.deepcopy(model), model.graph
    nodes = list(graph.node)[:count]
    outputs = {name for node in nodes for name in node.output if name}
    if not declared and nodes:
        outputs -= set(nodes[-1].output)
    replace(result.graph.node, nodes)
    replace(result.graph.output, (value for value in graph.output if value.name in outputs))
    replace(result.graph.value_info, (value for value in graph.value_info if value.name in outputs))
    return result


def _reads(view: GraphView, node: onnx.NodeProto) -> str:
    """The inputs of a node with their dtypes, shapes or values, and its attributes."""
    inputs = [f"{name} {_kind(view, name)}" for name in node.input if name]
    attrs = [
        f"{name}={value!r}"
        for name, value in attributes(node).items()
        if isinstance(value, int | float | str) or (isinstance(value, list) and len(value) <= _SHOWN)
    ]
    return ", ".join((*inputs, *attrs)) or "no inputs"


def _kind(view: GraphView, name: str) -> str:
    value = view.constant(name)
    if value is not None and value.size <= _SHOWN and value.dtype.kind in "iub":
        return str(np.asarray(value).tolist())
    dims = view.shape(name)
    shape = "any shape" if dims is None else dims_text(dims)
    return f"{view.dtype(name) or 'any dtype'} {shape}"


def _plain(words: str) -> str:
    return " ".join(_TAGS.sub("", words).split()).rstrip(". ")[:_LONGEST]

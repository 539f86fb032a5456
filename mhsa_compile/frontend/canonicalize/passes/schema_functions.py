"""Operators that the standard defines by others, and of which nobody here reads this use, become those others.

ONNX states many operators as functions: losses, windows, activations, normalisations that give their mean, too. Where
a node is one that the table of `reading` understands, it stays one node. Else the definition takes its place, by the
inliner that functions of a file go through; what the definition is made of is held to the table in its turn.
"""

from __future__ import annotations

import copy

import onnx
from onnx import defs, helper

from mhsa_compile.frontend.onnx_graph import GraphView, add_import, opset_of, replace
from mhsa_compile.frontend.reading.check import unsupported_nodes
from mhsa_compile.frontend.reading.functions import inline
from mhsa_compile.frontend.reading.standard import PREVIEW, PREVIEW_VERSION, PREVIEWED, RANDOM

_DOMAIN = "mhsa.definitions"  # for as long as a definition waits to be inline
_LEAST = 12  # definitions for older opsets hold operators that mean something else today
_DEPTH = 4  # a definition may hold operators that have one: a loss a LogSoftmax, say
_KERNELS = ("Attention", "RotaryEmbedding", "TensorScatter")  # operators that later passes read


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such nodes written out; itself where there are none."""
    for _ in range(_DEPTH):
        if (written := _once(model)) is model:
            break
        model = written
    return model


def _once(model: onnx.ModelProto) -> onnx.ModelProto:
    opset = opset_of(model)
    if not any(_has_definition(node, opset) for node in model.graph.node):
        return model
    result = copy.deepcopy(model)
    nodes = unsupported_nodes(result, [node for node in result.graph.node if _has_definition(node, opset)])
    if not nodes:
        return model
    graph = GraphView(result)
    functions: list[onnx.FunctionProto] = []
    for node in nodes:
        if (function := _definition(graph, node)) is None:
            continue
        function.domain, function.name, function.overload = _DOMAIN, f"{node.op_type}_{len(functions)}", ""
        node.domain, node.op_type = _DOMAIN, function.name
        functions.append(function)
    if not functions:
        return model
    result.functions.extend(functions)
    add_import(result, _DOMAIN)
    result = inline(result)
    replace(result.opset_import, (entry for entry in result.opset_import if entry.domain != _DOMAIN))
    return result


def _has_definition(node: onnx.NodeProto, opset: int) -> bool:
    """Whether a node is an operator of the standard's that is defined by others."""
    if node.domain == PREVIEW:
        return node.op_type in PREVIEWED
    if node.domain != "" or node.op_type in RANDOM.union(_KERNELS) or not defs.has(node.op_type):
        return False
    try:
        schema = defs.get_schema(node.op_type, opset, "")
    except defs.SchemaError:  # of a later opset
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)


def _definition(graph: GraphView, node: onnx.NodeProto) -> onnx.FunctionProto | None:
    """What a node computes as a function of operators, or None; its attributes' defaults are put into the node."""
    if node.domain == PREVIEW:
        schema = defs.get_schema(node.op_type, PREVIEW_VERSION, PREVIEW)
        imported = any((o.domain, o.version) == (PREVIEW, PREVIEW_VERSION) for o in graph.model.opset_import)
        least, last = PREVIEW_VERSION, PREVIEW_VERSION if imported else 0
    else:
        schema = defs.get_schema(node.op_type, graph.opset, "")
        least, last = _LEAST, graph.opset
    versions = (*schema.function_opset_versions, *schema.context_dependent_function_opset_versions)
    version = max((v for v in versions if least <= v <= last), default=None)
    kinds = [_kind(graph, name) for name in node.input]
    if version is None or any(kind is None for kind in kinds):
        return None
    function = onnx.FunctionProto()
    if version in schema.function_opset_versions:
        text = schema.get_function_with_opset_version(version)
    else:
        types = [kind.SerializeToString() for kind in kinds if kind is not None]
        text = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), types)
    if not text:
        return None
    function.ParseFromString(text)
    names = {attribute.name for attribute in node.attribute}
    defaults = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    node.attribute.extend(value for name, value in defaults.items() if value.name and name not in names)
    return function


def _kind(graph: GraphView, name: str) -> onnx.TypeProto | None:
    """The type of an input; an empty one of an input that is left out, None where nobody knows."""
    if not name:
        return onnx.TypeProto()
    if not (element := graph.elem_type(name)):
        return None
    return helper.make_tensor_type_proto(element, graph.shape(name))

"""Spellings that runtimes take and ONNX's checker does not, or that say one thing in two ways: here they become one.

- The standard's domain is "", where a file spells it "ai.onnx".
- ONNX Runtime's domain counts as imported where an operator of it is used.
- Operators that ONNX Runtime has in the standard's domain, and ONNX not (yet), are ONNX Runtime's.
- A tensor that is listed twice among the outputs is two: the second one, "y_2" of "y", is an Identity of it.
- A STFT says whether it is onesided: where it leaves that out it is, but onnx infers the shape of one that is not. A
  MeanVarianceNormalization says its axes, without which onnx refuses what it is defined by.
- Nodes stand behind those that make what they read. ONNX asks for that; ONNX Runtime reads files without, and its own
  converter to float16 writes such.
- An initializer that is also listed among the inputs is a weight. Before version 4 of the format they all were.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.detach_weights import light, whole
from mhsa_compile.frontend.onnx_graph import add_import, branches, in_order, inner_nodes, replace
from mhsa_compile.frontend.reading.microsoft import DOMAIN

_LONG = "ai.onnx"
_RUNTIMES_OWN = {"SimplifiedLayerNormalization": 1 << 30, "LayerNormalization": 17}
"""Operators that ONNX Runtime has in the standard's domain -> the opset from which on they are the standard's."""


def in_one_dialect(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in the spelling that every later stage reads; itself where it is so already. Raises ModelError."""
    weights = {tensor.name for tensor in model.graph.initializer}
    listed = any(value.name in weights for value in model.graph.input)
    imports = {entry.domain for entry in model.opset_import}
    renamed = {id(node): domain for node in _nodes(model) if (domain := _domain(node, _opset(model))) != node.domain}
    long = any(entry.domain == _LONG for owner in (model, *model.functions) for entry in owner.opset_import)
    runtimes = any(_domain(node, _opset(model)) == DOMAIN for node in _nodes(model))
    outputs = [value.name for value in model.graph.output]
    repeated = len(set(outputs)) < len(outputs)
    unstated = any(map(_left_out, _nodes(model)))
    unsorted = any(list(map(id, owner.node)) != list(map(id, in_order(owner.node))) for owner in _owners(model))
    others = unstated or unsorted or listed or long or renamed or repeated
    if not (others or (runtimes and DOMAIN not in imports)):
        return model
    result, tensors = light(model)
    opset = _opset(model)
    for node in _nodes(result):
        node.domain = _domain(node, opset)
        if (stated := _left_out(node)) is not None:
            node.attribute.append(helper.make_attribute(*stated))
    for owner in (result, *result.functions):
        _shorten(owner)
    if runtimes:
        add_import(result, DOMAIN)
    replace(result.graph.input, (value for value in result.graph.input if value.name not in weights))
    result.ir_version = max(result.ir_version, 4)  # before, initializers must be inputs
    for owner in reversed(_owners(result) if unsorted else ()):  # inner graphs first: their nodes are copied then
        replace(owner.node, in_order(owner.node))
    _list_once(result.graph)
    return whole(result, tensors)


def _list_once(graph: onnx.GraphProto) -> None:
    """Gives every output that is listed again a tensor of its own."""
    values = (*graph.input, *graph.output, *graph.initializer)
    names = {value.name for value in values}.union(*(node.output for node in graph.node))
    listed: set[str] = set()
    for value in graph.output:
        source, number = value.name, 2
        if source in listed:
            while (name := f"{source}_{number}") in names:
                number += 1
            graph.node.append(helper.make_node("Identity", [source], [name], name=name))
            names.add(name)
            value.name = name
        listed.add(value.name)


_STATED: dict[str, tuple[str, Any]] = {"MeanVarianceNormalization": ("axes", [0, 2, 3]), "STFT": ("onesided", 1)}
"""Operators of one attribute that is stated -> what it is by default."""


def _left_out(node: onnx.NodeProto) -> tuple[str, Any] | None:
    """The attribute that a node leaves out, with its value."""
    is_meant = node.op_type in _STATED and node.domain in ("", _LONG) and not node.attribute
    return _STATED[node.op_type] if is_meant else None


def _domain(node: onnx.NodeProto, opset: int) -> str:
    if node.domain not in ("", _LONG):
        return str(node.domain)
    return DOMAIN if opset < _RUNTIMES_OWN.get(node.op_type, 0) else ""


def _opset(model: onnx.ModelProto) -> int:
    return max((entry.version for entry in model.opset_import if entry.domain in ("", _LONG)), default=0)


def _owners(model: onnx.ModelProto) -> list[onnx.GraphProto | onnx.FunctionProto]:
    """What has nodes: the graph, functions, and the graphs in nodes."""
    inner = (graph for node in _nodes(model) for graph in branches(node))
    return [model.graph, *model.functions, *inner]


def _nodes(model: onnx.ModelProto) -> Iterator[onnx.NodeProto]:
    for owner in (model.graph, *model.functions):
        for node in owner.node:
            yield node
            yield from inner_nodes(node)


def _shorten(owner: onnx.ModelProto | onnx.FunctionProto) -> None:
    """Spells the standard's domain "" in what a model or a function imports. Raises ModelError where it is there twice,
    with two versions."""
    versions = {entry.version for entry in owner.opset_import if entry.domain in ("", _LONG)}
    if len(versions) > 1:
        spelt = f", one as {_LONG!r}" if any(entry.domain == _LONG for entry in owner.opset_import) else ""
        got = f"opsets {' and '.join(map(str, sorted(versions)))}{spelt}"
        raise ModelError("model", "one version of ONNX's own operators", got, "Leave one of the imports out.")
    others = [entry for entry in owner.opset_import if entry.domain not in ("", _LONG)]
    replace(owner.opset_import, [helper.make_opsetid("", version) for version in versions] + others)

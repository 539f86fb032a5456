"""The branches of an If, each as a model of its own, so that what is done to a graph is done to them.

What a branch reads of the graph around it is an input of such a model, or an initializer where it is constant.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import onnx
from onnx import helper, numpy_helper

from mhsa_compile.frontend.detach_weights import FLOATS
from mhsa_compile.frontend.onnx_graph import (
    GraphView,
    all_nodes,
    branches,
    constant_value,
    fresh_name,
    inner_nodes,
    reads,
    replace,
)

Rewrite = Callable[[onnx.ModelProto], onnx.ModelProto]


def has_branches(model: onnx.ModelProto) -> bool:
    """Whether a node of the graph holds graphs."""
    return any(True for node in model.graph.node for _ in branches(node))


def with_weights_outside(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with floating tensors that branches hold as initializers of the graph itself: weights are bound at
    load, wherever they are read."""
    if not has_branches(model):
        return model
    result = copy.deepcopy(model)
    names = _names(result.graph)
    makers = Counter[str]()
    for graph in (result.graph, *_graphs(result.graph)):
        makers.update(value.name for value in (*graph.input, *graph.initializer))
        makers.update(name for node in graph.node for name in node.output)
    alone = {name for name, count in makers.items() if count == 1}
    for node in result.graph.node:
        for branch in branches(node):
            _move_weights(branch, result.graph, names, alone)
    return result


def _move_weights(branch: onnx.GraphProto, graph: onnx.GraphProto, names: set[str], alone: set[str]) -> None:
    """`alone`: names of one meaning in all graphs, which stay."""
    for node in branch.node:
        for inner in branches(node):
            _move_weights(inner, graph, names, alone)
    outputs = {value.name for value in branch.output}
    for tensor in branch.initializer:
        if tensor.name in outputs:  # a value of its own, which another branch may call alike
            held = fresh_name(tensor.name, names)
            branch.node.insert(0, helper.make_node("Identity", [held], [tensor.name]))
            tensor.name = held
    moved = {t.name: t for t in branch.initializer}
    for node in branch.node:
        value = constant_value(node) if node.op_type == "Constant" and node.output[0] not in outputs else None
        if value is not None and value.ndim:
            tensor = numpy_helper.from_array(value, node.output[0])
            if tensor.data_type in FLOATS:
                moved[tensor.name] = tensor
    renamed = {name: name if name in alone else fresh_name(name, names) for name in moved}
    for name, tensor in moved.items():
        graph.initializer.add().CopyFrom(tensor)
        graph.initializer[-1].name = renamed[name]
    replace(branch.initializer, (t for t in branch.initializer if t.name not in moved))
    replace(branch.node, (n for n in branch.node if n.op_type != "Constant" or n.output[0] not in moved))
    rename(branch, renamed)


def rewritten(model: onnx.ModelProto, rewrite: Rewrite, around: GraphView | None = None) -> onnx.ModelProto:
    """The model with each branch of its Ifs as `rewrite` gives it; constants that it makes are those of the model.

    `around` knows the shapes of what branches read, where the model's own operators hide them.
    """
    if not has_branches(model):
        return model
    result = copy.deepcopy(model)
    view, names = around or GraphView(model), _names(model.graph)
    domains = {entry.domain for entry in result.opset_import}
    for node in result.graph.node:
        for branch in branches(node):
            own = _names(branch)
            source = _as_model(model, view, branch)
            outside = {t.name for t in source.graph.initializer} - {t.name for t in branch.initializer}
            changed = rewrite(source)
            body = copy.deepcopy(changed.graph)
            new = [t for t in body.initializer if t.name not in outside]
            body_names = {t.name for t in new} | {name for inner in body.node for name in inner.output}
            renamed = {name: fresh_name(name, names) for name in body_names - own if name and name in names}
            names |= body_names
            for tensor in new:
                result.graph.initializer.add().CopyFrom(tensor)
                result.graph.initializer[-1].name = renamed.get(tensor.name, tensor.name)
            rename(body, renamed)
            replace(branch.node, body.node)
            replace(branch.initializer, [])
            replace(branch.value_info, (value for value in body.value_info if value.name not in renamed))
            result.opset_import.extend(entry for entry in changed.opset_import if entry.domain not in domains)
            domains |= {entry.domain for entry in changed.opset_import}
    return result


def _as_model(model: onnx.ModelProto, view: GraphView, branch: onnx.GraphProto) -> onnx.ModelProto:
    own_names = {name for node in branch.node for name in node.output} | {t.name for t in branch.initializer}
    inputs = dict.fromkeys(name for node in branch.node for name in reads(node))
    inputs |= dict.fromkeys(value.name for value in branch.output)
    inner = {name for node in branch.node for each in inner_nodes(node) for name in each.output}
    source = onnx.ModelProto(ir_version=model.ir_version)
    source.opset_import.extend(model.opset_import)
    source.graph.CopyFrom(branch)
    source.graph.name = branch.name or "branch"
    for name in inputs:
        if not name or name in own_names or (name in inner and not _is_known(view, name)):
            continue
        if name in view.initializers:
            source.graph.initializer.add().CopyFrom(view.initializers[name])
        elif (value := view.constant(name)) is not None:
            source.graph.initializer.append(numpy_helper.from_array(value, name))
        else:
            source.graph.input.append(helper.make_tensor_value_info(name, view.elem_type(name), view.shape(name)))
    return source


def _is_known(view: GraphView, name: str) -> bool:
    return name in view.initializers or name in view.inputs or view.producer(name) is not None


def _names(graph: onnx.GraphProto) -> set[str]:
    """All names that stand in a graph and in those in it."""
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    for node in all_nodes(graph):
        names.update(node.output, reads(node))
    for inner in _graphs(graph):
        names |= {t.name for t in inner.initializer}
    return names


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    for node in all_nodes(graph):
        yield from branches(node)


def rename(graph: onnx.GraphProto, names: dict[str, str]) -> None:
    """Puts other names in the place of some that a graph reads or makes; what a graph in it makes hides them there."""
    for node in graph.node:
        for place, name in enumerate(node.input):
            node.input[place] = names.get(name, name)
        for place, name in enumerate(node.output):
            node.output[place] = names.get(name, name)
        for inner in branches(node):
            hidden = {value.name for value in (*inner.input, *inner.initializer)}
            hidden |= {name for each in inner.node for name in each.output}
            rename(inner, {name: new for name, new in names.items() if name not in hidden})
    for value in graph.output:
        value.name = names.get(value.name, value.name)

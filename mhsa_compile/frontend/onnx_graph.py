"""An ONNX graph with its questions answered: who makes a value, who reads it, what shape and dtype it has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.detach_weights import without_contents

GraphDim = int | str | None  # a size, the name of a symbolic one, unknown
_WITHOUT_NODE = "Export the model without it, or write what it does in operators that are understood."


class GraphView:
    """A read-only view of `model.graph`. Raises onnx.shape_inference.InferenceError on contradictory shapes."""

    def __init__(self, model: onnx.ModelProto) -> None:
        inferred = onnx.shape_inference.infer_shapes(without_contents(model), data_prop=True, strict_mode=False)
        graph = inferred.graph
        if any(node.op_type == "Attention" and len(node.output) > 3 for node in graph.node):
            _forget_zeros(graph)
        self.model = model
        self.nodes = list(model.graph.node)
        self.inputs = [value.name for value in graph.input if value.name not in {i.name for i in graph.initializer}]
        self.outputs = [value.name for value in graph.output]
        self.initializers = {tensor.name: tensor for tensor in model.graph.initializer}
        self.opset = opset_of(model)
        inner = [branch for node in all_nodes(graph) for branch in branches(node)]
        values = (v for g in (*inner, graph) for v in (*g.value_info, *g.input, *g.output))
        self._types = {v.name: v.type.tensor_type for v in values}
        self._producers = {name: node for node in self.nodes for name in node.output if name}
        self._consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            for name in reads(node):
                self._consumers[name].append(node)

    def producer(self, name: str, op_type: str | None = None) -> onnx.NodeProto | None:
        """The node that makes `name`, if it is the standard's `op_type`."""
        node = self._producers.get(name)
        return node if node is not None and (op_type is None or is_standard(node, op_type)) else None

    def only_consumer(self, name: str, op_type: str) -> onnx.NodeProto | None:
        """The one node that reads `name`, if just one does, the standard's `op_type`, and nobody outside sees it."""
        readers = self._consumers[name]
        alone = len(readers) == 1 and name not in self.outputs and is_standard(readers[0], op_type)
        return readers[0] if alone else None

    def consumers(self, name: str) -> list[onnx.NodeProto]:
        return self._consumers[name]

    def is_read_once(self, name: str) -> bool:
        """Whether one input of one node is all that reads a value."""
        return len(self._consumers[name]) == 1 and name not in self.outputs

    def shape(self, name: str) -> tuple[GraphDim, ...] | None:
        """The dims of a value, or None where its rank is unknown."""
        if name in self.initializers:
            return tuple(self.initializers[name].dims)
        kind = self._types.get(name)
        return None if kind is None or not kind.HasField("shape") else dims_of_type(kind)

    def dims(self, name: str) -> tuple[GraphDim, ...]:
        """The dims of a value; none, too, where its rank is unknown."""
        return self.shape(name) or ()

    def dtype(self, name: str) -> str | None:
        """NumPy's name of the element type, or None where it is unknown."""
        code = self.elem_type(name)
        return str(onnx.helper.tensor_dtype_to_np_dtype(code)) if code else None

    def elem_type(self, name: str) -> int:
        """ONNX's number of the element type, 0 where it is unknown."""
        if name in self.initializers:
            return int(self.initializers[name].data_type)
        return int(self._types[name].elem_type) if name in self._types else 0

    def is_weight(self, name: str) -> bool:
        """Whether a value is an initializer, or a part or a view of one, as of projections that are stored as one."""
        while (node := self.producer(name)) is not None and node.op_type in ("Split", "Squeeze"):
            name = node.input[0]
        return name in self.initializers

    def constant(self, name: str) -> np.ndarray | None:
        """The value of an initializer or a Constant node, None where it is computed."""
        if name in self.initializers:
            return np.asarray(numpy_helper.to_array(self.initializers[name]))
        node = self.producer(name, "Constant")
        if node is None:
            return None
        return constant_value(node)


def opset_of(owner: onnx.ModelProto | onnx.FunctionProto) -> int:
    """The version of the standard operators; 0 where none is imported."""
    return next((entry.version for entry in owner.opset_import if entry.domain in ("", "ai.onnx")), 0)


def metadata_of(model: onnx.ModelProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in model.metadata_props}


def add_import(model: onnx.ModelProto, domain: str) -> None:
    """States version 1 of a domain, where the model does not import it yet."""
    if all(entry.domain != domain for entry in model.opset_import):
        model.opset_import.append(onnx.helper.make_opsetid(domain, 1))


def names_in(model: onnx.ModelProto) -> set[str]:
    """The names of a model's nodes, values and weights, in branches, too."""
    names = {name for node in all_nodes(model.graph) for name in (*reads(node), *node.output, node.name)}
    return names | {tensor.name for tensor in model.graph.initializer}


def fresh_name(hint: str, names: set[str]) -> str:
    """A name that begins with `hint`, and is in `names` from now on."""
    name, count = hint, 0
    while name in names:
        count += 1
        name = f"{hint}_{count}"
    names.add(name)
    return name


def replace(field: Any, items: Iterable[Any]) -> None:
    """Puts items, which may be some of its own, in the place of all that a repeated field holds."""
    whole = list(items)
    del field[:]
    field.extend(whole)


def is_standard(node: onnx.NodeProto, *operators: str) -> bool:
    """Whether a node is one of these operators of ONNX's own: a domain is part of an operator's name."""
    return node.op_type in operators and node.domain in ("", "ai.onnx")


def dims_of_type(kind: onnx.TypeProto.Tensor) -> tuple[GraphDim, ...]:
    return tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in kind.shape.dim)


def title(node: onnx.NodeProto) -> str:
    """A node as errors name it."""
    operator = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
    return f"{operator} node {node.name or ', '.join(node.output)!r}"


def node_error(node: onnx.NodeProto | str, expected: str, got: str, next_step: str = "") -> ModelError:
    """The error for a node, or one that is called so, with a way out where nobody knows a nearer one."""
    argument = node if isinstance(node, str) else title(node)
    return ModelError(argument, expected, got, next_step or _WITHOUT_NODE)


def dims_text(dims: Sequence[GraphDim]) -> str:
    """A shape as errors have it."""
    return f"({', '.join('?' if dim is None else str(dim) for dim in dims)})"


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node as Python values (strings decoded)."""
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}


def constant_value(node: onnx.NodeProto) -> np.ndarray | None:
    """What a Constant node holds, in whichever of its attributes; None for strings and sparse tensors."""
    for name, value in attributes(node).items():
        if name == "value":
            return np.asarray(numpy_helper.to_array(value))
        if name in ("value_int", "value_ints"):
            return np.array(value, dtype=np.int64)
        if name in ("value_float", "value_floats"):
            return np.array(value, dtype=np.float32)
    return None


def branches(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that a node holds: the branches of an If, the body of a Loop."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g
        yield from attribute.graphs


def inner_nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """The nodes of the graphs that a node holds, and of those in them."""
    for graph in branches(node):
        for inner in graph.node:
            yield inner
            yield from inner_nodes(inner)


def all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, and behind each those of the graphs in it."""
    for node in graph.node:
        yield node
        yield from inner_nodes(node)


def tensors_of(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """All tensors of a model: initializers, and what nodes hold, of the graphs in it and of its functions, too."""
    yield from model.graph.initializer
    for owner in (model.graph, *model.functions):
        for outer in owner.node:
            for node in (outer, *inner_nodes(outer)):
                for graph in branches(node):
                    yield from graph.initializer
                for attribute in node.attribute:
                    if attribute.HasField("t"):
                        yield attribute.t
                    yield from attribute.tensors


def _forget_zeros(graph: onnx.GraphProto) -> None:
    """Takes out of computed shapes the sizes of 0: onnx infers them for the scores of an Attention whose number of keys
    it does not know."""
    for value in (*graph.value_info, *graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.HasField("dim_value") and not dim.dim_value:
                dim.Clear()


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """What a node reads, and what the graphs in it read: the names that are made there are no other value's."""
    yield from node.input
    for graph in branches(node):
        yield from (value.name for value in graph.output)
        for inner in graph.node:
            yield from reads(inner)


def in_order(nodes: Iterable[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """The nodes, each behind those that make what it reads; where nothing else is needed, as they stand. Those of a
    circle come in some order."""
    unsorted = list(nodes)
    makers = {name: node for node in unsorted for name in node.output if name}
    visited: set[int] = set()
    result: list[onnx.NodeProto] = []
    for first in unsorted:
        waiting = [] if id(first) in visited else [(first, reads(first))]
        visited.add(id(first))
        while waiting:
            names = waiting[-1][1]
            before = next((makers[name] for name in names if name in makers and id(makers[name]) not in visited), None)
            if before is None:
                result.append(waiting.pop()[0])
            else:
                visited.add(id(before))
                waiting.append((before, reads(before)))
    return result


def live_nodes(nodes: Iterable[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """The nodes that the outputs depend on, in their order."""
    needs, result = set(outputs), []
    for node in reversed(list(nodes)):
        if needs & set(node.output):
            needs |= set(reads(node))
            result.append(node)
    return result[::-1]

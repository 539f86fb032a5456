"""A model under change: nodes take the places of others, constants and values get names that nobody has."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.onnx_graph import GraphDim, fresh_name, in_order, is_standard, live_nodes, reads, replace


class Rewriter:
    """Nodes are written with `node` and `constant`, then put where an old one stood (`place`), or dropped (`drop`).

    `graph` is the model as it was when the rewriter was made.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model, self.graph = model, KnownGraph(model)
        self._written: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._placed: dict[int, list[onnx.NodeProto]] = {}
        self._placed_constants: list[onnx.TensorProto] = []
        self._hints: list[onnx.ValueInfoProto] = []
        self._names = {name for node in self.graph.nodes for name in (*reads(node), *node.output, node.name)}
        self._names |= {*self.graph.inputs, *self.graph.initializers}
        self._names |= {info.name for info in model.graph.value_info}  # which tells the type of whatever has the name

    def fresh(self, hint: str) -> str:
        """A name that begins with `hint`."""
        return fresh_name(hint, self._names)

    def constant(self, value: Any, dtype: str | None = None, hint: str = "constant") -> str:
        """The name of a new initializer."""
        array = np.asarray(value, dtype=None if dtype is None else np.dtype(dtype))
        self._constants.append(numpy_helper.from_array(array, self.fresh(hint)))
        return str(self._constants[-1].name)

    def node(self, op_type: str, *inputs: str, output: str = "", **attributes: Any) -> str:
        """Writes a node of one output, and gives that output's name."""
        return self.nodes(op_type, inputs, [output or self.fresh(op_type.lower())], **attributes)[0]

    def nodes(self, op_type: str, inputs: tuple[str, ...], outputs: list[str], **attributes: Any) -> list[str]:
        """Writes a node with these outputs."""
        operands = list(inputs)
        while operands and not operands[-1]:
            operands.pop()
        name = self.fresh(f"{outputs[0]}/{op_type}")
        self._written.append(helper.make_node(op_type, operands, outputs, name=name, **attributes))
        return outputs

    def append(self, node: onnx.NodeProto) -> None:
        """Writes a node as it is."""
        self._written.append(node)

    def producer(self, name: str, op_type: str) -> onnx.NodeProto | None:
        """The node that makes `name`, in the graph as it was or written since, if it is the standard's
        `op_type`."""
        maker = next((node for node in self._written if name in node.output), None) or self.graph.producer(name)
        return maker if maker is not None and is_standard(maker, op_type) else None

    def place(self, node: onnx.NodeProto, attention: str = "") -> None:
        """Puts what was written since the last call where `node` stood; an Attention in it is called `attention`.

        One node in the place of another of its type has its name."""
        if len(self._written) == 1 and node.name and self._written[0].op_type == node.op_type:
            self._written[0].name = node.name
        for written in self._written:
            if attention and written.op_type == "Attention":
                written.name = attention
        self._placed[id(node)] = self._written
        self._placed_constants += self._constants
        self._written, self._constants = [], []

    def remove(self, node: onnx.NodeProto) -> None:
        """Removes a node: something else makes what it made."""
        self._placed[id(node)] = []

    def drop(self) -> None:
        """Forgets what was written since the last call of `place`."""
        self._written, self._constants = [], []

    def hint(self, name: str, dims: Sequence[GraphDim], dtype: str | None = None) -> None:
        """States the dims of a value, where onnx does not find them by itself; of a new one, the dtype, too."""
        kind = dtype or self.graph.dtype(name)
        if kind is not None:
            code = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
            self._hints.append(helper.make_tensor_value_info(name, code, list(dims)))

    @property
    def changed(self) -> bool:
        return bool(self._placed or self._hints)

    def finished(self) -> onnx.ModelProto:
        """The model as it is now; nodes and constants that nobody needs any more are gone."""
        if not self.changed:
            return self.model
        result = copy.deepcopy(self.model)
        graph = result.graph
        infos = {info.name: info for info in (*graph.value_info, *self._hints)}
        replace(graph.node, live_nodes(in_order(self._all_nodes()), self.graph.outputs))
        outputs = {name for node in graph.node for name in node.output}
        replace(graph.value_info, (info for name, info in infos.items() if name in outputs))
        used = {name for node in graph.node for name in reads(node)} | set(self.graph.outputs)
        graph.initializer.extend(self._placed_constants)
        for i in reversed(range(len(graph.initializer))):
            if graph.initializer[i].name not in used:
                del graph.initializer[i]
        return result

    def _all_nodes(self) -> Iterator[onnx.NodeProto]:
        for node in self.graph.nodes:
            yield from self._placed.get(id(node), [node])

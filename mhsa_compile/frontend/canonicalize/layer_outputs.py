"""The attentions of a canonical graph by number, in the graph's order: what a user calls layer 3; and outputs that say
what they do inside: `weights@3` becomes the output `layer3_weights`.

Such an Attention becomes the operator of our domain, which has these outputs, with its definition in standard ones.
What its heads put out is its Y.

Notation: B batch, L query length, S key length, H heads, F value head dim.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.definitions import Definitions
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes, node_error
from mhsa_compile.nn import mhsa_operator
from mhsa_compile.runtime.artifact.manifest import AttentionCoverage
from mhsa_compile.spec.attention_spec import DOMAIN
from mhsa_compile.spec.outputs import LayerWord, SoftmaxOutputs, array_names, inside_of

_LISTED = 16  # layers, in a message


@dataclass(frozen=True)
class Layer:
    """One attention; `place` is that of its operator among the graph's nodes, None where it was not fused, or where
    nobody reads what it makes."""

    number: int
    block: AttentionCoverage
    place: int | None

    @property
    def title(self) -> str:
        """The layer as errors name it, by its number and the name of its attention."""
        return f"layer {self.number} ({self.block.name!r})"


def in_order(model: onnx.ModelProto, blocks: Iterable[AttentionCoverage]) -> list[Layer]:
    """One layer for each block, as their nodes stand in the graph. An attention has the name of what it was before."""
    nodes = {i: node for i, node in enumerate(model.graph.node) if is_attention(node) or node.op_type == "Softmax"}
    behind, entries = len(model.graph.node), []
    for block in blocks:
        alike = (p for p, node in nodes.items() if name_of(node) == block.name and is_attention(node) == block.fused)
        place = next(alike, behind)
        nodes.pop(place, None)  # names need not be unique
        entries.append((place, block))
    entries.sort(key=lambda entry: entry[0])
    return [
        Layer(number, block, place if block.fused and place < behind else None)
        for number, (place, block) in enumerate(entries)
    ]


def is_attention(node: onnx.NodeProto) -> bool:
    """Whether a node is the standard's Attention or ours."""
    return node.op_type == "Attention" and node.domain in ("", "ai.onnx", DOMAIN)


def name_of(node: onnx.NodeProto) -> str:
    return str(node.name or node.output[0])


def with_outputs(model: onnx.ModelProto, layers: Sequence[Layer], words: Sequence[LayerWord]) -> onnx.ModelProto:
    """The model with what `words` ask for behind its own outputs: by layer, then as the words stand.

    `layers` are of this model. Raises ModelError: no such layer or head, a layer that was not fused, an output twice.
    """
    by_layer = _by_layer(layers, words)
    if not by_layer:
        return model
    result = copy.deepcopy(model)
    change = _Change(GraphView(model), result)
    for layer in layers:
        if layer.number in by_layer and layer.place is not None:
            change.add(layer, by_layer[layer.number], result.graph.node[layer.place])
    return change.finish()


def _by_layer(layers: Sequence[Layer], words: Sequence[LayerWord]) -> dict[int, list[str]]:
    """Layer -> its words, once each of them is known to be there."""
    result: dict[int, list[str]] = defaultdict(list)
    for word in words:
        for layer in _layers_of(layers, word):
            kind = word.word.partition(":")[0]
            if kind in (earlier.partition(":")[0] for earlier in result[layer.number]):
                raise ModelError("outputs", "each output of a layer once", f"{kind!r} of {layer.title} twice")
            result[layer.number].append(word.word)
    return result


def _layers_of(layers: Sequence[Layer], word: LayerWord) -> Sequence[Layer]:
    selection = layers
    if word.layer is not None:
        if not -len(layers) <= word.layer < len(layers):
            raise ModelError("outputs", f"a layer from 0 to {len(layers) - 1}", f"{str(word)!r}", _list_of(layers))
        selection = [layers[word.layer]]
    for layer in selection:
        if layer.place is None:
            note = layer.block.note if not layer.block.fused else "nothing reads its result"
            got = f"{str(word)!r}, of which {layer.title} was not fused: {note}"
            raise ModelError("outputs", "layers that are fused", got, _list_of(layers))
    return selection


def _list_of(layers: Sequence[Layer]) -> str:
    """The layers that can be asked for, as a next step."""
    there = [layer for layer in layers if layer.place is not None]
    names = ", ".join(f"{layer.number} {layer.block.name!r}" for layer in there[:_LISTED])
    more = f" and {len(there) - _LISTED} more" if len(there) > _LISTED else ""
    return f"Those that can be named, such as entropy@{there[0].number}: {names}{more}." if there else ""


@dataclass(frozen=True)
class _Sizes:
    """B, H, L, S and F of one Attention, None where one is not known by name, and its type of floats."""

    batch: GraphDim
    heads: int
    queries: GraphDim
    keys: GraphDim
    v_head_dim: GraphDim
    dtype: int
    by_rows: bool  # Q, K and V have three axes

    @classmethod
    def of(cls, graph: GraphView, node: onnx.NodeProto) -> _Sizes:
        """The sizes of an Attention node. Raises ModelError where its number of heads is free."""
        q, k, v = (graph.dims(name) for name in node.input[:3])
        attrs = attributes(node)
        by_rows = len(q) == 3
        heads, width = (attrs.get("q_num_heads") if by_rows else q[1] if q else None), v[-1] if v else None
        if not isinstance(heads, int) or heads < 1 or not (by_rows or len(q) == 4) or not k:
            raise node_error(node, "a fixed number of heads", f"Q of {q}")
        if by_rows:
            width = width // attrs["kv_num_heads"] if isinstance(width, int) and attrs.get("kv_num_heads") else None
        with_past = len(node.input) > 4 and node.input[4]
        return cls(q[0], heads, q[-2], None if with_past else k[-2], width, graph.elem_type(node.input[0]), by_rows)


class _Change:
    """A copy of a model on its way to more outputs; `graph` is the model as it was."""

    def __init__(self, graph: GraphView, model: onnx.ModelProto) -> None:
        self.graph, self.model = graph, model
        self._names = {name for node in graph.nodes for name in node.output} | {*graph.inputs, *graph.initializers}
        self._definitions = Definitions(graph)

    def add(self, layer: Layer, words: Sequence[str], node: onnx.NodeProto) -> None:
        """Adds what `words` ask of a layer, whose node is `node`. Raises ModelError."""
        sizes, outputs = _Sizes.of(self.graph, node), inside_of(words)
        for head in outputs.heads or ():
            if head >= sizes.heads:
                raise ModelError("outputs", f"heads from 0 to {sizes.heads - 1} of {layer.title}", str(head))
        types, values = _types(sizes, outputs), {}
        for name in array_names(words):
            full = f"layer{layer.number}_{name}"
            if full in self._names:
                raise ModelError("model", f"no value named {full!r}, which is to be an output", "one", "Rename it.")
            values[name] = helper.make_tensor_value_info(full, *types[name])
        if outputs.names:
            self._look_inside(layer, outputs, node, values)
        if "heads" in values:
            if not sizes.by_rows and node.output[0] in self.graph.outputs:  # else one array would be two outputs
                got = f"{layer.title}, whose heads are the output {node.output[0]!r}"
                raise ModelError("outputs", "heads that are no output yet", got)
            self._give_heads(sizes, node.output[0], values["heads"].name)
        self.model.graph.output.extend(values.values())

    def finish(self) -> onnx.ModelProto:
        """The model as it is now."""
        self._definitions.put_into(self.model)
        return self.model

    def _look_inside(
        self, layer: Layer, outputs: SoftmaxOutputs, node: onnx.NodeProto, values: Mapping[str, onnx.ValueInfoProto]
    ) -> None:
        """Makes the node the operator of ours, which gives `outputs`."""
        if already := mhsa_operator.outputs_of(node).names:
            got = f"{layer.title}, which gives {', '.join(already)} already"
            raise ModelError("outputs", "layers that do not say yet what they do inside", got)
        self._state_types(node)
        node.output.extend([""] * (mhsa_operator.FIRST - len(node.output)))
        node.output.extend(values[name].name if name in outputs.names else "" for name in mhsa_operator.NAMES)
        while not node.output[-1]:
            node.output.pop()
        for name, value in mhsa_operator.attributes_of(outputs).items():
            node.attribute.append(helper.make_attribute(name, value))
        bool_mask = len(node.input) > 3 and self.graph.dtype(node.input[3]) == "bool"
        self._definitions.define(node, bool_mask=bool_mask)

    def _state_types(self, node: onnx.NodeProto) -> None:
        """States the dims and dtypes of the node's outputs, which everybody could infer of the standard operator."""
        declared_names = {info.name for info in (*self.model.graph.value_info, *self.model.graph.output)}
        for name in filter(None, node.output):
            shape, dtype = self.graph.shape(name), self.graph.elem_type(name)
            if name not in declared_names and shape is not None and dtype:
                self.model.graph.value_info.append(helper.make_tensor_value_info(name, dtype, list(shape)))

    def _give_heads(self, sizes: _Sizes, y: str, name: str) -> None:
        """Writes Y by heads, (B, H, L, F), as the value `name`."""
        graph = self.model.graph
        if not sizes.by_rows:
            graph.node.append(helper.make_node("Identity", [y], [name], name=name))
            return
        split, shape = f"{name}/split", f"{name}/shape"
        graph.initializer.append(helper.make_tensor(shape, TensorProto.INT64, [4], [0, 0, sizes.heads, -1]))
        graph.node.append(helper.make_node("Reshape", [y, shape], [split], name=split))
        graph.node.append(helper.make_node("Transpose", [split], [name], name=name, perm=[0, 2, 1, 3]))


def _types(sizes: _Sizes, outputs: SoftmaxOutputs) -> dict[str, tuple[int, list[GraphDim]]]:
    """(element type, dims) of every array that there can be."""
    rows: list[GraphDim] = [sizes.batch, sizes.heads, sizes.queries]
    heads = sizes.heads if outputs.heads is None else len(outputs.heads)
    queries = sizes.queries if outputs.rows is None else len(outputs.rows)
    return {
        "heads": (sizes.dtype, [*rows, sizes.v_head_dim]),
        "lse": (TensorProto.FLOAT, rows),
        "entropy": (TensorProto.FLOAT, rows),
        "top_k_weights": (TensorProto.FLOAT, [*rows, outputs.top_k]),
        "top_k_keys": (TensorProto.INT64, [*rows, outputs.top_k]),
        "weights": (sizes.dtype, [sizes.batch, heads, queries, sizes.keys]),
    }

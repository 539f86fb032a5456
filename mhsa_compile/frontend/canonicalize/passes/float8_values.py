"""ONNX -> ONNX: values of eight-bit floats (FLOAT8E4M3FN and its like) become the same numbers in float32.

No CPU here multiplies such floats: files have them as weights, and between QuantizeLinear and DequantizeLinear. What
makes one (a QuantizeLinear, a Cast) is a Cast, and one back (`relax.float8`); what moves it moves float32. Large
weights stay bytes in the artifact, and become floats when they are bound.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mhsa_compile.errors import ModelError
from mhsa_compile.frontend.canonicalize.rewriting.model_edges import refuse_at_edges
from mhsa_compile.frontend.detach_weights import LARGE
from mhsa_compile.frontend.onnx_graph import (
    GraphView,
    all_nodes,
    attributes,
    branches,
    fresh_name,
    is_standard,
    names_in,
    node_error,
    replace,
    tensors_of,
)

_KINDS = (
    TensorProto.FLOAT8E4M3FN,
    TensorProto.FLOAT8E4M3FNUZ,
    TensorProto.FLOAT8E5M2,
    TensorProto.FLOAT8E5M2FNUZ,
)
_FLOAT = TensorProto.FLOAT


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without values of eight-bit floats; itself where it has none.

    Raises ModelError for one that takes or gives them, and for a QuantizeLinear or a Cast that does not saturate
    or gives powers of two.
    """
    refuse_at_edges(model, _KINDS, _FLOATS_AT_EDGES)
    _check_powers(model)
    if not any(True for _ in _mentions(model.graph)):
        return model
    result = copy.deepcopy(model)
    return _Floats(model, result.graph).written(result)


def _check_powers(model: onnx.ModelProto) -> None:
    """Refuses FLOAT8E8M0, which has powers of two alone."""
    power = TensorProto.FLOAT8E8M0
    for node in all_nodes(model.graph):
        if any(attribute.name in _CODES and attribute.i == power for attribute in node.attribute):
            raise node_error(node, "floats of eight bits with a sign", "float8_e8m0", _AS_FLOATS)
    for tensor in tensors_of(model):
        if tensor.data_type == power:
            raise ModelError(f"weight {tensor.name!r}", "a dtype that is understood", "float8_e8m0", _AS_FLOATS)


_FLOATS_AT_EDGES = "Put the Cast or the DequantizeLinear beside it into the file, so that floats cross the edge."
_AS_FLOATS = "Write the scales that it holds as float32."


def _mentions(graph: onnx.GraphProto) -> Iterator[int]:
    """The eight-bit dtypes that a graph states, and those in it."""
    yield from (tensor.data_type for tensor in graph.initializer if tensor.data_type in _KINDS)
    for node in graph.node:
        for attribute in node.attribute:
            codes = (attribute.i, attribute.t.data_type)
            yield from (code for code in codes if attribute.name in _CODES and code in _KINDS)
        for inner in branches(node):
            yield from _mentions(inner)


_CODES = ("to", "output_dtype", "value")


class _Floats:
    """A model's graphs, whose values of eight bits become float32. Questions are answered of the model as it was."""

    def __init__(self, model: onnx.ModelProto, graph: onnx.GraphProto) -> None:
        self._graph, self._view = graph, GraphView(model)
        self._names = names_in(model)
        self._inner = {t.name: t.data_type for node in all_nodes(graph) for g in branches(node) for t in g.initializer}
        self._nodes: list[onnx.NodeProto] = []

    def written(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """`model`, whose graph is changed."""
        floats = self._weights()
        self._rewrite(self._graph)
        replace(self._graph.node, [*floats, *self._graph.node])
        return model

    def _weights(self) -> list[onnx.NodeProto]:
        """Large weights of the graph become bytes; the nodes that make floats of them."""
        nodes, tables = [], dict[int, str]()
        for tensor in list(self._graph.initializer):
            if tensor.data_type not in _KINDS or np.prod(tensor.dims) <= LARGE:
                continue
            kind, name = tensor.data_type, tensor.name
            if kind not in tables:
                tables[kind] = fresh_name(f"{helper.tensor_dtype_to_np_dtype(kind)}_numbers", self._names)
                self._graph.initializer.append(numpy_helper.from_array(_numbers(kind), tables[kind]))
            numbers = numpy_helper.to_array(tensor).view(np.uint8)
            stored, place = (fresh_name(f"{name}_{role}", self._names) for role in ("bytes", "places"))
            tensor.CopyFrom(numpy_helper.from_array(numbers, stored))
            nodes += [
                helper.make_node("Cast", [stored], [place], name=place, to=TensorProto.INT32),
                helper.make_node("Gather", [tables[kind], place], [name], name=f"{name}/floats", axis=0),
            ]
        return nodes

    def _rewrite(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            if tensor.data_type in _KINDS:
                tensor.CopyFrom(_as_float32(tensor))
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type in _KINDS:
                value.type.tensor_type.elem_type = _FLOAT
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            for inner in branches(node):
                self._rewrite(inner)
            self._nodes = []
            self._node(node)
            nodes += self._nodes
        replace(graph.node, nodes)

    def _is_narrow(self, name: str) -> bool:
        return (self._inner.get(name) or self._view.elem_type(name)) in _KINDS

    def _node(self, node: onnx.NodeProto) -> None:
        """Writes a node in float32."""
        takes, gives = (bool(names) and self._is_narrow(names[0]) for names in (node.input, node.output))
        if is_standard(node, "DequantizeLinear") and takes:
            self._dequantised(node)
        elif is_standard(node, "QuantizeLinear") and gives:
            self._quantised(node)
        elif is_standard(node, "Cast", "CastLike") and gives:
            self._check_saturates(node)
            wide = node.input[0] if takes else self._write("Cast", [node.input[0]], to=_FLOAT)
            self._rounded(wide, self._view.elem_type(node.output[0]), node.output[0])
        else:
            for attribute in node.attribute:
                if attribute.name == "value" and attribute.t.data_type in _KINDS:
                    attribute.t.CopyFrom(_as_float32(attribute.t))
            self._nodes.append(node)

    def _check_saturates(self, node: onnx.NodeProto) -> None:
        if not attributes(node).get("saturate", 1):
            hint = "Runtimes differ in what lies beyond the largest number: write saturate=1, the default."
            raise node_error(node, "saturate=1 beside floats of eight bits", "saturate=0", hint)

    # ---- Arithmetic

    def _dequantised(self, node: onnx.NodeProto) -> None:
        self._check_zero(node)
        code = attributes(node).get("output_dtype", 0) or self._view.elem_type(node.input[1]) or _FLOAT
        scale = self._beside(node, self._write("Cast", [node.input[1]], to=_FLOAT))
        if code == _FLOAT:
            self._write("Mul", [node.input[0], scale], node.output[0])
            return
        self._write("Cast", [self._write("Mul", [node.input[0], scale])], node.output[0], to=code)

    def _quantised(self, node: onnx.NodeProto) -> None:
        self._check_saturates(node)
        self._check_zero(node)
        x, scale = (self._write("Cast", [name], to=_FLOAT) for name in node.input[:2])
        ratio = self._write("Div", [x, self._beside(node, scale)])
        self._rounded(ratio, self._view.elem_type(node.output[0]), node.output[0])

    def _check_zero(self, node: onnx.NodeProto) -> None:
        name = [*node.input, "", ""][2]
        zero = self._view.constant(name) if name else None
        if name and (zero is None or zero.astype(np.float32).any()):
            got = "one that a call computes" if zero is None else str(zero.astype(np.float32).flat[0])
            raise node_error(node, f"0 as zero point {name!r} of floats of eight bits", got)

    def _beside(self, node: onnx.NodeProto, scale: str) -> str:
        """Scales as they stand to the numbers: one, one for each place of an axis, or one for each block of it."""
        words, dims, own = attributes(node), self._view.shape(node.input[0]), self._view.shape(node.input[1])
        block, axis = words.get("block_size", 0), words.get("axis", 1)
        if own is not None and (not own or own == (1,)):
            return self._write("Reshape", [scale, self._constant(np.array([], np.int64))])
        if dims is None or own is None or not -len(dims) <= axis < len(dims):
            raise node_error(node, f"an axis of {node.input[0]!r}, of known axes", f"axis={axis}")
        axis %= len(dims)
        if not block:
            behind = list(range(1, len(dims) - axis))
            return self._write("Unsqueeze", [scale, self._constant(np.array(behind))]) if behind else scale
        if not isinstance(dims[axis], int) or len(own) != len(dims) or own[axis] != -(-int(dims[axis] or 0) // block):
            raise node_error(node, f"scales for blocks of {block} of a fixed axis", f"{own} for {dims}")
        places = self._constant(np.arange(int(dims[axis] or 0)) // block)
        return self._write("Gather", [scale, places], axis=axis)

    def _rounded(self, x: str, kind: int, output: str) -> None:
        """float32 to the nearest number of a kind: what is made by a Cast stays one, and is float32 behind the next."""
        self._write("Cast", [self._write("Cast", [x], to=kind)], output, to=_FLOAT)

    def _write(self, operator: str, inputs: Iterable[str], output: str = "", **words: object) -> str:
        name = output or fresh_name(operator.lower(), self._names)
        self._nodes.append(helper.make_node(operator, list(inputs), [name], name=f"{name}/{operator}", **words))
        return name

    def _constant(self, value: np.ndarray) -> str:
        name = fresh_name("constant", self._names)
        self._graph.initializer.append(numpy_helper.from_array(value, name))
        return name


def _numbers(code: int) -> np.ndarray:
    """The 256 numbers of a kind, by their bytes."""
    bits = np.arange(256, dtype=np.uint8)
    return np.asarray(bits.view(helper.tensor_dtype_to_np_dtype(code)).astype(np.float32))


def _as_float32(tensor: onnx.TensorProto) -> onnx.TensorProto:
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)

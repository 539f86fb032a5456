"""ONNX -> ONNX: whole numbers of four and two bits that are no stored weights of a product become bytes.

    QuantizeLinear to INT4  ->  to INT8, cut to what four bits hold

What moves them (Transpose, Gather, Reshape) moves bytes; a DequantizeLinear reads those. Weights that one
DequantizeLinear reads as they are keep their bits (`packed_weights`, which comes first).
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mhsa_compile.frontend.canonicalize.rewriting.model_edges import refuse_at_edges
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

_KINDS = {
    TensorProto.INT4: (TensorProto.INT8, -8, 7),
    TensorProto.UINT4: (TensorProto.UINT8, 0, 15),
    TensorProto.INT2: (TensorProto.INT8, -2, 1),
    TensorProto.UINT2: (TensorProto.UINT8, 0, 3),
}
"""Dtype -> that of bytes with the same sign, least and largest number."""
_DTYPE_WORDS = ("to", "output_dtype")


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without values of so few bits; itself where it has none.

    Raises ModelError for one that takes or gives them, and for a Cast to them.
    """
    refuse_at_edges(model, _KINDS, "Put the DequantizeLinear beside it into the file, so that floats cross the edge.")
    stated = (attribute.i for node in all_nodes(model.graph) for attribute in node.attribute if _is_dtype(attribute))
    if not any(code in _KINDS for code in (*stated, *(tensor.data_type for tensor in tensors_of(model)))):
        return model
    result = copy.deepcopy(model)
    return _Bytes(model, result).written()


def _is_dtype(attribute: onnx.AttributeProto) -> bool:
    return attribute.name in _DTYPE_WORDS


class _Bytes:
    """A model whose values of few bits become bytes. Questions are answered of the model as it was."""

    def __init__(self, model: onnx.ModelProto, result: onnx.ModelProto) -> None:
        self._view, self._result = GraphView(model), result
        self._names = names_in(model)

    def written(self) -> onnx.ModelProto:
        self._rewrite(self._result.graph)
        return self._result

    def _rewrite(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            _to_bytes(tensor)
        for value in (*graph.input, *graph.output, *graph.value_info):
            kind = value.type.tensor_type.elem_type
            value.type.tensor_type.elem_type = _KINDS[kind][0] if kind in _KINDS else kind
        nodes: list[onnx.NodeProto] = []
        for node in graph.node:
            for inner in branches(node):
                self._rewrite(inner)
            for attribute in node.attribute:
                if attribute.name == "value":
                    _to_bytes(attribute.t)
            nodes += self._node(node)
        replace(graph.node, nodes)

    def _node(self, node: onnx.NodeProto) -> list[onnx.NodeProto]:
        """A node of bytes."""
        kind = self._view.elem_type(node.output[0]) if node.output else 0
        if kind not in _KINDS:
            return [node]
        if is_standard(node, "Cast", "CastLike"):
            hint = "Write a QuantizeLinear with its scale: runtimes differ in what a Cast makes of other numbers."
            raise node_error(node, "a Cast to eight bits or more", str(self._view.dtype(node.output[0])), hint)
        return self._quantised(node, kind) if is_standard(node, "QuantizeLinear") else [node]

    def _quantised(self, node: onnx.NodeProto, kind: int) -> list[onnx.NodeProto]:
        """Rounded to bytes, then cut: what eight bits cut is beyond four, too."""
        code, least, most = _KINDS[kind]
        words = {name: value for name, value in attributes(node).items() if name != "output_dtype"}
        inputs, wide = list(node.input[:2]), fresh_name(f"{node.output[0]}_bytes", self._names)
        zero = [*node.input, ""][2]
        if not zero:
            shape = self._view.shape(node.input[1])
            if shape is None or not all(isinstance(size, int) for size in shape):
                raise node_error(node, f"scales {node.input[1]!r} of known shape, or a zero point", str(shape))
            zero = self._constant(np.zeros([int(size or 0) for size in shape]), code)
        bounds = [self._constant(np.array(bound), code) for bound in (least, most)]
        return [
            helper.make_node("QuantizeLinear", [*inputs, zero], [wide], name=node.name, **words),
            helper.make_node("Clip", [wide, *bounds], list(node.output), name=f"{wide}/cut"),
        ]

    def _constant(self, value: Any, code: int) -> str:
        name = fresh_name("constant", self._names)
        array = np.asarray(value).astype(helper.tensor_dtype_to_np_dtype(code))
        self._result.graph.initializer.append(numpy_helper.from_array(array, name))
        return name


def _to_bytes(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _KINDS:
        dtype = helper.tensor_dtype_to_np_dtype(_KINDS[tensor.data_type][0])
        tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(dtype), tensor.name))

"""Weights that a file holds as Constant nodes become initializers, as paddle2onnx writes them.

Those that a product takes, and the biases added behind one: a linear is made of initializers, and they are bound at
load. Other constants stay where they are, so that what is computed of them is known while compiling.
"""

from __future__ import annotations

import copy

import onnx

from mhsa_compile.frontend.detach_weights import FLOATS
from mhsa_compile.frontend.onnx_graph import attributes, replace

_PRODUCTS = ("Conv", "Gemm", "MatMul")


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its weights as initializers; itself where it has none in Constant nodes."""
    makers = {name: node for node in model.graph.node for name in node.output}
    outputs = {value.name for value in model.graph.output}
    weights: dict[str, onnx.TensorProto] = {}
    for node in model.graph.node:
        for name in _weights_read(node, makers):
            tensor = _floats(makers[name]) if name in makers and name not in outputs else None
            if tensor is not None:
                weights[name] = tensor
    if not weights:
        return model
    result = copy.deepcopy(model)
    replace(result.graph.node, (node for node in model.graph.node if not weights.keys() & set(node.output)))
    for name, tensor in weights.items():
        result.graph.initializer.add().CopyFrom(tensor)
        result.graph.initializer[-1].name = name
    return result


def _weights_read(node: onnx.NodeProto, makers: dict[str, onnx.NodeProto]) -> list[str]:
    """The inputs of a node that are weights if they are constant."""
    if node.op_type in _PRODUCTS:
        return list(node.input[1:])
    if node.op_type == "Add":
        products = [name for name in node.input if name in makers and makers[name].op_type == "MatMul"]
        return [name for name in node.input if products and name not in products]
    return []


def _floats(node: onnx.NodeProto) -> onnx.TensorProto | None:
    """What a Constant node holds, if it is a floating tensor that has axes."""
    value = attributes(node).get("value") if node.op_type == "Constant" else None
    return value if isinstance(value, onnx.TensorProto) and value.dims and value.data_type in FLOATS else None

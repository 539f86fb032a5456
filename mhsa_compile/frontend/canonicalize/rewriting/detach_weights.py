"""Large weights stay aside while a graph is rewritten: nobody looks into them, and every pass would copy them."""

from __future__ import annotations

import math

import onnx

LARGE = 1 << 12  # elements
_DATA = ("raw_data", "float_data", "int32_data")
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)

Tensors = dict[str, onnx.TensorProto]


def light(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Tensors]:
    """(the model without the contents of large floating initializers, all its initializers as they were)."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for tensor in result.graph.initializer:
        if tensor.data_type in FLOATS and math.prod(tensor.dims) > LARGE:
            for field in _DATA:
                tensor.ClearField(field)
    return result, {tensor.name: tensor for tensor in model.graph.initializer}


def whole(model: onnx.ModelProto, tensors: Tensors) -> onnx.ModelProto:
    """The model with the contents of its initializers, of the dims that they have now."""
    for tensor in model.graph.initializer:
        if tensor.name in tensors and tensor.data_type in FLOATS and math.prod(tensor.dims) > LARGE:
            dims = list(tensor.dims)
            tensor.CopyFrom(tensors[tensor.name])
            tensor.dims[:] = dims
    return model

"""Large weights stay aside while a graph is looked at: nobody reads them, and every step would copy them."""

from __future__ import annotations

import math
from typing import Any

import onnx

LARGE = 1 << 12  # elements
_DATA = ("raw_data", "float_data", "int32_data")
FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_BYTES = (onnx.TensorProto.UINT8, onnx.TensorProto.INT8)

Tensors = dict[str, onnx.TensorProto]


def without_contents(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model in which large initializers of floats and bytes have dims and a dtype, but no numbers."""
    copy = onnx.ModelProto()
    _merge(copy, model, without=("graph",))
    _merge(copy.graph, model.graph, without=("initializer",))
    for tensor in model.graph.initializer:
        _merge(copy.graph.initializer.add(), tensor, without=_DATA if is_large(tensor) else ())
    return copy


def contents_as_inputs(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of the model that takes its large initializers as inputs: as valid as the model is without them.

    onnx.checker writes out what it checks, and reads that again: of weights, for seconds.
    """
    copy = without_contents(model)
    inputs = {value.name for value in copy.graph.input}
    for i in reversed(range(len(copy.graph.initializer))):
        tensor = copy.graph.initializer[i]
        if is_large(tensor):
            if tensor.name not in inputs:
                value = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
                copy.graph.input.append(value)
            del copy.graph.initializer[i]
    return copy


def is_large(tensor: onnx.TensorProto) -> bool:
    """Whether the contents of an initializer stay aside."""
    return (tensor.data_type in FLOATS and math.prod(tensor.dims) > LARGE) or is_many_bytes(tensor)


def is_many_bytes(tensor: onnx.TensorProto) -> bool:
    """Whether an initializer may be weights of few bits: sizes, places and tables of bytes are shorter."""
    return tensor.data_type in _BYTES and math.prod(tensor.dims) > LARGE


def stored_elements(tensor: onnx.TensorProto) -> int:
    """How many numbers a tensor of floats or bytes of a file holds, whatever its dims say."""
    if tensor.HasField("raw_data"):
        return len(tensor.raw_data) // int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    return len(tensor.float_data) or len(tensor.int32_data)


def light(model: onnx.ModelProto) -> tuple[onnx.ModelProto, Tensors]:
    """(the model without the contents of large initializers, all its initializers as they were)."""
    return without_contents(model), {tensor.name: tensor for tensor in model.graph.initializer}


def _merge(target: Any, source: Any, without: tuple[str, ...]) -> None:
    """Copies the fields of a message but those of these names, without ever touching them."""
    for field, value in source.ListFields():
        if field.name in without:
            continue
        own = getattr(target, field.name)
        if hasattr(own, "MergeFrom"):  # a message or a list
            own.MergeFrom(value)
        else:
            setattr(target, field.name, value)


def whole(model: onnx.ModelProto, tensors: Tensors) -> onnx.ModelProto:
    """The model with the contents of its initializers, of the dims that they have now."""
    for tensor in model.graph.initializer:
        if tensor.name in tensors and is_large(tensor):
            dims = list(tensor.dims)
            tensor.CopyFrom(tensors[tensor.name])
            tensor.dims[:] = dims
    return model

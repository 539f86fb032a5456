"""Weights that DequantizeLinear takes by blocks, or of four bits, written out: (q - z) s, in float32.

Numbers of four bits become bytes. What is written depends on weights alone, so it is computed when they are bound
(`compiler.derived_weights`). Notation: an axis of D numbers has n blocks of b.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import attributes
from mhsa_compile.frontend.reading.conditions import is_packed

_BYTES = {TensorProto.INT4: np.int8, TensorProto.UINT4: np.uint8}


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such weights written out; itself where it has none."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    packed = [node for node in model.graph.node if is_packed(node, weights)]
    if not packed:
        return model
    rewriter, bytes_of = Rewriter(model), dict[str, str]()
    for node in packed:
        _written_out(rewriter, node, weights, bytes_of)
        rewriter.place(node)
    return rewriter.finished()


def _written_out(
    rewriter: Rewriter, node: onnx.NodeProto, weights: dict[str, onnx.TensorProto], bytes_of: dict[str, str]
) -> None:
    tensor, attrs = weights[node.input[0]], attributes(node)
    dims, block = list(tensor.dims), attrs.get("block_size", 0)
    axis = attrs.get("axis", 1) % max(1, len(dims))
    scale = weights[node.input[1]]
    split = [*dims[:axis], dims[axis] // block, block, *dims[axis + 1 :]] if block else dims

    def floats(name: str) -> str:
        return rewriter.node("Cast", _bytes(rewriter, weights[name], bytes_of), to=TensorProto.FLOAT)

    def beside(name: str) -> str:
        """Scales or zero points as they stand to the numbers."""
        values, own = floats(name), list(weights[name].dims)
        if block:
            shape = [*own[: axis + 1], 1, *own[axis + 1 :]]
        elif len(own) == 1 and own[0] != 1:
            shape = [own[0] if i == axis else 1 for i in range(len(dims))]
        else:
            return values
        return rewriter.node("Reshape", values, rewriter.constant(shape, "int64"))

    numbers = floats(node.input[0])
    if block:
        numbers = rewriter.node("Reshape", numbers, rewriter.constant(split, "int64"))
    if len(node.input) > 2 and node.input[2]:
        numbers = rewriter.node("Sub", numbers, beside(node.input[2]))
    product = rewriter.node("Mul", numbers, beside(node.input[1]))
    if block:
        product = rewriter.node("Reshape", product, rewriter.constant(dims, "int64"))
    kind = attrs.get("output_dtype", 0) or scale.data_type
    rewriter.node("Cast", product, output=node.output[0], to=kind)


def _bytes(rewriter: Rewriter, tensor: onnx.TensorProto, bytes_of: dict[str, str]) -> str:
    """The name of an initializer with the same numbers, of four bits as bytes."""
    if tensor.data_type not in _BYTES:
        return str(tensor.name)
    if tensor.name not in bytes_of:
        array: Any = numpy_helper.to_array(tensor)
        bytes_of[tensor.name] = rewriter.constant(array.astype(_BYTES[tensor.data_type]), hint=f"{tensor.name}_bytes")
    return bytes_of[tensor.name]

"""MatMulNBits with weights that the file has, while a model becomes canonical: products with matrices of no contents.

Nobody infers shapes through an operator of Microsoft's, and no pass has to look into this one: it stays as it is, and
becomes a linear of blocks (`frontend.fusion`).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper, numpy_helper

from mhsa_compile.frontend.detach_weights import Tensors, is_large
from mhsa_compile.frontend.onnx_graph import GraphView, attributes
from mhsa_compile.frontend.reading.microsoft import stored_products

_MATRIX = "mhsa.blocks."
"""How the names of these matrices begin."""


def hidden(model: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.NodeProto]]:
    """(the model with a MatMul for each such product, the products by the name of its matrix)."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    products = {f"{_MATRIX}{node.output[0]}": node for node in stored_products(model.graph.node, weights)}
    if not products:
        return model, {}
    matrices = {node.output[0]: name for name, node in products.items()}
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    for i, node in enumerate(model.graph.node):
        if node.output[0] not in matrices:
            continue
        name, words = matrices[node.output[0]], attributes(node)
        graph.node[i].CopyFrom(helper.make_node("MatMul", [node.input[0], name], node.output, name=node.name))
        matrix = onnx.TensorProto(name=name, data_type=weights[node.input[2]].data_type, dims=(words["K"], words["N"]))
        if not is_large(matrix):
            dtype = helper.tensor_dtype_to_np_dtype(matrix.data_type)
            matrix = numpy_helper.from_array(np.zeros(tuple(matrix.dims), dtype), name)
        graph.initializer.append(matrix)
    return result, products


def restored(model: onnx.ModelProto, products: Mapping[str, onnx.NodeProto], tensors: Tensors) -> onnx.ModelProto:
    """The model with the products in their places again, and with what is known of their results' shapes. `tensors` has
    their weights, which nobody read meanwhile."""
    if not products:
        return model
    weights = dict[str, None]()
    view, known = GraphView(model), {value.name for value in (*model.graph.value_info, *model.graph.output)}
    for node in model.graph.node:
        product = products.get(node.input[1]) if node.op_type == "MatMul" else None
        if product is not None:
            weights |= dict.fromkeys(filter(None, product.input[1:]))
            inputs = [node.input[0], *product.input[1:]]
            outputs, name = list(node.output), node.name
            node.CopyFrom(product)
            node.input[:], node.output[:], node.name = inputs, outputs, name
            shape, dtype = view.shape(outputs[0]), view.dtype(outputs[0])
            if shape is not None and dtype is not None and outputs[0] not in known:
                code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
                model.graph.value_info.append(helper.make_tensor_value_info(outputs[0], code, list(shape)))
    there = {tensor.name for tensor in model.graph.initializer}
    model.graph.initializer.extend(tensors[name] for name in weights if name not in there)
    for i in reversed(range(len(model.graph.initializer))):
        if model.graph.initializer[i].name in products:
            del model.graph.initializer[i]
    return model

"""Weights that DequantizeLinear makes floats of, by blocks or of four bits: (q - z) s.

A product of them that ONNX Runtime turns into its MatMulNBits, at the level of accuracy that lets it round activations
to eight bits, becomes that same node: its results are what people compare with, and it is as fast here. Whatever else
reads such weights gets them written out in float32, numbers of four bits as bytes; that depends on weights alone, so it
is computed when they are bound (`compiler.derived_weights`). So does whatever a branch or a body reads of them.

Tables of INT4 and UINT4 that GatherBlockQuantized takes rows of become its tables of bytes, where 8 stands for 0; those
of other axes, of more of them or of rows that end within a block become floats.

Notation: an axis of D numbers has n blocks of b; a matrix is (K, N).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from mhsa_compile.frontend import branch_graphs
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import add_import, attributes, inner_nodes, is_standard, node_error
from mhsa_compile.frontend.reading import microsoft, standard

_BYTES = {TensorProto.INT4: np.int8, TensorProto.UINT4: np.uint8}
_NUMBERS = {TensorProto.INT4: 4, TensorProto.UINT4: 4, TensorProto.INT8: 8, TensorProto.UINT8: 8}
_SIGNED = (TensorProto.INT4, TensorProto.INT8)
_LEAST_BLOCK, _OWN_BLOCK = 16, 32
"""ONNX Runtime's least block, and the one for weights without blocks."""


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such products as MatMulNBits, and with all else of them written out; itself where it has none.
    Raises ModelError for scales that are none."""
    inner = (inner for node in model.graph.node for inner in inner_nodes(node))
    if any(_dequantises(node) or microsoft.is_gather(node) for node in inner):
        model = branch_graphs.rewritten(model, _of_body)
    return _rewritten(model, products=True)


def _of_body(body: onnx.ModelProto) -> onnx.ModelProto:
    return branch_graphs.rewritten(_rewritten(body, products=False), _of_body)


def _rewritten(model: onnx.ModelProto, *, products: bool) -> onnx.ModelProto:
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    stored = {"", *weights}
    nodes = [node for node in model.graph.node if _dequantises(node)]
    nodes = [node for node in nodes if stored.issuperset(node.input)]
    gathers = [node for node in model.graph.node if microsoft.is_gather(node)]
    gathers = [node for node in gathers if node.input[0] in weights and weights[node.input[0]].data_type in _BYTES]
    if not (nodes or gathers):
        return model
    rewriter, bytes_of = Rewriter(model), dict[str, str]()
    for node in gathers:
        if _is_of_rows(node, weights[node.input[0]]):
            _table_of_bytes(rewriter, node, weights)
        else:
            _table_of_floats(rewriter, node, weights, bytes_of)
        rewriter.place(node)
    for node in nodes:
        if (mismatch := standard.scales_of_weights(rewriter.graph, node)) is not None:
            raise node_error(node, *mismatch)
        product = _product(rewriter, node, weights) if products else None
        if product is not None:
            _as_blocks(rewriter, product, node, weights)
            rewriter.place(product)
        elif standard.is_packed(node, weights):
            _written_out(rewriter, node, weights, bytes_of)
            rewriter.place(node)
    result = rewriter.finished()
    if result is not model:
        add_import(result, microsoft.DOMAIN)
    return result


def _dequantises(node: onnx.NodeProto) -> bool:
    """Whether a node is DequantizeLinear, the standard's or ONNX Runtime's, which its quantiser writes for four bits
    before opset 21."""
    own = node.domain == microsoft.DOMAIN and node.op_type == "DequantizeLinear"
    return own or is_standard(node, "DequantizeLinear")


def _is_pair(left: onnx.NodeProto | None, weights: dict[str, onnx.TensorProto]) -> bool:
    """Whether x is made of bytes already, which are multiplied as they are."""
    return left is not None and _dequantises(left) and left.input[0] not in weights


def _product(rewriter: Rewriter, node: onnx.NodeProto, weights: dict[str, onnx.TensorProto]) -> onnx.NodeProto | None:
    """The MatMul of floats that alone reads these weights, if ONNX Runtime would take both together."""
    graph, tensor, scale, attrs = rewriter.graph, weights[node.input[0]], weights[node.input[1]], attributes(node)
    product = graph.only_consumer(node.output[0], "MatMul")
    if product is None or list(product.input).index(node.output[0]) != 1 or tensor.data_type not in _NUMBERS:
        return None
    left = graph.producer(product.input[0])
    kind = attrs.get("output_dtype", 0) or scale.data_type
    if len(tensor.dims) != 2 or _is_pair(left, weights) or kind != scale.data_type:
        return None
    block, axis = attrs.get("block_size", 0), attrs.get("axis", 1) % 2
    if block:
        is_taken = axis == 0 and block >= _LEAST_BLOCK and block & (block - 1) == 0
    else:
        is_taken = math.prod(scale.dims) == 1 or axis == 1
    return product if is_taken else None


def _as_blocks(
    rewriter: Rewriter, product: onnx.NodeProto, node: onnx.NodeProto, weights: dict[str, onnx.TensorProto]
) -> None:
    tensor, block = weights[node.input[0]], attributes(node).get("block_size", 0) or _OWN_BLOCK
    (K, N), bits, middle = tensor.dims, _NUMBERS[tensor.data_type], 0
    if tensor.data_type in _SIGNED:
        middle = 1 << (bits - 1)
    n = -(-K // block)

    def spread(name: str) -> np.ndarray:
        """(N, n) of what each block has."""
        values = numpy_helper.to_array(weights[name])
        values = values.T if values.ndim == 2 else values.reshape(-1, 1)
        return np.ascontiguousarray(np.broadcast_to(values, (N, n)))

    q = np.zeros((N, n * block), np.int16)
    q[:, :K] = numpy_helper.to_array(tensor).astype(np.int16).T + middle
    operands = [
        product.input[0],
        rewriter.constant(_packed(q, bits).reshape(N, n, -1), hint=f"{tensor.name}_blocks"),
        rewriter.constant(spread(node.input[1]), hint=f"{node.input[1]}_blocks"),
    ]
    zeros = node.input[2] if len(node.input) > 2 else ""
    if zeros or not middle:
        points = spread(zeros).astype(np.int16) + middle if zeros else np.zeros((N, n), np.int16)
        operands.append(rewriter.constant(_packed(points, bits), hint=f"{zeros or tensor.name}_points"))
    words = {"K": K, "N": N, "bits": bits, "block_size": block, "accuracy_level": microsoft.BYTES_LEVEL}
    name = product.name or product.output[0]
    blocks = helper.make_node("MatMulNBits", operands, product.output, name=name, domain=microsoft.DOMAIN, **words)
    rewriter.append(blocks)


def _is_of_rows(node: onnx.NodeProto, table: onnx.TensorProto) -> bool:
    """Whether a GatherBlockQuantized takes rows of a matrix, which are whole blocks."""
    words, dims = attributes(node), table.dims
    axes = words.get("gather_axis", 0) % len(dims), words.get("quantize_axis", 1) % len(dims)
    return len(dims) == 2 and axes == (0, 1) and dims[1] % words.get("block_size", 128) == 0


def _table_of_floats(
    rewriter: Rewriter, node: onnx.NodeProto, weights: dict[str, onnx.TensorProto], bytes_of: dict[str, str]
) -> None:
    """Writes a GatherBlockQuantized as a Gather of all numbers as floats, which are made once."""
    (table, indices, scales, points), words = [*node.input, ""][:4], attributes(node)
    dims = weights[table].dims
    axis = words.get("quantize_axis", 1) % len(dims)
    places = rewriter.constant(np.arange(dims[axis]) // words.get("block_size", 128), "int64")

    def spread(name: str) -> str:
        """What each number has of its block."""
        floats = rewriter.node("Cast", _bytes(rewriter, weights[name], bytes_of), to=TensorProto.FLOAT)
        return rewriter.node("Gather", floats, places, axis=axis)

    numbers = rewriter.node("Cast", _bytes(rewriter, weights[table], bytes_of), to=TensorProto.FLOAT)
    if points:
        numbers = rewriter.node("Sub", numbers, spread(points))
    floats = rewriter.node("Mul", numbers, spread(scales))
    rows = rewriter.node("Gather", floats, indices, axis=words.get("gather_axis", 0))
    rewriter.node("Cast", rows, output=node.output[0], to=weights[scales].data_type)


def _table_of_bytes(rewriter: Rewriter, node: onnx.NodeProto, weights: dict[str, onnx.TensorProto]) -> None:
    """Writes a GatherBlockQuantized of four bits as that of bytes. Without zero points, 0 is the one of all."""
    table, indices, scales, points = [*node.input, ""][:4]
    middle = 8 if weights[table].data_type in _SIGNED else 0

    def packed(numbers: np.ndarray, name: str) -> str:
        return rewriter.constant(_packed(numbers.astype(np.int16) + middle, 4), hint=f"{name}_bytes")

    operands = [packed(numpy_helper.to_array(weights[table]), table), indices, scales]
    if points or not middle:
        dims = tuple(weights[scales].dims)
        zeros = numpy_helper.to_array(weights[points]) if points else np.zeros(dims, np.int16)
        operands.append(packed(zeros, points or f"{table}_points"))
    words = {**attributes(node), "bits": 4, "quantize_axis": 1}
    gather = helper.make_node(node.op_type, operands, node.output, name=node.name, domain=node.domain, **words)
    rewriter.append(gather)


def _packed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Rows of numbers in bytes, the first in the lowest bits."""
    together = 8 // bits
    whole = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % together))).astype(np.uint8)
    apart = whole.reshape(len(numbers), -1, together) << (bits * np.arange(together, dtype=np.uint8))
    return np.asarray(np.bitwise_or.reduce(apart, axis=-1))


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

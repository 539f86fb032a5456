"""Files whose values are rounded to bytes at every arrow, with as few roundings as say the same.

    QLinearMatMul, QLinearConv                      ->  MatMul, Conv between DequantizeLinear and QuantizeLinear
    DequantizeLinear(a bias or a number of the file)  ->  floats
    DequantizeLinear(Reshape(bytes))                ->  Reshape(DequantizeLinear(bytes)); Transpose and others alike
    DequantizeLinear(QuantizeLinear(x))             ->  x, where x is such a value already, perhaps moved

    Reshape(DequantizeLinear(QuantizeLinear(x)))    ->  DequantizeLinear(QuantizeLinear(Reshape(x))), before a product
                                                        with a matrix of the file, which takes bytes

None of these changes a bit. In the fourth, x is a whole number of the same steps, and the nearest to its quotient is
that number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from mhsa_compile.frontend.canonicalize.passes.remove_identities import without_aliases
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.detach_weights import Tensors
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes, is_standard
from mhsa_compile.frontend.reading.standard import convolved

_MOVES = ("Expand", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that put the elements of their first input elsewhere, and change none."""


class Steps(NamedTuple):
    """What bytes stand for: (byte - zero) * scale."""

    scale: float
    zero: int
    dtype: str


def steps_of(graph: GraphView, node: onnx.NodeProto) -> Steps | None:
    """Those of a QuantizeLinear or DequantizeLinear by one constant number each; None of any other."""
    scale, zero = ([*node.input, ""][i] for i in (1, 2))
    factor = graph.constant(scale)
    point = graph.constant(zero) if zero else np.zeros((), np.uint8)
    if factor is None or point is None or factor.size != 1 or point.size != 1 or factor.dtype != np.float32:
        return None
    if str(point.dtype) not in ("int8", "uint8") or attributes(node).get("output_dtype", 0):
        return None
    return Steps(float(factor.reshape(-1)[0]), int(point.reshape(-1)[0]), str(point.dtype))


def rewrite(model: onnx.ModelProto, tensors: Tensors) -> onnx.ModelProto:
    """The model, or itself where it has no such operators; `tensors` are its weights with their contents."""
    if not any(is_standard(node, "DequantizeLinear", "QLinearConv", "QLinearMatMul") for node in model.graph.node):
        return model
    return _rounded_last(_RoundedGraph(_products_of_floats(model, tensors), tensors).result())


def _products_of_floats(model: onnx.ModelProto, tensors: Tensors) -> onnx.ModelProto:
    """The model without QLinearMatMul by one scale for A, by one or one for each column for a B of two axes, and
    without QLinearConv of weights of the file over all channels."""
    rewriter = Rewriter(model)
    for node in rewriter.graph.nodes:
        if is_standard(node, "QLinearMatMul"):
            written = _matmul(rewriter, node)
        else:
            written = is_standard(node, "QLinearConv") and _convolution(rewriter, node, tensors)
        if written:
            rewriter.place(node)
    return rewriter.finished()


def _matmul(rewriter: Rewriter, node: onnx.NodeProto) -> bool:
    graph = rewriter.graph
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = node.input
    if not _are_numbers(graph, a_scale, a_zero, y_scale, y_zero):
        return False
    columns = graph.dims(b)[1:] if len(graph.dims(b)) == 2 else ()
    if not _are_numbers(graph, b_scale, b_zero) and not _are_alike(graph, b_scale, b_zero, columns):
        return False
    left = rewriter.node("DequantizeLinear", a, a_scale, a_zero)
    right = rewriter.node("DequantizeLinear", b, b_scale, b_zero, axis=1)
    product = rewriter.node("MatMul", left, right)
    rewriter.node("QuantizeLinear", product, y_scale, y_zero, output=node.output[0])
    return True


def _convolution(rewriter: Rewriter, node: onnx.NodeProto, tensors: Tensors) -> bool:
    graph, words = rewriter.graph, attributes(node)
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias = [*node.input, ""][:9]
    one, scales = (_array(graph, tensors, name) for name in (x_scale, w_scale))
    if words.get("group", 1) != 1 or w not in graph.initializers or one is None or scales is None:
        return False
    if convolved(graph, node) is not None:  # which is refused by its own name
        return False
    if not _are_numbers(graph, x_scale, x_zero, y_scale, y_zero) or len(graph.dims(x)) != len(graph.dims(w)):
        return False
    if not _are_numbers(graph, w_scale, w_zero) and not _are_alike(graph, w_scale, w_zero, graph.dims(w)[:1]):
        return False
    whole = _array(graph, tensors, bias) if bias else None
    if bias and whole is None:
        return False
    operands = [
        rewriter.node("DequantizeLinear", x, x_scale, x_zero),
        rewriter.node("DequantizeLinear", w, w_scale, w_zero, axis=0),
    ]
    if whole is not None:
        floats = (whole.astype(np.float32) * (one.reshape(-1) * scales.reshape(-1))).astype(np.float32)
        operands.append(rewriter.constant(floats, hint=f"{bias}.floats"))
    y = rewriter.node("Conv", *operands, **words)
    rewriter.node("QuantizeLinear", y, y_scale, y_zero, output=node.output[0])
    return True


def _are_numbers(graph: GraphView, *names: str) -> bool:
    return all(graph.shape(name) in ((), (1,)) for name in names)


def _are_alike(graph: GraphView, scale: str, zero: str, dims: tuple[GraphDim, ...]) -> bool:
    """Whether there is a scale and a zero point for each row or column, of which there are so many."""
    return len(dims) == 1 and graph.shape(scale) == graph.shape(zero) == dims


def _array(graph: GraphView, tensors: Tensors, name: str) -> Any:
    """What the file has under this name, or None."""
    return numpy_helper.to_array(tensors[name]) if name in tensors else graph.constant(name)


def _rounded_last(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model whose products with matrices of the file read what is rounded, and not what is moved thereafter."""
    rewriter = Rewriter(without_aliases(model))
    graph = rewriter.graph
    for node in graph.nodes:
        weight = graph.producer(node.input[1], "DequantizeLinear") if is_standard(node, "MatMul") else None
        if weight is None or weight.input[0] not in graph.initializers:
            continue
        value, moves = node.input[0], list[onnx.NodeProto]()
        while (maker := graph.producer(value)) is not None and is_standard(maker, *_MOVES):
            value = maker.input[0]
            moves.append(maker)
        floats = graph.producer(value, "DequantizeLinear")
        rounded = graph.producer(floats.input[0], "QuantizeLinear") if floats is not None else None
        if not moves or floats is None or rounded is None:
            continue
        if (steps := steps_of(graph, rounded)) is None or steps_of(graph, floats) != steps:
            continue
        source = rounded.input[0]
        for move in reversed(moves):
            source = rewriter.node(move.op_type, source, *move.input[1:], **attributes(move))
        bytes_ = rewriter.node("QuantizeLinear", source, *rounded.input[1:])
        left = rewriter.node("DequantizeLinear", bytes_, *floats.input[1:])
        rewriter.node("MatMul", left, node.input[1], output=node.output[0])
        rewriter.place(node)
    return rewriter.finished()


class _RoundedGraph:
    """One walk over the graph. `steps`: values of floats -> the steps of which they are whole numbers; `floats`:
    values of bytes, and what they stand for -> these floats."""

    def __init__(self, model: onnx.ModelProto, tensors: Tensors) -> None:
        self.rewriter, self.tensors = Rewriter(model), tensors
        self.graph = self.rewriter.graph
        self.steps: dict[str, Steps] = {}
        self.floats: dict[tuple[str, Steps], str] = {}

    def result(self) -> onnx.ModelProto:
        for node in self.graph.nodes:
            if is_standard(node, *_MOVES) and node.input[0] in self.steps:
                self.steps[node.output[0]] = self.steps[node.input[0]]
            elif is_standard(node, "QuantizeLinear"):
                steps = steps_of(self.graph, node)
                if steps is not None and self.steps.get(node.input[0]) == steps:
                    self.floats[node.output[0], steps] = node.input[0]
            elif is_standard(node, "DequantizeLinear"):
                self._dequantised(node)
        return self.rewriter.finished()

    def _dequantised(self, node: onnx.NodeProto) -> None:
        name, output, steps = node.input[0], node.output[0], steps_of(self.graph, node)
        if name in self.graph.initializers:
            self._stored(node)
            return
        if steps is None or self.graph.dtype(name) != steps.dtype:
            return
        floats = self._floats_of(name, steps, node)
        self.steps[output] = self.steps[floats] = steps
        if floats != output:
            self.rewriter.node("Identity", floats, output=output)
            self.rewriter.place(node)

    def _floats_of(self, name: str, steps: Steps, node: onnx.NodeProto) -> str:
        """The value that these bytes stand for, which may be made by what is written for it."""
        if (name, steps) not in self.floats:
            maker = self.graph.producer(name)
            if maker is not None and is_standard(maker, *_MOVES) and maker.input[0] not in self.graph.initializers:
                source = self._floats_of(maker.input[0], steps, node)
                value = self.rewriter.node(maker.op_type, source, *maker.input[1:], **attributes(maker))
            elif node.input[0] == name:
                value = node.output[0]
            else:
                value = self.rewriter.node("DequantizeLinear", name, *node.input[1:])
            self.floats[name, steps] = value
        return self.floats[name, steps]

    def _stored(self, node: onnx.NodeProto) -> None:
        """Writes floats for a number, or a row of them, that the file has in bytes."""
        if len(self.graph.dims(node.input[0])) > 1 or attributes(node).get("block_size", 0):
            return
        arrays = [_array(self.graph, self.tensors, name) for name in node.input if name]
        if any(array is None for array in arrays):
            return
        values, scale, *zero = arrays
        if scale.dtype != np.float32 or attributes(node).get("output_dtype", 0) not in (0, onnx.TensorProto.FLOAT):
            return
        if any(one.size not in (1, values.size) for one in (scale, *zero)):
            return
        whole = values.astype(np.int64) - (zero[0].astype(np.int64).reshape(-1)[: values.size] if zero else 0)
        floats = (whole.astype(np.float32) * scale.reshape(-1)).reshape(values.shape).astype(np.float32)
        constant = self.rewriter.constant(floats, hint=f"{node.input[0]}.floats")
        self.rewriter.node("Identity", constant, output=node.output[0])
        self.rewriter.place(node)

"""Norms of rows that an exporter wrote as what they consist of, as the one operator that they are.

    c = x - mean(x);  c / sqrt(mean(c^2) + e) * w + b   ->  LayerNormalization(x, w, b)    before opset 17
    x / sqrt(mean(x^2) + e) * w                         ->  RMSNormalization(x, w)         Llama's in PyTorch

One after the other their nodes are as many passes over memory. Of float32 alone: narrower floats would be rounded, and
overflow, at other places than the file says.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import attributes, is_standard


@dataclass(frozen=True)
class _Norm:
    """Rows of `x` by their size, from their mean if `is_centred`."""

    x: str
    epsilon: float
    is_centred: bool


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with norms as one node each, where nobody else reads what lies between."""
    if not any(node.op_type == "Sqrt" for node in model.graph.node):
        return model
    rewriter = Rewriter(model)
    graph = rewriter.graph
    for node in graph.nodes:
        scaled = _scaled(graph, node)
        if scaled is None:
            continue
        norm, weight = scaled
        add = graph.only_consumer(node.output[0], "Add") if norm.is_centred else None
        bias = None if add is None else _other(graph, add, node.output[0], graph.dims(weight))
        operands = (norm.x, weight) if bias is None else (norm.x, weight, bias)
        last = node if add is None or bias is None else add
        operator = "LayerNormalization" if norm.is_centred else "RMSNormalization"
        rewriter.node(operator, *operands, output=last.output[0], axis=-1, epsilon=norm.epsilon)
        rewriter.place(last)
    return rewriter.finished()


def _scaled(graph: KnownGraph, node: onnx.NodeProto) -> tuple[_Norm, str] | None:
    """(the norm, the weight) of which a Mul is the product, element by element of a row."""
    if not is_standard(node, "Mul"):
        return None
    for normed in node.input:
        rows = graph.dims(normed)
        weight = _other(graph, node, normed, rows[-1:]) if rows and isinstance(rows[-1], int) else None
        if weight is not None and graph.is_read_once(normed) and (norm := _norm(graph, normed)) is not None:
            return norm, weight
    return None


def _norm(graph: KnownGraph, name: str) -> _Norm | None:
    """What a value is the norm of: c / sqrt(a), or c times 1 / sqrt(a)."""
    node = graph.producer(name)
    if node is None or graph.dtype(name) != "float32" or not is_standard(node, "Div", "Mul"):
        return None
    pairs = [node.input, reversed(node.input)] if node.op_type == "Mul" else [node.input]
    for c, divisor in pairs:
        root = divisor if node.op_type == "Div" else _inverse(graph, divisor)
        size = None if root is None else graph.producer(root, "Sqrt")
        epsilon = None if size is None else _epsilon(graph, size.input[0], c)
        if epsilon is not None:
            x = _uncentred(graph, c)
            return _Norm(x or c, epsilon, x is not None)
    return None


def _inverse(graph: KnownGraph, name: str) -> str | None:
    """The value that this one is 1 divided by."""
    node = graph.producer(name)
    if node is not None and is_standard(node, "Reciprocal"):
        return str(node.input[0])
    if node is not None and is_standard(node, "Div") and graph.scalar(node.input[0]) == 1:
        return str(node.input[1])
    return None


def _epsilon(graph: KnownGraph, name: str, c: str) -> float | None:
    """The e of mean(c^2) + e, None where a value is something else."""
    add = graph.producer(name, "Add")
    for square, added in () if add is None else (add.input, reversed(add.input)):
        epsilon, values = graph.scalar(added), _averaged(graph, square)
        if epsilon is not None and values is not None and _is_square(graph, values, c):
            return epsilon
    return None


def _is_square(graph: KnownGraph, name: str, c: str) -> bool:
    node = graph.producer(name)
    if node is None or not graph.is_read_once(name):
        return False
    power = is_standard(node, "Pow") and node.input[0] == c and graph.scalar(node.input[1]) == 2
    return power or (is_standard(node, "Mul") and list(node.input) == [c, c])


def _uncentred(graph: KnownGraph, c: str) -> str | None:
    """The x of c = x - mean(x)."""
    node = graph.producer(c, "Sub")
    return str(node.input[0]) if node is not None and _averaged(graph, node.input[1]) == node.input[0] else None


def _averaged(graph: KnownGraph, name: str) -> str | None:
    """The value of whose rows this one is the mean, an axis of 1 in their place."""
    node = graph.producer(name, "ReduceMean")
    if node is None or not attributes(node).get("keepdims", 1) or len(node.input) < 2:
        return None
    axes, rank = graph.array(node.input[1]), len(graph.dims(node.input[0]))
    is_last = axes is not None and axes.size == 1 and int(axes.reshape(-1)[0]) in (-1, rank - 1) and rank > 0
    return str(node.input[0]) if is_last else None


def _other(graph: KnownGraph, node: onnx.NodeProto, name: str, dims: tuple[object, ...]) -> str | None:
    """The other operand of a node, where it is one number for each element of a row."""
    first, second = node.input
    other = str(second if first == name else first)
    return other if first != second and graph.dims(other) == dims and graph.dtype(other) == "float32" else None

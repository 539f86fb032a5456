"""Einsum as MatMul: a product of matrices, in whatever order its axes are written, is what the matchers know.

    bhld,bshd->bhls    MatMul(q, Transpose(k))
    aecd,abcd->acbe    the same of (batch, length, heads, head size), keys first, as Keras has it
    bld,de->ble        MatMul(x, weight)
    bld,dhe->blhe      the same with a weight that has its heads apart, which are put together

What is none, such as a sum over one operand alone or a diagonal, stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_letters
from typing import NamedTuple

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphDim, GraphView, attributes


class _Product(NamedTuple):
    """A product of matrices, one letter an axis. `first` is the place, among the inputs, of the operand that goes
    left."""

    first: int
    left: str
    right: str
    output: str
    batch: str
    rows: str
    inner: str
    columns: str


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with every Einsum that is a product of matrices as a MatMul, with a Transpose where one is needed."""
    if not any(node.op_type == "Einsum" for node in model.graph.node):
        return model
    rewriter, flat = Rewriter(model), dict[str, list[int]]()
    for node in rewriter.graph.nodes:
        terms = _terms(rewriter.graph, node) if node.op_type == "Einsum" else None
        if terms is None:
            continue
        product = _product(rewriter.graph, node, *terms)
        if product is not None:
            _write(rewriter, node, product)
            rewriter.place(node)
        elif _is_projection(rewriter.graph, node, *terms):
            rewriter.place(_write_projection(rewriter, node, terms, flat))
    result = rewriter.finished()
    for tensor in result.graph.initializer:
        if tensor.name in flat:
            tensor.dims[:] = flat[tensor.name]
    return result


def _is_projection(graph: GraphView, node: onnx.NodeProto, x: str, weight: str, output: str) -> bool:
    """Whether an Einsum is a product with a weight whose several axes, of either kind, lie side by side in memory."""
    count = sum(letter in x for letter in weight)
    rows = x[: len(x) - count]
    fits = x == rows + weight[:count] and output == rows + weight[count:] and 0 < count < len(weight)
    return fits and _is_own(graph, node.input[1])


def _is_own(graph: GraphView, name: str) -> bool:
    """Whether a value is a weight that one node reads, whose shape is that node's own affair."""
    return name in graph.initializers and name not in graph.outputs and len(graph.consumers(name)) == 1


def _write_projection(
    rewriter: Rewriter, node: onnx.NodeProto, terms: Sequence[str], flat: dict[str, list[int]]
) -> onnx.NodeProto:
    """Writes the product over rows (..., inputs), with a bias of their outputs where one is added. `flat` is told the
    dims of weights.

    Returns the node whose place what was written takes.
    """
    graph, (x, weight), end = rewriter.graph, node.input, node
    inner, dims = sum(letter in terms[0] for letter in terms[1]), list(graph.initializers[weight].dims)
    flat[weight] = [math.prod(dims[:inner]), math.prod(dims[inner:])]
    leading = [0] * (len(terms[0]) - inner)
    if inner > 1:
        x = rewriter.node("Reshape", x, rewriter.constant([*leading, -1], "int64"))
    rows = rewriter.node("MatMul", x, weight)
    added = graph.only_consumer(node.output[0], "Add")
    bias = None if added is None else next(name for name in added.input if name != node.output[0])
    if added is not None and bias is not None and _is_own(graph, bias) and graph.shape(bias) == tuple(dims[inner:]):
        flat[bias], end = flat[weight][1:], added
        rows = rewriter.node("Add", rows, bias)
    rewriter.node("Reshape", rows, rewriter.constant([*leading, *dims[inner:]], "int64"), output=end.output[0])
    return end


def _write(rewriter: Rewriter, node: onnx.NodeProto, product: _Product) -> None:
    batch, rows, inner, columns = product[4:]
    left, right = (node.input[product.first], node.input[1 - product.first])
    left = _ordered(rewriter, left, product.left, batch + rows + inner)
    right = _ordered(rewriter, right, product.right, batch + inner + columns)
    letters = batch + rows + columns
    if letters == product.output:
        rewriter.node("MatMul", left, right, output=node.output[0])
        return
    whole = rewriter.node("MatMul", left, right)
    rewriter.node("Transpose", whole, output=node.output[0], perm=[letters.index(letter) for letter in product.output])


def _ordered(rewriter: Rewriter, name: str, letters: str, order: str) -> str:
    if letters == order:
        return name
    return rewriter.node("Transpose", name, perm=[letters.index(letter) for letter in order])


def _product(graph: GraphView, node: onnx.NodeProto, *terms: str) -> _Product | None:
    """What an Einsum of two operands is, if each of its letters has one of the four places of a product."""
    *operands, output = terms
    inner = "".join(letter for letter in operands[0] if letter in operands[1] and letter not in output)
    batch = "".join(letter for letter in output if letter in operands[0] and letter in operands[1])
    free = ["".join(letter for letter in output if letter in term and letter not in batch) for term in operands]
    alone = any(len(term) != len(batch) + len(own) + len(inner) for term, own in zip(operands, free, strict=True))
    if alone or len(output) != len(batch) + len(free[0]) + len(free[1]) or len(inner) != 1 or not all(free):
        return None
    first = 0 if output.index(free[0][0]) < output.index(free[1][0]) else 1
    rows, columns = free[first], free[1 - first]
    if len(columns) != 1 or (len(rows) != 1 and batch) or not _same_size(graph, node, operands, inner):
        return None
    return _Product(first, operands[first], operands[1 - first], output, batch, rows, inner, columns)


def _terms(graph: GraphView, node: onnx.NodeProto) -> list[str] | None:
    """The letters of two operands and of the output, "..." spelt out; None where a letter is there twice."""
    equation = str(attributes(node)["equation"]).replace(" ", "")
    terms, arrow, output = equation.partition("->")
    operands = terms.split(",")
    if len(operands) != 2:
        return None
    if not arrow:
        once = (letter for letter in ascii_letters if terms.count(letter) == 1)
        output = "..." * ("..." in terms) + "".join(sorted(once))
    if "..." in equation:
        ranks = [len(graph.dims(name)) for name in node.input]
        hidden = {rank - len(term) + 3 for rank, term in zip(ranks, operands, strict=True)}
        if not all("..." in term for term in (*operands, output)) or len(hidden) != 1 or (count := hidden.pop()) < 0:
            return None
        fresh = "".join(letter for letter in ascii_letters if letter not in equation)[:count]
        operands, output = [term.replace("...", fresh) for term in operands], output.replace("...", fresh)
    result = [*operands, output]
    return None if any(len(set(term)) != len(term) for term in result) else result


def _same_size(graph: GraphView, node: onnx.NodeProto, operands: Sequence[str], letter: str) -> bool:
    """Whether nothing says that an axis of 1 is repeated in the sum, which MatMul would not do."""
    sizes: list[GraphDim] = []
    for name, term in zip(node.input, operands, strict=True):
        shape = graph.shape(name)
        sizes.append(None if shape is None or len(shape) != len(term) else shape[term.index(letter)])
    return sizes[0] == sizes[1] or 1 not in sizes

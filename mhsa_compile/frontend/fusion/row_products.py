"""Products with constant weights as fusion looks for them: of rows as they lie, and one for each part of a result.

    Reshape(Gemm(Reshape(x), W, b))   ->   MatMul(x, W) + b                what PyTorch's addmm becomes
    Split(MatMul(x, W) + b)           ->   MatMul(x, W_i) + b_i, each i    GPT-2's queries, keys and values

The reshapes and the parts were copies of activations; the parts of a weight are made once, when it is packed. Who asks
for the batch or the length of a result that is cut asks x.
"""

from __future__ import annotations

from itertools import accumulate

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.fusion.linear_pattern import Linear, find_linears
from mhsa_compile.frontend.onnx_graph import GraphView, attributes, is_standard


def as_row_products(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with products of rows for products between reshapes, and with a product for each part of a Split."""
    kinds = {node.op_type for node in model.graph.node}
    if "Gemm" in kinds:
        model = _of_rows(model)
    return _of_parts(model) if "Split" in kinds else model


def _of_rows(model: onnx.ModelProto) -> onnx.ModelProto:
    rewriter = Rewriter(model)
    graph = rewriter.graph
    for linear in find_linears(graph).values():
        split, join = graph.producer(linear.x, "Reshape"), graph.only_consumer(linear.output, "Reshape")
        if linear.nodes[0].op_type != "Gemm" or split is None or join is None:
            continue
        source, rows = graph.dims(split.input[0]), graph.dims(join.output[0])
        if len(rows) != 3 or rows[2] != linear.width or None in rows or source[:2] != rows[:2]:
            continue
        x, (_, features) = split.input[0], graph.shape(linear.x) or (None, None)
        if source[2:] != (features,):  # heads apart: they are joined, and the rows stay as they are
            x = rewriter.node("Reshape", x, rewriter.constant([0, 0, features], "int64"))
        _write(rewriter, linear, x, linear.weight, linear.bias, join.output[0])
        rewriter.place(join)
    return rewriter.finished()


def _of_parts(model: onnx.ModelProto) -> onnx.ModelProto:
    rewriter = Rewriter(model)
    graph = rewriter.graph
    for linear in find_linears(graph).values():
        rank = len(graph.dims(linear.output))
        split, shapes = _split_and_shapes(graph, linear)
        if (
            split is None
            or not graph.is_weight(linear.weight)
            or attributes(split).get("axis", 0) not in (-1, rank - 1)
        ):
            continue
        sizes = [(graph.shape(name) or (None,))[-1] for name in split.output]
        if not all(isinstance(size, int) for size in sizes) or list(accumulate(sizes))[-1] != linear.width:
            continue
        lengths = rewriter.constant(sizes, "int64")
        weights = _parts(rewriter, linear.weight, lengths, len(sizes), axis=1 if linear.transposed else 0)
        biases = [None] * len(sizes) if linear.bias is None else _parts(rewriter, linear.bias, lengths, len(sizes), 0)
        for weight, bias, output in zip(weights, biases, split.output, strict=True):
            _write(rewriter, linear, linear.x, weight, bias, output)
        rewriter.place(split)
        for shape in shapes:
            rewriter.node("Shape", linear.x, output=shape.output[0], **attributes(shape))
            rewriter.place(shape)
    return rewriter.finished()


def _split_and_shapes(graph: GraphView, linear: Linear) -> tuple[onnx.NodeProto | None, list[onnx.NodeProto]]:
    """The Split that reads a result, and what asks for the lengths of its rows, which are those of x; no Split where
    others read it, too."""
    readers, rank = graph.consumers(linear.output), len(graph.dims(linear.x))
    shapes = [node for node in readers if is_standard(node, "Shape") and _leaves_out_last(node, rank)]
    splits = [node for node in readers if is_standard(node, "Split")]
    alone = len(splits) == 1 and len(splits) + len(shapes) == len(readers) and linear.output not in graph.outputs
    return splits[0] if alone else None, shapes


def _leaves_out_last(shape: onnx.NodeProto, rank: int) -> bool:
    """Whether a Shape node does not ask for the last of so many dims."""
    end = attributes(shape).get("end", rank)
    return rank > 0 and (end < 0 or end < rank)


def _parts(rewriter: Rewriter, weight: str, lengths: str, count: int, axis: int) -> list[str]:
    names = [rewriter.fresh(f"{weight}/{number}") for number in range(count)]
    return rewriter.nodes("Split", (weight, lengths), names, axis=axis)


def _write(rewriter: Rewriter, linear: Linear, x: str, weight: str, bias: str | None, output: str) -> None:
    """Writes x W^T + b."""
    if not linear.transposed:
        weight = rewriter.node("Transpose", weight, perm=[1, 0])
    product = rewriter.node("MatMul", x, weight, output=output if bias is None else "")
    if bias is not None:
        rewriter.node("Add", product, bias, output=output)

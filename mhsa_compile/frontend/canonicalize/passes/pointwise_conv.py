"""Convolutions that are linears, and paddings that are numbers.

A convolution of one pixel, step 1, over all channels is a linear of each pixel's channels:
    Conv(x (B, C, ...), w (O, C, 1, ...), b)  ->  MatMul(x with its channels last, w^T) + b, the channels put back
Of what `auto_pad` says nothing depends on the sizes where the steps are 1: it is written as numbers. So is what it says
of a ConvTranspose, always, and an `output_shape` of one whose sizes are known.
"""

from __future__ import annotations

import math

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphView, attributes, is_standard
from mhsa_compile.spec.checks import DTYPES

_WEIGHTS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
"""The place of the weights among the inputs of a convolution."""
_PADDED = (*_WEIGHTS, "MaxPool", "AveragePool", "LpPool")
_CUTTING = ("auto_pad", "output_shape", "output_padding", "pads")
"""What says how large a ConvTranspose's output is."""


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with such convolutions as MatMul, and with paddings as far as they can be attrs."""
    rewriter = Rewriter(model)
    for node in rewriter.graph.nodes:
        if is_standard(node, "Conv") and _is_linear(rewriter.graph, node):
            _as_linear(rewriter, node)
        elif is_standard(node, *_PADDED) and (pads := _pads(rewriter.graph, node)) is not None:
            attrs = {name: value for name, value in attributes(node).items() if name != "auto_pad"}
            attrs.pop("ceil_mode", None)  # of SAME, the sizes are those of the input, divided
            rewriter.nodes(node.op_type, tuple(node.input), list(node.output), **attrs | {"pads": pads})
            rewriter.place(node)
        elif is_standard(node, "ConvTranspose") and (words := _cut(rewriter.graph, node)) is not None:
            attrs = {name: value for name, value in attributes(node).items() if name not in _CUTTING}
            rewriter.nodes(node.op_type, tuple(node.input), list(node.output), **attrs | words)
            rewriter.place(node)
    return rewriter.finished()


def _is_linear(graph: GraphView, node: onnx.NodeProto) -> bool:
    x, weight, *bias = node.input
    dims, attrs = graph.dims(weight), attributes(node)
    alone = len(dims) > 2 and all(size == 1 for size in dims[2:]) and len(graph.dims(x)) == len(dims)
    steps = [*attrs.get("strides", ()), attrs.get("group", 1)]
    constant = weight in graph.initializers and all(name in graph.initializers for name in bias if name)
    return (
        alone
        and constant
        and dims[:2] != (1, 1)
        and graph.dtype(x) in DTYPES
        and all(step == 1 for step in steps)
        and not any(attrs.get("pads", ()))
    )


def _as_linear(rewriter: Rewriter, node: onnx.NodeProto) -> None:
    x, weight, *bias = node.input
    rank = len(rewriter.graph.dims(weight))
    matrix = rewriter.node("Squeeze", weight, rewriter.constant(list(range(2, rank)), "int64"))
    pixels = rewriter.node("Transpose", x, perm=[0, *range(2, rank), 1])
    y = rewriter.node("MatMul", pixels, rewriter.node("Transpose", matrix, perm=[1, 0]))
    if bias and bias[0]:
        y = rewriter.node("Add", y, bias[0])
    rewriter.node("Transpose", y, output=node.output[0], perm=[0, rank - 1, *range(1, rank - 1)])
    rewriter.place(node)


def _pads(graph: GraphView, node: onnx.NodeProto) -> list[int] | None:
    """The paddings that SAME comes to, before each axis, then behind each; None where they are no such numbers."""
    attrs = attributes(node)
    weights = _WEIGHTS.get(node.op_type)
    kind, dims = attrs.get("auto_pad", "NOTSET"), () if weights is None else graph.shape(node.input[weights])
    kernel = attrs.get("kernel_shape", list(dims or ())[2:])
    sizes = graph.dims(node.input[0])[2:] or [None] * len(kernel)
    steps, spread = (attrs.get(name, [1] * len(kernel)) for name in ("strides", "dilations"))
    if not kind.startswith("SAME") or not kernel or not all(isinstance(size, int) for size in kernel):
        return None
    whole = []
    for size, reach, step in zip(sizes, [(k - 1) * d for k, d in zip(kernel, spread, strict=True)], steps, strict=True):
        if step == 1:
            whole.append(reach)
        elif isinstance(size, int):
            whole.append(max((math.ceil(size / step) - 1) * step + reach + 1 - size, 0))
        else:
            return None
    less, more = [pad // 2 for pad in whole], [pad - pad // 2 for pad in whole]
    return [*less, *more] if kind == "SAME_UPPER" else [*more, *less]


def _cut(graph: GraphView, node: onnx.NodeProto) -> dict[str, list[int]] | None:
    """`pads` and `output_padding` of a ConvTranspose that says its outputs' sizes in another way: x's times the strides
    (`auto_pad` of SAME), or `output_shape`. Where that is more than there are sums, the rest lies behind them."""
    attrs, weight = attributes(node), graph.dims(node.input[1])
    kind, shape, rank = attrs.get("auto_pad", "NOTSET"), attrs.get("output_shape"), len(weight) - 2
    kernel = attrs.get("kernel_shape", list(weight[2:]))
    if rank < 1 or not all(isinstance(size, int) for size in kernel) or not (shape or kind.startswith("SAME")):
        return None
    steps, spread = (attrs.get(name, [1] * rank) for name in ("strides", "dilations"))
    added = attrs.get("output_padding", [0] * rank)
    sizes = graph.dims(node.input[0])[2:] or [None] * rank
    whole = []
    for i, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        reach = (kernel[i] - 1) * spread[i] + 1 + added[i] - step  # more than the strides make of x
        if not shape:
            whole.append(reach)
        elif isinstance(size, int):
            whole.append(size * step + reach - shape[-rank:][i])
        else:
            return None
    cut = [max(0, count) for count in whole]
    less, more = [count // 2 for count in cut], [count - count // 2 for count in cut]
    # With an output_shape the standard cuts the larger half in front unless SAME_UPPER is asked for.
    pads = [*less, *more] if kind == "SAME_UPPER" else [*more, *less]
    return {"pads": pads, "output_padding": [a + max(0, -count) for a, count in zip(added, whole, strict=True)]}

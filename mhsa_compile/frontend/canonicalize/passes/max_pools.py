"""The largest of a window as the largest along one axis after the other.

    MaxPool (13 x 13)  ->  MaxPool (13 x 1), MaxPool (1 x 13)

of 26 elements each in the place of 169. What pads, strides, dilations and ceil_mode say of an axis goes with it.
"""

from __future__ import annotations

import math

import onnx

from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import attributes, is_standard

_OF_AXES = {"kernel_shape": 1, "strides": 1, "dilations": 1}
"""Attributes with a number for each axis, and the number that leaves an axis as it is."""


def rewrite(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a MaxPool for each axis where that reads fewer elements."""
    rewriter = Rewriter(model)
    for node in rewriter.graph.nodes:
        kernel = attributes(node).get("kernel_shape", ()) if is_standard(node, "MaxPool") else ()
        if kernel and math.prod(kernel) > sum(kernel) and len(node.output) == 1:
            _by_axes(rewriter, node, len(kernel))
    return rewriter.finished()


def _by_axes(rewriter: Rewriter, node: onnx.NodeProto, rank: int) -> None:
    attrs, value = attributes(node), node.input[0]
    for axis in range(rank):
        own = {word: [none] * rank for word, none in _OF_AXES.items() if word in attrs}
        for word, numbers in own.items():
            numbers[axis] = attrs[word][axis]
        if "pads" in attrs:
            own["pads"] = [pad if i % rank == axis else 0 for i, pad in enumerate(attrs["pads"])]
        output = node.output[0] if axis == rank - 1 else ""
        value = rewriter.node("MaxPool", value, output=output, **attrs | own)
    rewriter.place(node)

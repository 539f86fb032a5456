"""A sink for each head, one more term of its softmax's sum, as eager code writes it (gpt-oss).

together = Concat(scores (B, H, L, S), sinks (B, H, L, 1));  weights = Softmax(together - max(together))[..., :-1]
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from mhsa_compile.frontend.canonicalize.decomposed.operands import AttentionOperands
from mhsa_compile.frontend.canonicalize.decomposed.scores import SAME, NotRecognised
from mhsa_compile.frontend.canonicalize.rewriting.constant_values import KnownGraph
from mhsa_compile.frontend.canonicalize.rewriting.rewriter import Rewriter
from mhsa_compile.frontend.onnx_graph import GraphView, attributes
from mhsa_compile.nn import mhsa_operator

_PLACE = mhsa_operator.INPUTS.index("sinks")
"""Of the sinks (H,) among the inputs of our Attention."""


@dataclass(frozen=True)
class SoftmaxInput:
    """What a Softmax is of: the scores, and beside them perhaps `sinks`, one for each head. `weights` are those of the
    scores."""

    scores: str
    weights: str
    sinks: str = ""

    @property
    def is_standard(self) -> bool:
        """Whether the standard's Attention can say it, and adding one number to all scores changes nothing."""
        return not self.sinks

    def node_inputs(self, rewriter: Rewriter, inputs: list[str], operands: AttentionOperands, probs: str) -> list[str]:
        """The inputs of Attention, of which `inputs` are the first. `probs` are its weights as others read them. Raises
        NotRecognised."""
        if self.is_standard:
            return inputs
        return [*inputs, *[""] * (_PLACE - len(inputs)), _of_heads(rewriter, self.sinks, operands, probs)]


def softmax_input(graph: KnownGraph, softmax: onnx.NodeProto) -> SoftmaxInput:
    """The scores before a Softmax, and its sinks where it has them. Raises NotRecognised."""
    value = _before_shift(graph, softmax.input[0])
    both = graph.producer(value, "Concat")
    if both is None or len(both.input) != 2 or not _is_last(graph, value, attributes(both)["axis"]):
        return SoftmaxInput(value, softmax.output[0])
    sinks, weights = _each_head(graph, both.input[1]), _cut(graph, softmax)
    if not sinks or not weights:
        what = "what is no sink of each head" if not sinks else "a sink, whose weight is not cut off behind the Softmax"
        raise NotRecognised(f"Concat {both.name or value!r} joins scores and {what}")
    return SoftmaxInput(both.input[0], weights, sinks)


def _of_heads(rewriter: Rewriter, sinks: str, operands: AttentionOperands, probs: str) -> str:
    """The sinks (H,) of an attention. Raises NotRecognised."""
    graph = rewriter.graph
    heads = operands.scores[1]
    if operands.rank != 4 or graph.dims(sinks)[-3:] not in ((heads, 1, 1), (heads,)):
        raise NotRecognised(f"the sinks {sinks!r} are {graph.shape(sinks)}, not one for each of {heads} heads")
    if graph.dtype(sinks) != operands.dtype:
        raise NotRecognised(f"the sinks {sinks!r} are {graph.dtype(sinks)}, the values are {operands.dtype}")
    if probs:
        raise NotRecognised(f"{probs!r}, weights beside a sink, are read by others")
    if graph.shape(sinks) == (heads,):
        return sinks
    return rewriter.node("Reshape", sinks, rewriter.constant([heads], "int64"))


def _before_shift(graph: KnownGraph, value: str) -> str:
    """The value before its largest was taken off, which a softmax does not see."""
    node = graph.producer(value)
    while node is not None and node.op_type in SAME:
        node = graph.producer(node.input[0])
    if node is None or node.op_type != "Sub":
        return value
    top = graph.producer(node.input[1], "ReduceMax")
    if top is None or top.input[0] != node.input[0] or attributes(top).get("keepdims", 1) != 1:
        return value
    axes = graph.array(top.input[1]) if len(top.input) > 1 else None
    along = axes is not None and axes.size == 1 and _is_last(graph, node.input[0], int(axes.flat[0]))
    return str(node.input[0]) if along else value


def _each_head(graph: GraphView, value: str) -> str:
    """What `value` (B, H, L, 1) has one number of for each head: an array (H,), or (1, H, 1, 1). Else an empty name."""
    dims = graph.dims(value)
    if len(dims) != 4 or dims[-1] != 1:
        return ""
    expand = graph.producer(value, "Expand")
    name = value if expand is None else str(expand.input[0])
    if graph.shape(name) not in ((1, dims[1], 1, 1), (dims[1], 1, 1)):
        return ""
    first = name
    while (node := graph.producer(first)) is not None and node.op_type in ("Reshape", "Unsqueeze", *SAME):
        first = str(node.input[0])
        if graph.shape(first) == (dims[1],) and graph.dtype(first) == graph.dtype(name):
            return first
    return name


def _cut(graph: KnownGraph, softmax: onnx.NodeProto) -> str:
    """The weights without the last of each row, if nothing else is made of a Softmax. Else an empty name."""
    value = softmax.output[0]
    while len(readers := graph.consumers(value)) == 1 and readers[0].op_type in SAME and value not in graph.outputs:
        value = readers[0].output[0]
    if value in graph.outputs or len(readers) != 1 or readers[0].op_type != "Slice":
        return ""
    cut = readers[0]
    bounds = [graph.array(name) if name else None for name in [*cut.input[1:], "", ""][:4]]
    if any(one is None or one.size != 1 for one in bounds[:3]) or (bounds[3] is not None and bounds[3].flat[0] != 1):
        return ""
    start, end, axis = (int(one.flat[0]) for one in bounds[:3] if one is not None)
    return str(cut.output[0]) if start == 0 and end == -1 and _is_last(graph, value, axis) else ""


def _is_last(graph: GraphView, value: str, axis: int) -> bool:
    return axis == -1 or axis == len(graph.dims(value)) - 1

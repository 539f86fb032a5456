"""What a row cannot say by names and counts alone: of which nodes an operator is understood.

Each condition gives None, or what is expected and what came. What nobody knows of a value (its dtype, its rank) is not
held against a node here: the converter sees it.
"""

from __future__ import annotations

import onnx

from mhsa_compile.frontend.onnx_graph import GraphView, attributes

Mismatch = tuple[str, str] | None


def whole_number_remainder(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Mod without fmod: of whole numbers alone, as the sign of a zero is the divisor's for others."""
    kind = graph.dtype(node.input[0])
    if attributes(node).get("fmod", 0) or kind is None or not _floating(kind):
        return None
    return "whole numbers, or fmod=1", kind


def floating_base(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Pow: of a floating base."""
    kind = graph.dtype(node.input[0])
    return None if kind is None or _floating(kind) else ("a floating base", kind)


def unsigned_operands(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """BitShift: of numbers without a sign."""
    kind = graph.dtype(node.input[0])
    return None if kind is None or kind.startswith("uint") else ("whole numbers without a sign", kind)


def an_axis_left(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """RMSNormalization: over fewer axes than all."""
    dims, axis = graph.shape(node.input[0]), attributes(node).get("axis", -1)
    if dims is None or axis % max(len(dims), 1) != 0 or not dims:
        return None
    return "an axis before those it is of", f"axis={axis}, of {len(dims)} axes"


def not_in_training(graph: GraphView, node: onnx.NodeProto) -> Mismatch:
    """Dropout: at inference, where it passes its input on."""
    training = graph.constant(node.input[2]) if len(node.input) > 2 and node.input[2] else False
    if training is None:
        return "training_mode as a constant", "one that is computed or comes by the call"
    return ("training_mode=false", "true") if bool(training) else None


def _floating(kind: str) -> bool:
    return kind.startswith(("float", "bfloat"))
